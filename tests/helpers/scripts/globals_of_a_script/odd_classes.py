"""Classes that cloudpickle refuses, or makes without their slots."""

import functools
import typing

from script_checks import same

from parawrap import Platform

platform = Platform(device="cpu", n_cpus=2, verbose=False)


class Pair(typing.NamedTuple):
    a: int


class Cached:
    @functools.cached_property
    def value(self):
        return 3


with platform.open() as ranks:
    same(ranks(lambda pair: (pair, Pair(2), Cached().value), Pair(1))[0], (Pair(1), Pair(2), 3))
