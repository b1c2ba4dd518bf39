"""What is known of one case: its race, and what stands beside that."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from parawrap.engine.plan._case import Case
from parawrap.engine.plan._race import Race
from parawrap.engine.plan._way import Way

__all__ = ["Contest"]

_MOST_UNFOLLOWED = 8
_LOOKED_BACK_ON = 15


@dataclass(eq=False)
class Contest:
    """The race of one case.

    Attributes:
        elements: those of the calls that count; others of the case are run as these are.
        fixed: the only way that is right, where there is one.
        missed: how many calls in a row were of other elements.
        restarts: how often others came to count, because of that.
        asked: the further kinds of ways that were brought in, or found not to be worth it.
        faults: how many pages the kernel handed out during a call that was not cut.
        speeds: rows a nanosecond of each lane in each of the last calls that were measured, by the number of lanes.
        awaits: a call, with what it took, that a backward pass may follow.
        saw_backward: whether one did of late.
        unfollowed: how many calls in a row no backward pass followed, since one was.
    """

    case: Case
    elements: int
    race: Race | None = None
    fixed: Way | None = None
    missed: int = 0
    restarts: int = 0
    asked: set[str] = field(default_factory=set)
    faults: int = 0
    speeds: dict[int, deque[Sequence[float]]] = field(default_factory=dict)
    awaits: tuple[Way, int] | None = None
    saw_backward: bool = False
    unfollowed: int = 0

    @property
    def undecided(self) -> bool:
        """Whether there is a choice, and it has yet to be made."""
        return self.fixed is None and (self.race is None or self.race.choice is None)

    def note_speeds(self, lanes: int, speeds: Sequence[float]) -> None:
        """Learn how fast each of so many lanes was in one call."""
        self.speeds.setdefault(lanes, deque(maxlen=_LOOKED_BACK_ON)).append(speeds)

    def speeds_of(self, lanes: int) -> Sequence[float]:
        """How fast each of so many lanes is: the median, since one call alone may have been disturbed."""
        return [statistics.median(of_lane) for of_lane in zip(*self.speeds.get(lanes, ()), strict=True)]

    def forward_alone(self) -> None:
        """Before the next call: one that no backward pass followed counts as it is, unless others were followed by one.

        Where that goes on, the times of calls that were followed tell nothing about those that come now.
        """
        if self.awaits is None or self.race is None:
            return
        if not self.saw_backward:
            self.race.note(*self.awaits)
        elif self.unfollowed < _MOST_UNFOLLOWED:
            self.unfollowed += 1
        else:
            self.saw_backward, self.unfollowed = False, 0
            if self.race.choice is None:
                self.race.restart()
        self.awaits = None

    def followed(self, forward_ns: int, backward_ns: int) -> None:
        """After the backward pass of the call that was awaited."""
        if self.awaits is None or self.race is None:
            return
        (way, _), self.awaits, self.unfollowed = self.awaits, None, 0
        if not self.saw_backward:
            self.saw_backward = True
            if self.race.choice is None:
                self.race.restart()  # what was noted until now is without the backward pass
        self.race.note(way, forward_ns + backward_ns)
