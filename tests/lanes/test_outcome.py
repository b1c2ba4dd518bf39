"""Outcomes: what became of a piece of work, as a value."""

from __future__ import annotations

import traceback

import pytest

from parawrap.lanes import Outcome, first_failure
from parawrap.lanes._outcome import capture


def fail(error):
    raise error


@pytest.mark.parametrize("value", [None, 0, "text"])
def test_a_value_is_kept(value):
    """What was returned is there, and no error."""
    assert capture(lambda: value) == Outcome(value, None)


@pytest.mark.parametrize("error", [ValueError("v"), StopIteration(1), KeyboardInterrupt(), SystemExit(3), GeneratorExit()])
def test_whatever_is_raised_is_kept(error):
    """No exception gets past it, and its traceback begins in the work."""
    outcome = capture(lambda: fail(error))
    assert outcome.error is error
    assert [frame.name for frame in traceback.extract_tb(error.__traceback__)][-1] == "fail"
    assert "capture" not in [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def test_without_errors_nothing_failed():
    """All values: no failure."""
    assert first_failure([Outcome(1), Outcome(2)], ["lane 0", "lane 1"]) is None


def test_the_first_failure_in_lane_order_carries_the_others_as_notes():
    """Its note says where; each later error is a note that says where, of what type, and what."""
    first, second = ValueError("first"), KeyError("second")
    outcomes = [Outcome(1), Outcome(error=first), Outcome(error=second)]
    assert first_failure(outcomes, ["lane 0 on cpu", "lane 1 on cpu", "lane 2 on cpu"]) is first
    assert first.__notes__[0] == "in lane 1 on cpu, shard 1 of 3"
    assert "lane 2 on cpu, shard 2 of 3: KeyError: 'second'" in first.__notes__[1]


def test_one_error_raised_by_every_lane_is_noted_once():
    """An exception object that lanes share does not become a note on itself."""
    error = ValueError("shared")
    assert first_failure([Outcome(error=error)] * 2, ["lane 0", "lane 1"]) is error
    assert len(error.__notes__) == 1


class UnreadableError(Exception):
    def __str__(self):
        raise TypeError


class FrozenError(Exception):
    def __setattr__(self, name, value):
        raise AttributeError(name)


def test_an_error_that_cannot_be_put_in_words_does_not_hide_the_first():
    """A later error whose __str__ raises is noted by its type."""
    first = ValueError("first")
    assert first_failure([Outcome(error=first), Outcome(error=UnreadableError())], ["lane 0", "lane 1"]) is first


def test_an_error_that_takes_no_notes_arrives_all_the_same():
    """An immutable exception (a frozen dataclass, say) is the user's error still, without the note."""
    error = FrozenError()
    assert first_failure([Outcome(error=error)], ["lane 0"]) is error
