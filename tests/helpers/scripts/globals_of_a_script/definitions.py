"""Redefined functions and classes arrive, also those that others use. Children and objects of a
redefined class keep it.
"""

import math

from script_checks import same

from parawrap import Platform

platform = Platform(device="cpu", n_cpus=2, verbose=False)


def helper():
    return 1


class Thing:
    def name(self):
        return "first"


class Child(Thing):
    pass


Thing.child, thing = Child, Thing()


def make():  # noqa: RET503 (the last line never runs)
    def inner():
        return 1 if helper else unset

    return inner
    unset = 0  # never runs: `inner` has a variable without a value


made = make()


def use():
    return helper(), Thing().name(), Child().name()


def outer():
    return use()


with platform.open() as ranks:
    same([ranks(outer)[0], ranks(use)[1]], [(1, "first", "first")] * 2)
    same(ranks(lambda: (Thing.child is Child, thing.name(), made())), ((True, "first", 1),) * 2)

    def helper():
        return 2

    class Thing:
        def name(self):
            return "second"

    same(ranks(outer)[0], (2, "second", "first"))
    same(ranks(lambda: thing.name()), ("first", "first"))

    def helper():  # noqa: F811 (the third one)
        return math.sqrt(9)

    same(ranks(outer)[0][0], 3.0)
