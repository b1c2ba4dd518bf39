"""How the cost of a call grows with its lanes and its leaves."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import matplotlib as mpl
import torch

from benchmarks._measure import Row, take_turns
from parawrap import parallel

mpl.use("Agg")
import matplotlib.pyplot as plt

LANES = (1, 2, 4, 8, 16, 32, 64)
LEAVES = (1, 10, 100, 1_000, 10_000)
_LANES_FOR_LEAVES = 4
# An exponent of 1 is linear growth. torch's own operators may grow faster (garbage collection, caches); parawrap may add
# this much.
_SLACK = 0.1


Costs = dict[int, tuple[float, float]]


def rows(pictures: Path | None) -> list[Row]:
    """Measure the cost by lanes and by leaves, and draw both into the folder, if given."""
    by_lanes = {lanes: _cost(lanes, 1, rounds=100) for lanes in LANES}
    by_leaves = {leaves: _cost(_LANES_FOR_LEAVES, leaves, rounds=20 if leaves > 100 else 100) for leaves in LEAVES}
    if pictures is not None:
        _draw(by_lanes, by_leaves, pictures / "growth.png")
    return [_row("lanes", by_lanes), _row("leaves", by_leaves)]


def _cost(lanes: int, leaves: int, rounds: int) -> tuple[float, float]:
    """Return the microseconds of an identity call on tensors of 64x16, and of torch's operators alone."""
    values = [torch.randn(64, 16) for _ in range(leaves)]
    with parallel(_same, ["cpu"] * lanes, out_dims=0) as p:
        arms = take_turns({"call": lambda: p(values), "bare": lambda: _bare(values, lanes)}, rounds=rounds)
    return arms["call"].median_us, arms["bare"].median_us


def _same(value: list[torch.Tensor]) -> list[torch.Tensor]:
    return value


def _bare(values: list[torch.Tensor], lanes: int) -> list[torch.Tensor]:
    """Split and join each leaf once, as any implementation must."""
    shards = [value.split_with_sizes([64 // lanes] * lanes) for value in values]
    return [torch.cat(parts) for parts in shards]


def _row(what: str, costs: Costs) -> Row:
    ours, bare = (_exponent({count: pair[i] for count, pair in costs.items()}) for i in (0, 1))
    listed = {f"{count:,}": f"{call:,.1f} ({bare:,.1f})" for count, (call, bare) in costs.items()}
    verdict = f"cost ~ {what}^{ours:.2f}; torch's operators alone ~ {what}^{bare:.2f}"
    held = ours <= max(1.0, bare) + _SLACK
    return Row(
        f"growth in {what}, us per call (split and cat alone)",
        {},
        verdict,
        "linear, as the operators are",
        held,
        extra={"us": listed},
    )


def _exponent(costs: dict[int, float]) -> float:
    """Fit a power law to the upper half of the counts, where the fixed cost of a call matters least."""
    upper = list(costs.items())[len(costs) // 2 :]
    return statistics.linear_regression([math.log(n) for n, _ in upper], [math.log(us) for _, us in upper]).slope


def _draw(by_lanes: Costs, by_leaves: Costs, path: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axes, costs, label in (
        (left, by_lanes, "lanes (1 leaf)"),
        (right, by_leaves, f"leaves ({_LANES_FOR_LEAVES} lanes)"),
    ):
        counts = list(costs)
        axes.loglog(counts, [call for call, _ in costs.values()], "o-", label="parallel call, median")
        axes.loglog(counts, [bare for _, bare in costs.values()], "s-", color="C1", label="split and cat alone")
        last = counts[-1]
        axes.loglog(counts, [costs[last][0] * count / last for count in counts], "--", color="gray", label="linear")
        axes.set_xlabel(label)
        axes.set_ylabel("microseconds per call")
        axes.grid(visible=True, which="both", alpha=0.3)
        axes.legend()
    figure.suptitle("Cost of a parallel call whose function returns its input")
    figure.savefig(path, dpi=120)
    plt.close(figure)
