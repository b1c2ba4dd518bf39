"""The CPU-lanes benchmark: its lanes, their cores, and the limits. No test depends on a time."""

from __future__ import annotations

import pytest
from torch import nn

from benchmarks import cpu_lanes
from benchmarks._measure import Arm
from benchmarks.cpu_lanes import interpreter_limit
from benchmarks.nets import Net

TINY = Net("tiny", lambda: nn.Linear(4, 4), (4,), usual=8)


def arm(median):
    return Arm(median, median, median)


def test_speed_up_of_equal_cores():
    """The time of torch's threads divided by the time of as many lanes."""
    row = cpu_lanes.lanes_row("net", {1: (arm(100), arm(100)), 2: (arm(60), arm(50))}, [], cores=2)
    assert {result.quantity: result.value for result in row.results} == {
        "speed-up, lanes: 1": 1.0,
        "speed-up, lanes: 2": 1.2,
    }
    assert row.met
    assert row.note == ""


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
