"""One way of running a call. All of them give the same answer; how long they take is what a race finds out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["PLAIN", "Way", "on_accelerators", "on_cpu"]


class Way(NamedTuple):
    """How a call is run.

    Attributes:
        lanes: how many of the lanes it is cut over; 1: it is not cut.
        threads: how many threads an operator may use in each lane; 0: as many as the caller has.
        own_backward: each lane runs its own part of backward; else the thread that calls backward runs all of it.
        traced: what runs is a trace of the module, which holds no interpreter lock.
        memory_kept: the process keeps the memory that it frees; see `hold_memory`.
        weights: each lane's share of the rows, in proportion; empty: equal shares.
    """

    lanes: int = 1
    threads: int = 0
    own_backward: bool = False
    traced: bool = False
    memory_kept: bool = False
    weights: tuple[int, ...] = ()

    def __str__(self) -> str:
        threads = f"{self.threads} thread{'s' * (self.threads != 1)}" if self.threads else ""
        lanes = f"{self.lanes} lanes of {threads}".removesuffix(" of ")
        words = [lanes if self.lanes > 1 else threads or "plain"]
        if self.weights:
            words.append(f"shares {':'.join(map(str, self.weights))}")
        if self.own_backward:
            words.append("each its own backward")
        if self.traced:
            words.append("traced")
        if self.memory_kept:
            words.append("memory kept")
        return ", ".join(words)


PLAIN = Way()
"""The call as it would be without parawrap."""


def on_cpu(lanes: int, threads: int, *, rows: int, differentiable: bool) -> list[Way]:
    """The ways worth trying on the CPU, plain first.

    Args:
        lanes: how many there are.
        threads: how many threads of operators may run at once, whether in one lane or in all of them together.
        rows: of the call.
        differentiable: whether a backward pass may follow.
    """
    ways = [PLAIN]
    for count in _counts(min(lanes, rows)):
        way = Way(count, max(1, threads // count))
        ways.append(way)
        if differentiable:
            ways.append(way._replace(own_backward=True))
    if threads > 1:
        ways.append(Way(threads=1))  # the last: it may be slower than the others by as many times as there are cores
    return ways


def on_accelerators(lanes: int, *, rows: int) -> list[Way]:
    """The ways worth trying where each lane is a device: on the first alone, on some, on all of them."""
    return [PLAIN, *(Way(count) for count in _counts(min(lanes, rows)))]


def _counts(most: int) -> Sequence[int]:
    """2, 4, 8 and so on, up to the most, and that itself."""
    powers = [2**power for power in range(1, most.bit_length()) if 2**power < most]
    return [*powers, most] if most > 1 else []
