"""The CPU-lanes suite: which lanes it measures, and on how many cores. Nothing is timed."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks import cpu_lanes
from benchmarks._measure import Arm
from benchmarks.cuda_nets import Net

TINY = Net("tiny", lambda: nn.Linear(4, 4), (4,), small=4, usual=8)


def arm(median):
    return Arm(median, median, median)


def test_lanes_beyond_the_cores_are_left_out_and_named():
    """Every number of lanes that there are cores for has both arms; the row says which were left out."""
    before = torch.get_num_threads()
    (row,) = cpu_lanes.rows([TINY], lanes=(1, 2, 4, 8), rounds=2, cores=2)
    assert list(row.arms) == ["torch's threads: 1", "lanes: 1", "torch's threads: 2", "lanes: 2"]
    assert row.verdict.endswith("; 4, 8 left out: the process may use 2 cores")
    assert row.extra["skipped"] == [4, 8]
    assert set(row.extra["limits"]) == {"cores, 1", "interpreter, 1", "cores, 2", "interpreter, 2"}
    assert torch.get_num_threads() == before


def test_both_arms_have_the_same_number_of_cores():
    """Where torch has k threads for all rows, k lanes have one for their share."""
    seen = {}

    class Counting(nn.Linear):
        def forward(self, x):
            seen.setdefault(len(x), set()).add(torch.get_num_threads())
            return super().forward(x)

    cpu_lanes.rows([TINY._replace(make=lambda: Counting(4, 4))], lanes=(1, 2), rounds=2, cores=2)
    assert seen == {8: {1, 2}, 4: {1}, 1: {1}}


def test_a_gain_is_how_many_times_as_fast_the_lanes_are():
    """The time of torch's threads over that of as many lanes."""
    row = cpu_lanes.lanes_row("net", {1: (arm(100), arm(100)), 2: (arm(60), arm(50))}, [], cores=2)
    assert row.verdict == "times as fast as torch's threads: 1: 1.00, 2: 1.20"
    assert row.held
