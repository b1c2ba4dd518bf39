"""The error that a call raises: the first failed lane's, with notes on its place and on the other errors."""

from __future__ import annotations

import traceback

import pytest
import torch

from parawrap.lanes import Lane, Outcome, first_failure

CPU = torch.device("cpu")
LANES = ["lane 0 on cpu", "lane 1 on cpu", "lane 2 on cpu"]


def fail(error):
    raise error


@pytest.mark.parametrize("value", [None, 0, "text"])
def test_an_outcome_holds_the_value_of_a_task(value):
    """The outcome of a task that returns holds its value and no error."""
    assert Lane(0, CPU).run(lambda: value) == Outcome(value, None)


@pytest.mark.parametrize("error", [ValueError("v"), StopIteration(1), KeyboardInterrupt(), SystemExit(3), GeneratorExit()])
def test_an_outcome_holds_any_exception(error):
    """A lane catches every exception, and the traceback begins in the task."""
    outcome = Lane(0, CPU).run(lambda: fail(error))
    assert outcome.error is error
    names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert names == ["<lambda>", "fail"]


def test_the_first_failure_in_lane_order_has_the_others_as_notes():
    """The first error's note names its lane and shard; each later error becomes a note with place, type, and message."""
    first, second = ValueError("first"), KeyError("second")
    outcomes = [Outcome(1), Outcome(error=first), Outcome(error=second)]
    assert first_failure(outcomes, LANES) is first
    assert first.__notes__ == [
        "in lane 1 on cpu, shard 1 of 3",
        "also in lane 2 on cpu, shard 2 of 3: KeyError: 'second'",
    ]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_an_interrupt_comes_before_an_error_of_an_earlier_lane(error):
    """An interrupt or an exit is raised rather than an error of a task."""
    outcomes = [Outcome(error=ValueError("mine")), Outcome(error=error)]
    assert first_failure(outcomes, LANES[:2]) is error
    assert error.__notes__ == ["in lane 1 on cpu, shard 1 of 2", "also in lane 0 on cpu, shard 0 of 2: ValueError: mine"]


def test_a_shard_beyond_the_lanes_is_the_last_lanes():
    """The note of the fourth shard of three lanes names the last lane."""
    error = ValueError("v")
    assert first_failure([Outcome(1), Outcome(2), Outcome(3), Outcome(error=error)], LANES) is error
    assert error.__notes__ == ["in lane 2 on cpu, shard 3 of 4"]


def test_the_outcomes_are_emptied():
    """The list of outcomes is empty afterwards, because the traceback may hold a frame that holds the list."""
    outcomes = [Outcome(1), Outcome(error=ValueError())]
    first_failure(outcomes, LANES[:2])
    assert outcomes == []


def test_one_error_raised_by_every_lane_is_noted_once():
    """An exception object that all lanes raise gets no note on itself."""
    error = ValueError("shared")
    assert first_failure([Outcome(error=error)] * 2, LANES[:2]) is error
    assert error.__notes__ == ["in lane 0 on cpu, shard 0 of 2"]


class UnreadableError(Exception):
    def __str__(self):
        raise TypeError


class FrozenError(Exception):
    def __setattr__(self, name, value):
        raise AttributeError(name)

    def add_note(self, text):
        raise AttributeError(text)


def test_a_later_error_without_a_message_is_noted_by_its_type():
    """A later error with a `__str__` that raises does not hide the first one."""
    first = ValueError("first")
    assert first_failure([Outcome(error=first), Outcome(error=UnreadableError())], LANES[:2]) is first
    assert "UnreadableError" in first.__notes__[1]


def test_an_error_that_refuses_attributes_keeps_its_notes():
    """An exception with an `add_note` and a `__setattr__` that raise is returned, with the note."""
    error = FrozenError()
    assert first_failure([Outcome(error=error), Outcome(error=ValueError())], LANES[:2]) is error
    assert error.__notes__ == ["in lane 0 on cpu, shard 0 of 2", "also in lane 1 on cpu, shard 1 of 2: ValueError"]
