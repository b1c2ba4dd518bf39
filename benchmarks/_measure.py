"""Timing: arms take turns, and their medians are compared.

Other load on the machine then affects all arms alike. ``python -m benchmarks`` sets threads and allocator for the whole
process before torch is loaded.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TypeVar

import torch

__all__ = [
    "Arm",
    "Ratio",
    "Row",
    "Work",
    "arm_of",
    "in_turn",
    "ratio_of",
    "take_turns",
    "threads",
    "times_in_turn",
    "wall_us",
]

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
Work = Callable[[], object]


@dataclass(frozen=True)
class Arm:
    """The times of one way of doing the work, in microseconds per call."""

    median_us: float
    low_us: float
    high_us: float

    def __str__(self) -> str:
        return f"{self.median_us:,.1f} us ({self.low_us:,.1f} to {self.high_us:,.1f})"


@dataclass(frozen=True)
class Ratio:
    """The median ratio of two arms' times over all rounds, and its confidence interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True)
class Row:
    """One comparison: its arms, the result, the goal, and True in `held` if the result meets the goal.

    ``extra["limits"]`` maps the name of a bottleneck to the best speed-up that it allows.
    """

    name: str
    arms: Mapping[str, Arm]
    verdict: str
    wanted: str
    held: bool
    peers: str = ""
    extra: Mapping[str, object] = field(default_factory=dict)

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def take_turns(arms: Mapping[str, Work], *, rounds: int, calls: int = 1, settle: int = 0) -> dict[str, Arm]:
    """Time each arm as `times_in_turn` does, and return medians and quartiles."""
    times = times_in_turn(arms, rounds=rounds, calls=calls, settle=settle)
    return {name: arm_of(values) for name, values in times.items()}


def times_in_turn(arms: Mapping[str, Work], *, rounds: int, calls: int = 1, settle: int = 0) -> dict[str, list[float]]:
    """Time each arm `rounds` times, in turn, and return the microseconds per call of each round.

    Args:
        arms: The work of each arm. Each arm first makes one turn that is not timed.
        rounds: The number of timed turns of each arm.
        calls: The number of calls in one turn.
        settle: The number of untimed calls before each turn. They outlast OpenMP threads of the arm before, which spin.
    """

    def turn(work: Work) -> float:
        for _ in range(settle):
            work()
        return wall_us(work, calls)

    for work in arms.values():
        wall_us(work, calls)
    return in_turn({name: partial(turn, work) for name, work in arms.items()}, rounds)


def in_turn(arms: Mapping[K, Callable[[], T]], rounds: int) -> dict[K, list[T]]:
    """Return the results of each arm's turns. Every second round runs in reverse order."""
    given: dict[K, list[T]] = {name: [] for name in arms}
    order = list(arms)
    for turn in range(rounds):
        for name in order if turn % 2 else reversed(order):
            given[name].append(arms[name]())
    return given


def wall_us(work: Work, calls: int = 1) -> float:
    """Return the microseconds of wall time per call."""
    start = time.perf_counter()
    for _ in range(calls):
        work()
    return (time.perf_counter() - start) / calls * 1e6


def ratio_of(values: Sequence[float], others: Sequence[float]) -> Ratio:
    """Return the ratio of times from the same rounds.

    Each round gives one ratio: a disturbance affects both of its times. The interval covers the median with 95%
    confidence for any distribution. Its ends are the ratios with ranks 0.98 sqrt(n) below and above the middle (the sign
    test; David and Nagaraja, Order Statistics, 2003, section 7.1).
    """
    ratios = sorted(value / other for value, other in zip(values, others, strict=True))
    rank = max(0, math.floor(len(ratios) / 2 - 0.98 * math.sqrt(len(ratios))))
    return Ratio(statistics.median(ratios), ratios[rank], ratios[-1 - rank])


def arm_of(values: Sequence[float]) -> Arm:
    """Return the median and the quartiles of times in microseconds."""
    low, median, high = statistics.quantiles(values, n=4) if len(values) > 1 else [*values] * 3
    return Arm(median, low, high)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Give the caller's operators `count` threads. Lanes that start inside share them."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
