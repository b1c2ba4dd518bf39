"""The overhead benchmark: its arms and its verdict. Nothing is timed."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import overhead
from benchmarks._measure import Arm
from benchmarks.overhead import OURS, PLAIN, overhead_row


def times(ours, bare, pool):
    medians = {PLAIN: 200.0, OURS: ours, "bare lanes": bare, "persistent ThreadPoolExecutor": pool}
    return {name: Arm(median, median, median) for name, median in medians.items()}


@pytest.mark.parametrize(
    ("ours", "bare", "pool", "held"),
    [
        (330, 300, 400, True),  # exactly 1.3 times
        (331, 300, 400, False),
        (330, 300, 330, False),  # no less than the pool
    ],
)
def test_overheads_are_judged_without_the_plain_call(ours, bare, pool, held):
    """At most 1.3 times the bare lanes, and below the persistent pool."""
    assert overhead_row("calls", times(ours, bare, pool), judged=True).held is held
    assert overhead_row("calls", times(ours, bare, pool), judged=False).held


def test_the_verdict_lists_each_overhead():
    """The differences from the plain call, and the ratio to bare lanes."""
    row = overhead_row("calls", times(310, 300, 400), judged=True)
    assert row.verdict == (
        "overhead: parawrap 110 us, bare lanes 100 us, persistent ThreadPoolExecutor 200 us; "
        "parawrap's is 1.10 times that of bare lanes"
    )


def test_every_arm_returns_the_plain_result():
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


def test_all_rows_have_their_arms():
    """Two comparisons with peers, and two with the plain call."""
    rows = overhead.rows(rounds=1)
    assert [len(row.arms) for row in rows] == [6, 6, 2, 2]
    assert [row.wanted for row in rows[1:]] == ["reported", "under 5 us", "under 5 us"]
    json.dumps([row.as_json() for row in rows])
