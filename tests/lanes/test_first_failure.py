"""The error that a call raises: the first failed lane's, with notes on its place and on the other errors."""

from __future__ import annotations

import traceback

import pytest
import torch

from parawrap.lanes import Lane, Outcome, first_failure
from parawrap.lanes._first_failure import raise_first_failure

CPU = torch.device("cpu")
LANES = ["lane 0 on cpu", "lane 1 on cpu", "lane 2 on cpu"]


def fail(error):
    raise error


def notes_of(*errors, lanes=3, **options):
    """Return the notes of the error that is chosen, and its position."""
    outcomes = [Outcome(1) if error is None else Outcome(error=error) for error in errors]
    first = first_failure(outcomes, LANES[:lanes], **options)
    assert outcomes == []  # the traceback may hold a frame that holds the list
    return next(index for index, error in enumerate(errors) if error is first), first.__notes__


@pytest.mark.parametrize("value", [None, 0, "text"])
def test_an_outcome_holds_the_value(value):
    assert Lane(0, CPU).run(lambda: value) == Outcome(value, None)
    assert first_failure([Outcome(value)], LANES) is None


@pytest.mark.parametrize("error", [ValueError("v"), StopIteration(1), KeyboardInterrupt(), SystemExit(3), GeneratorExit()])
def test_an_outcome_holds_any_exception(error):
    """The traceback begins in the task."""
    outcome = Lane(0, CPU).run(lambda: fail(error))
    assert outcome.error is error
    assert [frame.name for frame in traceback.extract_tb(error.__traceback__)] == ["<lambda>", "fail"]


def test_later_errors_become_notes():
    place, notes = notes_of(None, ValueError("first"), KeyError("second"))
    assert place == 1
    assert notes == ["in lane 1 on cpu, shard 1 of 3", "also in lane 2 on cpu, shard 2 of 3: KeyError: 'second'"]
    _, notes = notes_of(ValueError("v"), None, describe=lambda shard: f"{shard} of 5 rows")
    assert notes == ["in lane 0 on cpu, shard 0 of 2: 0 of 5 rows"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_an_interrupt_comes_first(error):
    """Before an error of an earlier lane."""
    place, notes = notes_of(ValueError("mine"), error)
    assert place == 1
    assert notes == ["in lane 1 on cpu, shard 1 of 2", "also in lane 0 on cpu, shard 0 of 2: ValueError: mine"]


def test_more_shards_than_lanes():
    """A shard beyond the lanes is the last lane's."""
    assert notes_of(None, None, None, ValueError())[1] == ["in lane 2 on cpu, shard 3 of 4"]


class UnreadableError(Exception):
    def __str__(self):
        raise TypeError


class FrozenError(Exception):
    def __setattr__(self, name, value):
        raise AttributeError(name)

    def add_note(self, text):
        raise AttributeError(text)


def test_unusual_errors_are_noted():
    """One object of all lanes, an error without a message, and an error that refuses notes."""
    error = ValueError("shared")
    assert notes_of(error, error) == (0, ["in lane 0 on cpu, shard 0 of 2"])
    assert "UnreadableError" in notes_of(ValueError("first"), UnreadableError())[1][1]
    _, notes = notes_of(FrozenError(), ValueError())
    assert notes == ["in lane 0 on cpu, shard 0 of 2", "also in lane 1 on cpu, shard 1 of 2: ValueError"]


def test_the_first_failure_is_raised():
    raise_first_failure([Outcome(1)], LANES)
    with pytest.raises(KeyError, match="mine"):
        raise_first_failure([Outcome(1), Outcome(error=KeyError("mine"))], LANES)
