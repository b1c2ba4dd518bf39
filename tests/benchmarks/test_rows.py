"""The rows of benchmarks: their arms, results, and goals. No test depends on a time."""

from __future__ import annotations

import json

import torch
from torch import nn

from benchmarks import mapping, submitting, training
from benchmarks.nets import Net

TINY = Net("tiny", lambda: nn.Linear(4, 2), (4,), usual=6)


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
