"""A global that the ranks assigned is theirs until a function deletes it there."""

from script_checks import same

from parawrap import Platform

platform = Platform(device="cpu", n_cpus=2, verbose=False)

STEP = 1


def advance():
    global STEP
    STEP += 1
    return STEP


def forget():
    global STEP
    del STEP


with platform.open() as ranks:
    same(ranks(advance), (2, 2))
    STEP = 10
    same(ranks(advance), (3, 3))
    ranks(forget)
    same(ranks(advance), (11, 11))
