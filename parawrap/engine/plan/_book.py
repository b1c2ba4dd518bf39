"""What is known of one target on certain devices, as it is looked up, filed and shown."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from parawrap.engine.plan._case import Case
from parawrap.engine.plan._contest import Contest
from parawrap.engine.plan._race import Race, Times
from parawrap.engine.plan._record import case_from, filed, permitted, restore, withheld
from parawrap.engine.plan._way import Way

__all__ = ["Book"]

_MOST_CASES = 256


class Book:
    """What is known of one target on certain devices: a contest for each case. Shared by all blocks that have the plan.

    What a file has of ways that the plan does not allow is not used here, and is filed again as it was.
    """

    def __init__(
        self, name: str, key: Mapping[str, Any], stored: Sequence[Mapping[str, Any]], allows: Callable[[Way], bool]
    ) -> None:
        self.name = name
        self.key = key
        self.contests: dict[Case, Contest] = {}
        self.extra_calls = 0
        self.access = threading.Lock()
        self.stored = {case_from(one["case"]): one for one in stored}
        self._allows = allows

    def contest(self, case: Case, elements: int, new_race: Callable[[], Race]) -> Contest:
        """The case's; made where there is none, from the file where that has it. Beyond so many, it is not kept here."""
        with self.access:
            contest = self.contests.get(case)
            if contest is None:
                contest = Contest(case, elements)
                if case in self.stored and (usable := permitted(self.stored[case], self._allows)) is not None:
                    restore(contest, usable, new_race)
                if len(self.contests) < _MOST_CASES:
                    self.contests[case] = contest
            return contest

    def record(self) -> dict[str, Any]:
        """As it is filed: the cases that a way was chosen for, and those of the file that were not met, or not decided."""
        with self.access:
            cases = dict(self.stored)
            for case, contest in self.contests.items():
                if contest.race is not None and contest.race.choice is not None:
                    one = filed(contest, contest.race)
                    if case in self.stored:
                        one["measured"] += withheld(self.stored[case], self._allows)
                    cases[case] = one
            return {**self.key, "name": self.name, "cases": list(cases.values())}

    def table(self) -> list[str]:
        """A line for each way that was tried, under the case."""
        with self.access:
            lines = [f"{self.name} on {', '.join(self.key['devices'])}"]
            for contest in self.contests.values():
                lines += _listed(contest)
            return lines


def _listed(contest: Contest) -> list[str]:
    race = contest.race
    if contest.fixed is not None:
        return [f"  {contest.case}", f"  * {contest.fixed}: the only way that is right here"]
    if race is None:
        return [f"  {contest.case}", "    not measured yet"]
    lines = [f"  {contest.case}" + ("" if race.choice is not None else ": being measured")]
    for way in race.ways:
        times = race.times(way)
        chosen = "*" if way == race.choice else " "
        lines.append(f"  {chosen} {way!s:<44} {_times(times)}".rstrip())
    return lines


def _times(times: Times | None) -> str:
    if times is None:
        return "not counted"
    us = [f"{value / 1e3:,.1f}" for value in (times.median, times.low, times.high)]
    return f"{us[0]:>11} us ({us[1]} to {us[2]}), {times.calls} call{'s' * (times.calls != 1)}"
