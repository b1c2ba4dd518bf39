"""What became of a piece of work, carried as a value from the lane to the caller."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

__all__ = ["Outcome", "capture", "first_failure", "note"]


class Outcome(NamedTuple):
    """A value, or the exception that came instead of it, with the traceback that it had in its lane."""

    value: Any = None
    error: BaseException | None = None

    @property
    def is_interrupt(self) -> bool:
        """Whether it is Ctrl-C or an exit, which is no failure of the work."""
        return self.error is not None and not isinstance(self.error, Exception)


def capture(work: Callable[[], Any]) -> Outcome:
    """Run `work` and keep what comes, whatever it is: a lane must outlive the work it is given."""
    try:
        return Outcome(work())
    except BaseException as error:  # noqa: BLE001
        # The first frame is this one, which tells a reader of the traceback nothing.
        return Outcome(error=error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))


def note(error: BaseException, text: str) -> None:
    """Add a note, unless it is an exception that takes none: it must arrive all the same."""
    with contextlib.suppress(Exception):
        error.add_note(text)


def first_failure(outcomes: Sequence[Outcome], lanes: Sequence[object]) -> BaseException | None:
    """The error of the first lane in lane order, noting its place; what befell the other lanes becomes notes on it.

    An interrupt or an exit comes before any error: it is not a failure of the work.
    """
    if all(outcome.error is None for outcome in outcomes):
        return None
    failed = [
        (f"in {lane}, shard {index} of {len(outcomes)}", outcome.error)
        for index, (lane, outcome) in enumerate(zip(lanes, outcomes, strict=False))
        if outcome.error is not None
    ]
    failed.sort(key=lambda at: isinstance(at[1], Exception))
    place, first = failed[0]
    note(first, place)
    for other_place, other in failed[1:]:
        if other is not first:
            said = "".join(traceback.format_exception_only(other)).strip()  # also where its __str__ fails
            note(first, f"also {other_place}: {said}")
    return first
