"""How arms take turns, and how their times are compared."""

from __future__ import annotations

import pytest
import torch

from benchmarks._measure import Result, Row, arm_of, in_turn, overheads, ratio_of, take_turns, threads, times_in_turn


def test_arms_take_turns():
    """Every second round runs in reverse order, so that an arm does not always follow the same arm."""
    done = []
    arms = {name: lambda name=name: done.append(name) or len(done) for name in "ab"}
    given = in_turn(arms, rounds=2)
    assert "".join(done) == "baab"
    assert given == {"a": [2, 3], "b": [1, 4]}


def test_settling_is_not_timed():
    """Each timed turn begins with them."""
    done = []
    arms = take_turns({"a": lambda: done.append("a")}, rounds=3, calls=2, settle=1)
    assert len(done) == 2 + 3 * (1 + 2)
    assert list(arms) == ["a"]
    assert len(times_in_turn({"a": lambda: None}, rounds=3)["a"]) == 3


def test_median_and_quartiles():
    """The range is the quartiles. A single time is the median and both quartiles."""
    arm = arm_of([1.0, 2.0, 3.0, 4.0, 100.0])
    assert (arm.low_us, arm.median_us) == (1.5, 3.0)
    assert arm_of([7.0]) == arm_of([7.0, 7.0])


def test_ratios_of_rounds():
    """A disturbance of a whole round changes both times, but not their ratio."""
    ratio = ratio_of([2.0, 20.0, 4.0], [1.0, 10.0, 2.0])
    assert (ratio.low, ratio.median, ratio.high) == (2, 2, 2)


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


@pytest.mark.parametrize(
    ("ours", "theirs", "met"), [(100.0, 300.0, True), (101.0, 300.0, False), (-1.0, 0.0, True), (-1.0, -2.0, False)]
)
def test_ratio_of_overheads(ours, theirs, met):
    """If parawrap adds no time, its overhead must not exceed the peer's."""
    results = overheads(("parawrap", ours), ("peer", theirs), 3.0)
    assert Row("calls", {}, results).met is met
    assert any(result.unit == "ratio" for result in results) is (ours > 0)
    assert not any(result.goal for result in overheads(("parawrap", ours), ("peer", theirs), None))


def test_threads_are_reset():
    """The end of the block restores the caller's setting."""
    before = torch.get_num_threads()
    with threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
