"""Carry the outcome of a task from its lane to the caller, and choose the error to raise."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from parawrap.errors import add_note

__all__ = ["TaskOutcome", "first_failure", "raise_first_failure"]


class TaskOutcome(NamedTuple):
    """A value, or the exception that was raised instead, with the traceback that it had in its lane."""

    value: Any = None
    error: BaseException | None = None


def raise_first_failure(
    outcomes: list[TaskOutcome], lanes: Sequence[object], describe: Callable[[int], str] | None = None
) -> None:
    """Raise the error of the first lane that failed, as `first_failure` returns it."""
    failure = first_failure(outcomes, lanes, describe)
    if failure is not None:
        try:
            raise failure
        finally:
            del failure  # its traceback holds this frame


def first_failure(
    outcomes: list[TaskOutcome], lanes: Sequence[object], describe: Callable[[int], str] | None = None
) -> BaseException | None:
    """Return the error of the first lane that failed, with notes on its place and on the errors of other lanes.

    None if no lane failed. An outcome beyond the lanes is of the last one. `describe` returns the contents of a shard for
    the first note. An interrupt or an exit comes before any error, because no task failed with it. The list is emptied: the
    traceback holds frames that hold it, and a cycle would keep the tensors of the call.
    """
    failed = [
        (index, f"in {lanes[min(index, len(lanes) - 1)]}, shard {index} of {len(outcomes)}", outcome.error)
        for index, outcome in enumerate(outcomes)
        if outcome.error is not None
    ]
    if not failed:
        return None
    failed.sort(key=lambda at: isinstance(at[2], Exception))
    shard, place, first = failed[0]
    add_note(first, place if describe is None else f"{place}: {describe(shard)}")
    for _, other_place, other in failed[1:]:
        if other is not first:
            text = "".join(traceback.format_exception_only(other)).strip()  # also if its __str__ fails
            add_note(first, f"also {other_place}: {text}")
    outcomes.clear()
    return first
