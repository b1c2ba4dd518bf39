"""The rows of benchmarks: their arms, results, and goals. No test depends on a time."""

from __future__ import annotations

import json
import subprocess

import pytest
import torch
from torch import nn

from benchmarks import mapping, overhead, submitting, training
from benchmarks._measure import Result, Row, ratio_of
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


def test_bounds_of_a_ratio():
    """Of 100 rounds the ratios with ranks 41 and 60: 95% confidence for any distribution."""
    ratio = ratio_of([float(n) for n in range(1, 101)], [1.0] * 100)
    assert (ratio.low, ratio.median, ratio.high) == (41, 50.5, 60)


@pytest.mark.parametrize(
    ("relation", "met"),
    [("at least", [False, True, True]), ("at most", [True, True, False]), ("under", [True, False, False]),
     ("exactly", [False, True, False])],
)  # fmt: skip
def test_goals(relation, met):
    """Values below, at, and above the limit. A row meets its goals if all results do."""
    results = [Result("time", value, "us").held_to(relation, 2000) for value in (1999.0, 2000.0, 2001.0)]
    assert [result.met for result in results] == met
    assert results[0].goal == f"{relation} 2,000"
    assert Row("calls", {}, results).met is all(met)
    assert Row("calls", {}, [Result("time", 1.0, "us")]).met


def test_function_in_a_process(monkeypatch):
    """Variables are set, and None removes one. Printed output is not mistaken for the result. A failure raises."""
    monkeypatch.setenv("PARAWRAP_B", "inherited")
    given = {"PARAWRAP_A": "set", "PARAWRAP_B": None}
    assert in_process("os:getenv", given, key="PARAWRAP_A") == "set"
    assert in_process("os:getenv", given, key="PARAWRAP_B", default="removed") == "removed"
    assert in_process("builtins:print", end="output\n") is None
    with pytest.raises(subprocess.CalledProcessError):
        in_process("json:loads", s="not JSON")
