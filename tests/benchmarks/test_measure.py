"""How arms take turns, how their times are compared, and what else runs on the machine."""

from __future__ import annotations

import subprocess

import pytest
import torch

from benchmarks._measure import Result, Row, in_turn, overheads, ratio_of, threads
from benchmarks._neighbours import Neighbours, cores_of_others
from benchmarks._process import in_process


def test_arms_take_turns():
    """Every second round runs in reverse order, so that an arm does not always follow the same arm."""
    done = []
    arms = {name: lambda name=name: done.append(name) or len(done) for name in "ab"}
    given = in_turn(arms, rounds=2)
    assert "".join(done) == "baab"
    assert given == {"a": [2, 3], "b": [1, 4]}


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


@pytest.mark.parametrize(("ours", "theirs", "met"), [(100.0, 300.0, True), (101.0, 300.0, False), (-1.0, -2.0, False)])
def test_ratio_of_overheads(ours, theirs, met):
    """If parawrap adds no time, its overhead must not exceed the peer's."""
    assert Row("calls", {}, overheads(("parawrap", ours), ("peer", theirs), 3.0)).met is met


def test_threads_are_reset():
    """The end of the block restores the caller's setting."""
    before = torch.get_num_threads()
    with threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


def test_work_of_others():
    """The machine worked 15 s in 10 s, and the process 10 s of these: other processes used half a core."""
    assert cores_of_others(Neighbours(100.0, 5.0, 0.0), Neighbours(115.0, 15.0, 10.0)) == 0.5
    assert cores_of_others(Neighbours(100.0, 5.0, 0.0), Neighbours(109.0, 15.0, 10.0)) == 0  # the clocks differ slightly


def test_function_in_a_process(monkeypatch):
    """Variables are set, and None removes one. Printed output is not mistaken for the result. A failure raises."""
    monkeypatch.setenv("PARAWRAP_B", "inherited")
    given = {"PARAWRAP_A": "set", "PARAWRAP_B": None}
    assert in_process("os:getenv", given, key="PARAWRAP_A") == "set"
    assert in_process("os:getenv", given, key="PARAWRAP_B", default="removed") == "removed"
    assert in_process("builtins:print", end="output\n") is None
    with pytest.raises(subprocess.CalledProcessError):
        in_process("json:loads", s="not JSON")
