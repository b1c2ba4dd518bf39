"""``global model`` in one call is there in the next, in each rank its own, and not here."""

from script_checks import same

from parawrap import Platform, current_rank

platform = Platform(device="cpu", n_cpus=2, verbose=False)


def load(size):
    global model
    model = [current_rank().global_rank] * size


def total():
    return sum(model)


with platform.open() as ranks:
    ranks(load, 3)
    same([ranks(total), ranks(lambda: len(model))], [(0, 3), (3, 3)])
    ranks(lambda: model.append(5))
    same([ranks(total), ranks[1](total), "model" in globals()], [(5, 8), 8, False])
    ranks[1](load, 1)
    same(ranks(total), (5, 1))
