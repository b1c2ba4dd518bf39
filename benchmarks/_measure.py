"""Times of arms that take turns, and the results computed from them.

Turns spread other load on the machine evenly over the arms. ``python -m benchmarks`` sets threads
and allocator for the whole process before torch is loaded.
"""

from __future__ import annotations

import logging
import math
import operator
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TypeVar

import torch

__all__ = [
    "Arm",
    "Ratio",
    "Result",
    "Row",
    "Work",
    "arm_of",
    "in_turn",
    "overheads",
    "ratio_of",
    "take_turns",
    "threads",
    "times_in_turn",
    "wall_us",
]

_log = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
Work = Callable[[], object]


_RELATIONS: Mapping[str, Callable[[float, float], bool]] = {
    "at least": operator.ge,
    "at most": operator.le,
    "under": operator.lt,
    "exactly": operator.eq,
}


@dataclass(frozen=True)
class Arm:
    """Median and quartiles of the times of one arm, in microseconds per call."""

    median_us: float
    low_us: float
    high_us: float


@dataclass(frozen=True)
class Ratio:
    """The median ratio of two arms' times over all rounds, and its confidence interval."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Result:
    """One quantity that a benchmark computes, its unit, its range if one was measured, and its goal
    if it has one.

    The range is the 95% confidence interval of a ratio, and the quartiles of any other quantity.
    """

    quantity: str
    value: float
    unit: str
    low: float | None = None
    high: float | None = None
    goal: str = ""
    met: bool = True

    def held_to(self, relation: str, limit: float) -> Result:
        """Return this result with a goal: "at least", "at most", "under", or "exactly" the limit.

        >>> Result("overhead", 7.0, "us").held_to("under", 5.0).met
        False
        """
        return replace(
            self, goal=f"{relation} {limit:,g}", met=_RELATIONS[relation](self.value, limit)
        )


@dataclass(frozen=True)
class Row:
    """One benchmark: the times of its arms, and the results computed from them.

    Args:
        name: The work that all arms do.
        arms: The times of each arm.
        results: The results, each with its own goal.
        peers: The software that parawrap is compared with.
        note: A remark, for instance the reason that an arm was not measured.
        extra: Other data for the JSON file. ``extra["markdown"]`` is a table that the page shows as
            it is.
    """

    name: str
    arms: Mapping[str, Arm]
    results: Sequence[Result]
    peers: str = ""
    note: str = ""
    extra: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        results = ", ".join(
            f"{each.quantity} {each.value:,.4g} {each.unit}" for each in self.results
        )
        # A suite that is ended early leaves its rows in its log
        _log.info("%s: %s", self.name, results)

    @property
    def met(self) -> bool:
        """True if every result meets its goal."""
        return all(result.met for result in self.results)

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def take_turns(
    arms: Mapping[str, Work], *, rounds: int, calls: int = 1, settle: int = 0
) -> dict[str, Arm]:
    """Time each arm as `times_in_turn` does, and return medians and quartiles."""
    times = times_in_turn(arms, rounds=rounds, calls=calls, settle=settle)
    return {name: arm_of(values) for name, values in times.items()}


def times_in_turn(
    arms: Mapping[str, Work], *, rounds: int, calls: int = 1, settle: int = 0
) -> dict[str, list[float]]:
    """Time each arm `rounds` times, in turn, and return the microseconds per call of each round.

    Args:
        arms: The work of each arm. Each arm first makes one turn that is not timed.
        rounds: The number of timed turns of each arm.
        calls: The number of calls in one turn.
        settle: The number of untimed calls before each turn. The OpenMP threads of the previous arm
            spin for a while; these calls outlast them.
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
    """Return the median ratio of times from the same rounds, and its 95% confidence interval.

    Each round gives one ratio, because a disturbance affects both times of a round. The interval is
    that of the sign test, which holds for any distribution: its ends have ranks 0.98 sqrt(n) below
    and above the middle (David and Nagaraja, Order Statistics, 2003, section 7.1).
    """
    ratios = sorted(value / other for value, other in zip(values, others, strict=True))
    rank = max(0, math.floor(len(ratios) / 2 - 0.98 * math.sqrt(len(ratios))))
    return Ratio(statistics.median(ratios), ratios[rank], ratios[-1 - rank])


def overheads(
    ours: tuple[str, float], theirs: tuple[str, float], least: float | None
) -> list[Result]:
    """Return the overheads of two arms in microseconds, and their ratio.

    The goal is that parawrap's overhead is at most 1/`least` of the peer's. If parawrap adds no
    time, its overhead must not exceed the peer's.
    """
    (our_name, our_us), (their_name, their_us) = ours, theirs
    own, peer = (
        Result(f"overhead, {our_name}", our_us, "us"),
        Result(f"overhead, {their_name}", their_us, "us"),
    )
    if our_us <= 0:
        return [own if least is None else own.held_to("at most", their_us), peer]
    ratio = Result(
        f"overhead of {their_name} divided by that of {our_name}", their_us / our_us, "ratio"
    )
    return [own, peer, ratio if least is None else ratio.held_to("at least", least)]


def arm_of(values: Sequence[float]) -> Arm:
    """Return the median and the quartiles of times in microseconds."""
    low, median, high = statistics.quantiles(values, n=4) if len(values) > 1 else [*values] * 3
    return Arm(median, low, high)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Run torch operators on `count` threads inside the block.

    Lanes that start inside share these threads.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
