"""Generic functions and methods arrive with their implementations, which may use them."""

import functools
import threading

from script_checks import refuses, same

from parawrap import Platform

platform = Platform(device="cpu", n_cpus=2, verbose=False)

SCALE, LOCK = 2, threading.Lock()


class Leaf:
    pass


@functools.singledispatch
def total(value: object):
    """Sum."""
    return SCALE


@total.register
def _(value: list):
    return sum(map(total, value))


@total.register(Leaf)
def of_leaf(value):
    return 5 * SCALE


@functools.singledispatch
def single(value):
    return value


class Reader:
    @functools.singledispatchmethod
    def read(self, value):
        return "other"

    @read.register(int)
    def _(self, value):
        return total([value, Leaf()])

    @functools.singledispatchmethod
    @classmethod
    def name(cls, value):  # noqa: ARG003
        return cls.__name__


def use(reader):
    found = total([1, [Leaf()], 2]), reader.read(""), reader.read(1), Reader.name(3)
    return found, (total.__name__, total.__doc__, total.__module__, total.__wrapped__(1))


with platform.open() as ranks:
    same(ranks(use, Reader())[0], ((14, "other", 12, "Reader"), ("total", "Sum.", "__main__", 2)))
    SCALE = 3
    same(ranks(use, Reader())[1][0], (21, "other", 18, "Reader"))
    same(ranks(total, [1, Leaf()]), (18, 18))
    single.register(Leaf)(lambda value: LOCK)
    refuses(ranks, single, 1, texts=["the global 'LOCK' cannot be sent"])
    Reader.locks = [threading.Lock()]
    refuses(ranks, max, Reader(), texts=["args[0]'s class Reader.locks[0] cannot be sent"])
