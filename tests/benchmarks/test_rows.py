"""The rows of benchmarks: their arms, results, and goals. No test depends on a time."""

from __future__ import annotations

import json
import subprocess

import pytest
import torch
from torch import nn

from benchmarks import mapping, overhead, submitting, training
from benchmarks._process import in_process
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


def test_peers_return_the_plain_result():
    x = torch.arange(64.0).reshape(16, 4)
    with overhead.bare_lanes(torch.sin) as bare, overhead.ThreadPoolExecutor(2) as pool:
        outputs = [
            bare(x),
            overhead._submit_each(pool, torch.sin, x),
            overhead._pool_per_call(torch.sin, x),
            overhead._threads_per_call(torch.sin, x),
        ]
    assert all(torch.equal(output, torch.sin(x)) for output in outputs)


def test_function_in_a_process(monkeypatch):
    """Variables are set, and None removes one. Printed output is not mistaken for the result. A failure raises."""
    monkeypatch.setenv("PARAWRAP_B", "inherited")
    given = {"PARAWRAP_A": "set", "PARAWRAP_B": None}
    assert in_process("os:getenv", given, key="PARAWRAP_A") == "set"
    assert in_process("os:getenv", given, key="PARAWRAP_B", default="removed") == "removed"
    assert in_process("builtins:print", end="output\n") is None
    with pytest.raises(subprocess.CalledProcessError):
        in_process("json:loads", s="not JSON")
