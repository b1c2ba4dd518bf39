"""How arms take turns, and how their times are compared."""

from __future__ import annotations

import torch

from benchmarks._measure import arm_of, in_turn, ratio_of, take_turns, threads, times_in_turn


def test_every_arm_has_its_turn_in_every_round():
    """Every second round runs in reverse order, so that no arm always follows the same arm."""
    done = []
    arms = {name: lambda name=name: done.append(name) or len(done) for name in "ab"}
    given = in_turn(arms, rounds=2)
    assert "".join(done) == "baab"
    assert given == {"a": [2, 3], "b": [1, 4]}


def test_settling_calls_are_made_and_not_timed():
    """After the warm-up, each turn begins with them."""
    done = []
    arms = take_turns({"a": lambda: done.append("a")}, rounds=3, calls=2, settle=1)
    assert len(done) == 2 + 3 * (1 + 2)
    assert list(arms) == ["a"]
    assert len(times_in_turn({"a": lambda: None}, rounds=3)["a"]) == 3


def test_an_arm_is_its_median_and_the_middle_half():
    """The quartiles of the times. A single time is all three."""
    arm = arm_of([1.0, 2.0, 3.0, 4.0, 100.0])
    assert (arm.low_us, arm.median_us) == (1.5, 3.0)
    assert arm_of([7.0]) == arm_of([7.0, 7.0])


def test_a_ratio_is_taken_round_by_round():
    """A disturbance of a whole round changes both times, but not their ratio."""
    ratio = ratio_of([2.0, 20.0, 4.0], [1.0, 10.0, 2.0])
    assert (ratio.low, ratio.median, ratio.high) == (2, 2, 2)


def test_a_ratio_lies_between_the_bounds_of_its_median():
    """Of 100 rounds the ratios with ranks 41 and 60: 95% confidence for any distribution."""
    ratio = ratio_of([float(n) for n in range(1, 101)], [1.0] * 100)
    assert (ratio.low, ratio.median, ratio.high) == (41, 50.5, 60)


def test_a_ratio_prints_its_bounds():
    """Two decimals."""
    assert str(ratio_of([1.0], [2.0])) == "0.50 (0.50 to 0.50)"


def test_a_number_of_threads_is_reset():
    """The caller's setting returns with the end of the block."""
    before = torch.get_num_threads()
    with threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
