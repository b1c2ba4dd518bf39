"""The overhead benchmark: its arms, results, and goals. No test depends on a time."""

from __future__ import annotations

import pytest
import torch

from benchmarks import overhead
from benchmarks._measure import Arm
from benchmarks.overhead import OURS, PLAIN, overhead_row


def times(ours, bare, pool):
    medians = {PLAIN: 200.0, OURS: ours, "bare lanes": bare, "persistent ThreadPoolExecutor": pool}
    return {name: Arm(median, median, median) for name, median in medians.items()}


@pytest.mark.parametrize(
    ("ours", "bare", "pool", "met"),
    [
        (330, 300, 400, True),  # exactly 1.3 times
        (331, 300, 400, False),
        (330, 300, 330, False),  # as much as the pool
    ],
)
def test_goals_apply_to_overheads(ours, bare, pool, met):
    """At most 1.3 times the overhead of bare lanes, and less than that of the persistent pool."""
    assert overhead_row("calls", times(ours, bare, pool), judged=True).met is met
    assert overhead_row("calls", times(ours, bare, pool), judged=False).met


def test_arms_return_the_plain_result():
    """Bare lanes and the three peers split and join in order."""
    x = torch.arange(64.0).reshape(16, 4)
    with overhead.bare_lanes(torch.sin) as bare, overhead.ThreadPoolExecutor(2) as pool:
        outputs = [
            bare(x),
            overhead._submit_each(pool, torch.sin, x),
            overhead._pool_per_call(torch.sin, x),
            overhead._threads_per_call(torch.sin, x),
        ]
    assert all(torch.equal(output, torch.sin(x)) for output in outputs)
