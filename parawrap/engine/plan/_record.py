"""A case with what was measured of it, as a file has it and as it is read from there."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from parawrap.engine.plan._case import Case
from parawrap.engine.plan._contest import Contest
from parawrap.engine.plan._race import Race, Times
from parawrap.engine.plan._way import Way

__all__ = ["Record", "case_from", "check", "filed", "permitted", "restore", "withheld"]

Record = Mapping[str, Any]
_MOST_THREADS = 4096  # no machine has as many cores


def filed(contest: Contest, race: Race) -> dict[str, Any]:
    """The case, what is chosen, and what was measured."""
    known = {way: times for way in race.ways if (times := race.times(way)) is not None}
    return {
        "case": contest.case._asdict(),
        "elements": contest.elements,
        "choice": race.choice._asdict() if race.choice is not None else None,
        "measured": [{"way": way._asdict(), "times_ns": times._asdict()} for way, times in known.items()],
    }


def restore(contest: Contest, stored: Record, new_race: Callable[[], Race]) -> None:
    """Have the contest begin with what was filed."""
    known = {_way_from(one["way"]): _times_from(one["times_ns"]) for one in stored["measured"]}
    race = new_race()
    race.restore(_way_from(stored["choice"]), known)
    contest.race, contest.elements = race, stored["elements"]


def permitted(stored: Record, allows: Callable[[Way], bool]) -> Record | None:
    """The record without what is not allowed; None where that was chosen."""
    if not allows(_way_from(stored["choice"])):
        return None
    return {**stored, "measured": [one for one in stored["measured"] if allows(_way_from(one["way"]))]}


def withheld(stored: Record, allows: Callable[[Way], bool]) -> Sequence[Record]:
    """What was measured of ways that are not allowed."""
    return [one for one in stored["measured"] if not allows(_way_from(one["way"]))]


def check(stored: Record, lanes: int) -> None:
    """See that it can be used with so many lanes.

    Raises:
        KeyError: it lacks something.
        TypeError: something is of another type than it should be, or a figure beyond what there is.
    """
    contest = Contest(case_from(stored["case"]), 0)
    restore(contest, stored, partial(Race, ()))
    if type(contest.elements) is not int:
        msg = f"elements is {contest.elements!r}"
        raise TypeError(msg)
    for one in (stored["choice"], *(one["way"] for one in stored["measured"])):
        way = _way_from(one)
        if way.lanes > lanes or len(way.weights) not in (0, way.lanes):
            msg = f"a way of {way.lanes} lanes with {len(way.weights)} weights, on {lanes} devices"
            raise TypeError(msg)


def case_from(stored: Record) -> Case:
    """The case that was filed."""
    case = Case(**stored)
    _typed(case, {str: ("method", "inputs"), int: ("rows", "elements"), bool: ("grad", "training")})
    return case


def _way_from(stored: Record) -> Way:
    way = Way(**{**stored, "weights": tuple(stored["weights"])})
    _typed(way, {int: ("lanes", "threads"), bool: ("own_backward", "traced", "memory_kept")})
    if (
        way.lanes < 1
        or not 0 <= way.threads <= _MOST_THREADS
        or not all(type(weight) is int and weight > 0 for weight in way.weights)
    ):
        msg = f"a way of {way.lanes} lanes with {way.threads} threads, weights {way.weights}"
        raise TypeError(msg)
    return way


def _times_from(stored: Record) -> Times:
    times = Times(**stored)
    if not all(type(value) in (int, float) and 0 < value < math.inf for value in times) or type(times.calls) is not int:
        msg = f"times that are none: {tuple(times)}"
        raise TypeError(msg)
    return times


def _typed(parts: Case | Way, names: Mapping[type, tuple[str, ...]]) -> None:
    for kind, of_kind in names.items():
        for name in of_kind:
            if type(getattr(parts, name)) is not kind:
                msg = f"{name} is {getattr(parts, name)!r}"
                raise TypeError(msg)
