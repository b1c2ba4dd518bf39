"""How everything here is measured: the arms take turns, and medians are compared.

The machine's other work then falls on all arms alike. Threads and allocator are the same for all arms of a run:
``python -m benchmarks`` fixes both before torch is loaded.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field

__all__ = ["Arm", "Row", "arm_of", "take_turns"]


@dataclass(frozen=True)
class Arm:
    """The times of one way of doing a thing, in microseconds a call."""

    median_us: float
    low_us: float
    high_us: float

    def __str__(self) -> str:
        return f"{self.median_us:,.1f} us ({self.low_us:,.1f} to {self.high_us:,.1f})"


@dataclass(frozen=True)
class Row:
    """One comparison: what was done, by whom, what was asked for, and whether it held."""

    name: str
    arms: Mapping[str, Arm]
    verdict: str
    wanted: str
    held: bool
    peers: str = ""
    extra: Mapping[str, object] = field(default_factory=dict)

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def take_turns(arms: Mapping[str, Callable[[], object]], *, rounds: int, calls: int = 1) -> dict[str, Arm]:
    """Time each arm `rounds` times, in turn, `calls` calls at a time; medians, and the middle half of the times."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for work in arms.values():  # warm up
        for _ in range(calls):
            work()
    order = list(arms)
    for turn in range(rounds):
        for name in order if turn % 2 else reversed(order):
            work = arms[name]
            start = time.perf_counter()
            for _ in range(calls):
                work()
            times[name].append((time.perf_counter() - start) / calls * 1e6)
    return {name: arm_of(values) for name, values in times.items()}


def arm_of(values: list[float]) -> Arm:
    """From times in microseconds."""
    low, median, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return Arm(median, low, high)
