"""How the benchmarks take turns."""

from __future__ import annotations

from benchmarks._measure import arm_of, in_turn, ratio_of, take_turns


def test_every_arm_has_its_turn_in_every_round():
    """Each round goes the other way than the one before, so that no arm always follows the same one."""
    done = []
    arms = {name: lambda name=name: done.append(name) or len(done) for name in "ab"}
    given = in_turn(arms, rounds=2)
    assert "".join(done) == "baab"
    assert given == {"a": [2, 3], "b": [1, 4]}


def test_calls_that_settle_are_made_and_not_counted():
    """After the warm-up, an arm is called so many times more at each turn."""
    done = []
    arms = take_turns({"a": lambda: done.append("a")}, rounds=3, calls=2, settle=1)
    assert len(done) == 2 + 3 * (1 + 2)
    assert list(arms) == ["a"]


def test_an_arm_is_its_median_and_the_middle_half():
    """The quartiles of the times; one time stands for all three."""
    arm = arm_of([1.0, 2.0, 3.0, 4.0, 100.0])
    assert (arm.low_us, arm.median_us) == (1.5, 3.0)
    assert arm_of([7.0]) == arm_of([7.0, 7.0])


def test_a_ratio_is_taken_round_by_round():
    """What disturbs a whole round disturbs both times, and leaves their ratio."""
    ratio = ratio_of([2.0, 20.0, 4.0], [1.0, 10.0, 2.0])
    assert (ratio.low, ratio.median, ratio.high) == (2, 2, 2)


def test_a_ratio_lies_between_the_bounds_of_its_median():
    """Of 100 rounds those of the ranks 41 and 60: 95% confidence, whatever the distribution."""
    ratio = ratio_of([float(n) for n in range(1, 101)], [1.0] * 100)
    assert (ratio.low, ratio.median, ratio.high) == (41, 50.5, 60)


def test_a_ratio_is_told_with_its_bounds():
    """Two decimals."""
    assert str(ratio_of([1.0], [2.0])) == "0.50 (0.50 to 0.50)"
