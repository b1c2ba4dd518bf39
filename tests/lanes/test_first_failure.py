"""The error that a call raises: the first failed lane's, with notes on its place and on the other errors."""

from __future__ import annotations

from parawrap.lanes import TaskOutcome, first_failure

LANES = ["lane 0 on cpu", "lane 1 on cpu", "lane 2 on cpu"]


def notes_of(*errors, **options):
    """Return the notes of the error that is chosen, and its position."""
    outcomes = [TaskOutcome(1) if error is None else TaskOutcome(error=error) for error in errors]
    first = first_failure(outcomes, LANES, **options)
    assert outcomes == []  # the traceback may hold a frame that holds the list
    return next(index for index, error in enumerate(errors) if error is first), first.__notes__


def test_an_interrupt_comes_first():
    place, notes = notes_of(ValueError("mine"), KeyboardInterrupt())
    assert place == 1
    assert notes == ["in lane 1 on cpu, shard 1 of 2", "also in lane 0 on cpu, shard 0 of 2: ValueError: mine"]


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
