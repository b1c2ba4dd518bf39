"""The CPU-lanes benchmark: its lanes, their cores, and the limits. No test depends on a time."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks import cpu_lanes
from benchmarks._measure import Arm
from benchmarks.cpu_lanes import cores_limit, interpreter_limit
from benchmarks.nets import Net

TINY = Net("tiny", lambda: nn.Linear(4, 4), (4,), usual=8)


def arm(median):
    return Arm(median, median, median)


def test_lanes_beyond_the_cores_are_skipped_and_named():
    """Each number of lanes up to the cores has both arms. A note lists the others."""
    before = torch.get_num_threads()
    (row,) = cpu_lanes.rows([TINY], lanes=(1, 2, 4, 8), rounds=2, cores=2)
    assert list(row.arms) == ["torch's threads: 1", "lanes: 1", "torch's threads: 2", "lanes: 2"]
    assert row.note == "skipped: 4, 8 lanes (the process may use 2 cores)"
    limits = [result.quantity for result in row.results if result.quantity.startswith("limit")]
    assert limits == [f"limit by the {what}, lanes: {count}" for count in (1, 2) for what in ("cores", "interpreter")]
    assert torch.get_num_threads() == before


def test_both_arms_have_the_same_number_of_cores():
    """The plain call runs on k threads, and each of k lanes runs on one thread."""
    seen = {}

    class Counting(nn.Linear):
        def forward(self, x):
            seen.setdefault(len(x), []).append(torch.get_num_threads())
            return super().forward(x)

    cpu_lanes.rows([TINY._replace(make=lambda: Counting(4, 4))], lanes=(1, 2), rounds=2, cores=2)
    assert (set(seen[8]), set(seen[4]), set(seen[1])) == ({1, 2}, {1}, {1})


def test_a_speed_up_compares_equal_numbers_of_cores():
    """The time of torch's threads divided by the time of as many lanes."""
    row = cpu_lanes.lanes_row("net", {1: (arm(100), arm(100)), 2: (arm(60), arm(50))}, [], cores=2)
    assert {result.quantity: result.value for result in row.results} == {
        "speed-up, lanes: 1": 1.0,
        "speed-up, lanes: 2": 1.2,
    }
    assert row.met
    assert row.note == ""


def test_cores_share_the_work_of_one_thread():
    """The limit is 1 if torch's own threads already share the work without loss."""
    assert cores_limit(plain=4, one_thread=4, cores=2) == 2
    assert cores_limit(plain=2, one_thread=4, cores=2) == 1


@pytest.mark.parametrize(
    ("one_row", "lanes", "limit"),
    [
        (0, 4, 4),  # no fixed cost: the number of lanes
        (1, 2, 4 / (1 + 3 / 2)),  # the fixed cost, and half of the rest
        (3, 2, 4 / 6),  # the lock is the bottleneck: twice the fixed cost
        (5, 2, 4 / 10),  # one row slower than all rows: the rest is not negative
    ],
)
def test_lanes_share_one_interpreter(one_row, lanes, limit):
    """Each lane pays the fixed cost of a call, one lane after the other."""
    assert interpreter_limit(plain=4, one_thread=4, one_row=one_row, lanes=lanes) == pytest.approx(limit)
