"""The cost of a call by its number of lanes, and by its number of leaves."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch

from benchmarks._measure import Arm, Result, Row, take_turns
from parawrap import parallel

__all__ = ["BARE", "CALL", "exponents", "growth_row", "rows", "upper_half"]

CALL, BARE = "parallel call", "split and cat alone"
_LANES = (1, 2, 4, 8, 16, 32, 64)
_LEAVES = (1, 10, 100, 1_000, 10_000)
_LANES_FOR_LEAVES = 4
# An exponent of 1 is linear growth. torch's own operators may grow faster (garbage collection,
# caches); parawrap may add this much.
_SLACK = 0.1

T = TypeVar("T")
Costs = Mapping[int, tuple[Arm, Arm]]


def rows() -> list[Row]:
    """Measure the cost by lanes, and by leaves over four lanes."""
    by_lanes = {lanes: _cost(lanes, 1, rounds=100) for lanes in _LANES}
    by_leaves = {
        leaves: _cost(_LANES_FOR_LEAVES, leaves, rounds=20 if leaves > 100 else 100)
        for leaves in _LEAVES
    }
    return [growth_row("lanes", by_lanes), growth_row("leaves", by_leaves)]


def _cost(lanes: int, leaves: int, rounds: int) -> tuple[Arm, Arm]:
    """Time an identity call on tensors of 64x16, and torch's operators alone."""
    values = [torch.randn(64, 16) for _ in range(leaves)]
    with parallel(_same, ["cpu"] * lanes, out_dims=0) as p:
        arms = take_turns(
            {CALL: lambda: p(values), BARE: lambda: _bare(values, lanes)}, rounds=rounds
        )
    return arms[CALL], arms[BARE]


def _same(value: list[torch.Tensor]) -> list[torch.Tensor]:
    return value


def _bare(values: list[torch.Tensor], lanes: int) -> list[torch.Tensor]:
    """Split and join each leaf once, as any implementation must."""
    shards = [value.split_with_sizes([64 // lanes] * lanes) for value in values]
    return [torch.cat(parts) for parts in shards]


def growth_row(counted: str, costs: Costs) -> Row:
    """Return the row for these times, by the number of lanes or leaves."""
    ours, bare = (
        _exponent({count: pair[i].median_us for count, pair in costs.items()}) for i in (0, 1)
    )
    times = [
        Result(f"{arm}, {counted}: {count:,}", each.median_us, "us", each.low_us, each.high_us)
        for count, pair in costs.items()
        for arm, each in zip((CALL, BARE), pair, strict=True)
    ]
    return Row(f"growth with {counted}", {}, [*exponents(ours, bare), *times])


def exponents(ours: float, bare: float) -> list[Result]:
    """Return both exponents.

    The goal is linear growth, or the growth of torch's operators, plus a tolerance.
    """
    limit = round(max(1.0, bare) + _SLACK, 2)
    return [
        Result(CALL, ours, "exponent").held_to("at most", limit),
        Result(BARE, bare, "exponent"),
    ]


def upper_half(values: Sequence[T]) -> Sequence[T]:
    """Return the second half of the values, with the middle one if their number is odd."""
    return values[len(values) // 2 :]


def _exponent(costs: dict[int, float]) -> float:
    """Fit a power law to the upper half of the counts, where the fixed cost of a call matters
    least.
    """
    upper = upper_half(list(costs.items()))
    return statistics.linear_regression(
        [math.log(n) for n, _ in upper], [math.log(us) for _, us in upper]
    ).slope
