"""Large globals that are unchanged are not pickled again."""

from script_checks import same

from parawrap import Platform

platform = Platform(device="cpu", n_cpus=2, verbose=False)


class Counted:
    pickled = 0

    def __init__(self, rows):
        self.rows = rows

    def __reduce__(self):
        Counted.pickled += 1
        return Counted, (self.rows,)


table, rows = Counted([1] * 10), list(range(100_000))


def use():
    return len(table.rows) + len(rows)


with platform.open() as ranks:
    same([ranks(use) for _ in range(3)], [(100_010, 100_010)] * 3)
    same(Counted.pickled, 1)
