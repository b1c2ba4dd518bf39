"""The benchmarks of calls, `map`, `submit`, and training steps: their arms and goals. No test depends on a time."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from benchmarks import cpu_lanes, mapping, overhead, submitting, training
from benchmarks._measure import Arm
from benchmarks.cpu_lanes import interpreter_limit
from benchmarks.mapping import IN_FLIGHT, executor, windowed
from benchmarks.nets import Net
from benchmarks.overhead import OURS, PLAIN, overhead_row

TINY = Net("tiny", lambda: nn.Linear(4, 2), (4,), usual=6)


def arm(median):
    return Arm(median, median, median)


def test_rows_have_their_arms():
    """One short round of each benchmark leaves the number of threads as it was."""
    before = torch.get_num_threads()
    mapped = mapping.rows(TINY, rounds=1, batches=5)
    submitted = submitting.rows(TINY, rounds=1, requests=2)
    trained = training.rows([TINY], rounds=1, lanes=2)
    assert [list(row.arms) for row in mapped] == [["loop, one thread", "loop, 2 threads", "ThreadPoolExecutor", "map"]] * 2
    assert len(submitted[0].arms) == 4
    assert list(trained[0].arms) == ["plain", "lanes"]
    assert torch.get_num_threads() == before
    json.dumps([row.as_json() for row in mapped + submitted + trained])


def test_executor_keeps_the_order():
    """Outputs come in order, and at most `IN_FLIGHT` batches are read ahead."""
    read = []

    def batches():
        for number in range(10):
            read.append(number)
            yield torch.tensor(number)

    with executor() as pool:
        outputs = windowed(pool, nn.Identity(), batches())
        assert next(outputs) == 0
        assert len(read) == IN_FLIGHT
        assert [int(output) for output in outputs] == list(range(1, 10))


def test_peers_return_the_plain_result():
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


@pytest.mark.parametrize(("bare", "pool", "met"), [(300, 400, True), (299, 400, False), (300, 330, False)])
def test_goals_apply_to_overheads(bare, pool, met):
    """At most 1.3 times the overhead of bare lanes, and less than that of the persistent pool."""
    times = {PLAIN: arm(200), OURS: arm(330), "bare lanes": arm(bare), "persistent ThreadPoolExecutor": arm(pool)}
    assert overhead_row("calls", times, judged=True).met is met
    assert overhead_row("calls", times, judged=False).met


def test_speed_up_of_equal_cores():
    """The time of torch's threads divided by the time of as many lanes."""
    row = cpu_lanes.lanes_row("net", {1: (arm(100), arm(100)), 2: (arm(60), arm(50))}, [], cores=2)
    assert [result.value for result in row.results] == [1.0, 1.2]
    assert (row.met, row.note) == (True, "")


@pytest.mark.parametrize(
    ("one_row", "lanes", "limit"),
    [
        (1, 2, 4 / (1 + 3 / 2)),  # the fixed cost, and half of the rest
        (3, 2, 4 / 6),  # the lock is the bottleneck: twice the fixed cost
        (5, 2, 4 / 10),  # one row slower than all rows: the rest is not negative
    ],
)
def test_lanes_share_one_interpreter(one_row, lanes, limit):
    """Each lane pays the fixed cost of a call, one lane after the other."""
    assert interpreter_limit(plain=4, one_thread=4, one_row=one_row, lanes=lanes) == pytest.approx(limit)
