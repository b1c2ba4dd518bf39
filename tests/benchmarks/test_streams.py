"""The benchmarks of `map`, `submit`, and training steps: their arms and goals. No test depends on a time."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from benchmarks import mapping, submitting, training
from benchmarks.mapping import IN_FLIGHT, executor, map_row, windowed
from benchmarks.nets import Net

TINY = Net("tiny", lambda: nn.Linear(4, 2), (4,), usual=6)


@pytest.mark.parametrize(("map_us", "met"), [(100.0, True), (105.0, True), (106.0, False)])
def test_the_goal_of_map_is_a_share_of_the_executors_speed(map_us, met):
    """At least 0.95 times the executor's speed."""
    times = {"ThreadPoolExecutor": [100.0] * 9, "map": [map_us] * 9}
    assert map_row("map", times, judged=True).met is met
    assert map_row("map", times, judged=False).met


def test_the_executor_keeps_order_and_a_bound():
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


def test_workers_use_one_thread():
    """The setting still holds in a worker after an operator ran."""

    def count():
        torch.zeros(100_000).add_(1)
        return torch.get_num_threads()

    with executor() as pool:
        assert [pool.submit(count).result() for _ in range(4)] == [1] * 4


def test_all_rows_have_their_arms():
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
