"""How everything here is measured: the arms take turns, and medians are compared.

The machine's other work then falls on all arms alike. Threads and allocator are the same for all arms of a run:
``python -m benchmarks`` fixes both before torch is loaded.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TypeVar

__all__ = ["Arm", "Ratio", "Row", "Work", "arm_of", "in_turn", "ratio_of", "take_turns", "wall_us"]

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
Work = Callable[[], object]


@dataclass(frozen=True)
class Arm:
    """The times of one way of doing a thing, in microseconds a call."""

    median_us: float
    low_us: float
    high_us: float

    def __str__(self) -> str:
        return f"{self.median_us:,.1f} us ({self.low_us:,.1f} to {self.high_us:,.1f})"


@dataclass(frozen=True)
class Ratio:
    """How many times as long one arm took as another: the median of the rounds, and between what it lies."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True)
class Row:
    """One comparison: what was done, by whom, what was asked for, and whether it held.

    ``extra["limits"]``, by name, is how many times as fast it could be at most, by what stands in its way.
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
    """Time each arm `rounds` times, in turn, `calls` calls at a time; medians, and the middle half of the times.

    Each turn begins with `settle` calls that are not timed, where one arm's leftovers (threads that still spin) would
    otherwise fall on the next.
    """

    def turn(work: Work) -> float:
        for _ in range(settle):
            work()
        return wall_us(work, calls)

    for work in arms.values():  # warm up
        wall_us(work, calls)
    times = in_turn({name: partial(turn, work) for name, work in arms.items()}, rounds)
    return {name: arm_of(values) for name, values in times.items()}


def in_turn(arms: Mapping[K, Callable[[], T]], rounds: int) -> dict[K, list[T]]:
    """What each arm gave at each of its turns; every other round goes backwards."""
    given: dict[K, list[T]] = {name: [] for name in arms}
    order = list(arms)
    for turn in range(rounds):
        for name in order if turn % 2 else reversed(order):
            given[name].append(arms[name]())
    return given


def wall_us(work: Work, calls: int = 1) -> float:
    """Microseconds a call, by the wall clock."""
    start = time.perf_counter()
    for _ in range(calls):
        work()
    return (time.perf_counter() - start) / calls * 1e6


def ratio_of(values: Sequence[float], others: Sequence[float]) -> Ratio:
    """Of times that were taken in the same rounds.

    Each round gives one ratio, so that what disturbs a whole round disturbs both of its times. The bounds hold the median
    with 95% confidence whatever the distribution: they are the ratios whose ranks are 0.98 sqrt(n) off the middle (the sign
    test; David and Nagaraja, Order Statistics, 2003, section 7.1).
    """
    ratios = sorted(value / other for value, other in zip(values, others, strict=True))
    rank = max(0, math.floor(len(ratios) / 2 - 0.98 * math.sqrt(len(ratios))))
    return Ratio(statistics.median(ratios), ratios[rank], ratios[-1 - rank])


def arm_of(values: Sequence[float]) -> Arm:
    """From times in microseconds."""
    low, median, high = statistics.quantiles(values, n=4) if len(values) > 1 else [*values] * 3
    return Arm(median, low, high)
