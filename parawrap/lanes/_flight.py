"""Calls on their way through the lanes in shares, whose outcomes the caller waits for.

A lane's thread may come to its next line long after the caller went on. What it then still held of the call, a graph above
all, would outlive it: so a share lets go of its work, and the flight of its outcomes, before anybody is told.

An error's traceback holds the frames that ran the work, and these what their variables hold. None of them may lead back to
the error, or the whole call stays until the garbage collector comes by.
"""

from __future__ import annotations

import threading

from parawrap.lanes._lane import Lane, Task
from parawrap.lanes._outcome import Outcome
from parawrap.lanes._threads import adopted

__all__ = ["Flight", "Share"]


class Flight:
    """The outcomes of one call, until the last of them is there for the caller that waits."""

    __slots__ = ("_counting", "_landed", "_left", "first_ns", "outcomes")

    def __init__(self, tasks: int) -> None:
        self.outcomes: list[Outcome] = [Outcome()] * tasks
        self.first_ns = 0
        self._left = tasks
        self._counting = threading.Lock()
        self._landed = threading.Lock()
        self._landed.acquire()

    def land(self, slot: int, outcome: Outcome) -> None:
        self.outcomes[slot] = outcome
        del outcome
        with self._counting:
            self._left -= 1
            last = self._left == 0
        if last:
            self._landed.release()

    def take(self) -> list[Outcome]:
        """The outcomes, which the flight no longer has."""
        outcomes, self.outcomes = self.outcomes, []
        return outcomes

    def wait(self, patience: float) -> bool:
        """Whether all outcomes are there, after waiting at most so many seconds."""
        return self._landed.acquire(timeout=patience)


class Share:
    """One lane's part of a call. Whoever claims it first does it: the lane's thread, or the caller that ran out of work."""

    __slots__ = ("_flight", "_threads", "_unclaimed", "lane", "slot", "work")

    def __init__(self, lane: Lane, work: Task, flight: Flight, slot: int, threads: int | None) -> None:
        self.lane = lane
        self.work = work
        self.slot = slot
        self._flight = flight
        self._threads = threads
        self._unclaimed = threading.Lock()

    def claim(self) -> bool:
        return self._unclaimed.acquire(blocking=False)

    def do(self) -> None:
        """Do what was claimed."""
        self._flight.land(self.slot, self.lane.occupy(self._taken()))

    def __call__(self) -> None:
        if self.claim():
            self._flight.land(self.slot, self._outcome())

    def _outcome(self) -> Outcome:
        with adopted(self._threads):
            return self.lane.occupy(self._taken())

    def _taken(self) -> Task:
        work = self.work
        del self.work
        return work
