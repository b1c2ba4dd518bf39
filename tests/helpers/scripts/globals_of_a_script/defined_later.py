"""A function may use a global that is defined after the ranks received the function."""

from script_checks import error_of, same

from parawrap import Platform

platform = Platform(device="cpu", n_cpus=2, verbose=False)


def use(is_defined):
    return later if is_defined else 0


with platform.open() as ranks:
    same(ranks(use, False), (0, 0))
    same(type(error_of(ranks, use, True)), NameError)
    later = 5
    same(ranks(use, True), (5, 5))
