"""Calls on their way through the lanes: in shares, whose outcomes the caller waits for, or whole, with a future.

A lane's thread may come to its next line long after the caller went on. What it then still held of the call, a graph above
all, would outlive it: so a share lets go of its work, and the flight of its outcomes, before anybody is told.

An error's traceback holds the frames that ran the work, and these what their variables hold. None of them may lead back to
the error, or the whole call stays until the garbage collector comes by.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from parawrap.lanes._hand import Hand
from parawrap.lanes._lane import Lane, Task
from parawrap.lanes._outcome import Outcome, note
from parawrap.lanes._streams import LaneFuture, Reached
from parawrap.lanes._threads import adopted

__all__ = ["Backlog", "Flight", "Share", "Whole"]


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


class Whole:
    """A call that one lane runs whole; its future tells what came of it. `work` is told the lane.

    `hand` is the one of a caller that may run it itself while it waits.
    """

    __slots__ = ("_future", "_outcome", "_work", "hand")

    def __init__(self, work: Callable[[Lane], tuple[Any, Reached]], future: LaneFuture, hand: Hand | None = None) -> None:
        self._work = work
        self._future = future
        self._outcome: Outcome | None = None
        self.hand = hand

    def do(self, lane: Lane) -> None:
        """Do it in the calling thread as that lane's work, unless nobody waits for it any more, and tell."""
        if self._begins(lane):
            self._outcome = lane.occupy(partial(self._taken(), lane))
        self.tell_from(lane)

    def run(self, lane: Lane) -> None:
        """The first half of `do`, where the calling thread has the lane already."""
        if self._begins(lane):
            before = lane.busy_ns
            self._outcome = lane.run(partial(self._taken(), lane))
            if self.hand is not None:
                self.hand.took(lane.busy_ns - before)

    def cancel(self) -> None:
        """Instead of doing it: nobody gets anything of it."""
        self._future.cancel()

    def interrupt(self) -> BaseException | None:
        """After `run`: what stopped it that is no failure of its own."""
        outcome = self._outcome
        return outcome.error if outcome is not None and outcome.is_interrupt else None

    def tell(self, lane: Lane) -> None:
        """The second, which may take long: callbacks are run."""
        outcome, future = self._outcome, self._future
        del self._outcome, self._future  # in which the error is, whose traceback holds the frames that hold this
        if outcome is None:
            return
        if outcome.error is None:
            future.land(*outcome.value)
        else:
            note(outcome.error, f"in {lane}")
            future.set_exception(outcome.error)
        if self.hand is not None:
            self.hand.landed(future)

    def tell_from(self, lane: Lane) -> None:
        """`tell` in the lane's own thread: a callback that exits does not end the lane, and is only told of."""
        try:
            self.tell(lane)
        except BaseException:  # noqa: BLE001
            threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))

    def _begins(self, lane: Lane) -> bool:
        self._future.lane = lane.index
        return self._future.set_running_or_notify_cancel()

    def _taken(self) -> Callable[[Lane], tuple[Any, Reached]]:
        work = self._work
        del self._work
        return work


class Backlog:
    """Whole calls that any lane may run, oldest first. A lane looks here when it would rest, a caller while it waits."""

    def __init__(self) -> None:
        self._waiting: deque[Whole] = deque()
        self._taking = threading.Lock()

    def put(self, call: Whole) -> None:
        self._waiting.append(call)

    def cancel(self) -> None:
        """Do none of those that wait now."""
        while (call := self._next()) is not None:
            call.cancel()

    def do_next(self, lane: Lane) -> bool:
        """Do the oldest in that lane's thread; False where there is none, another lane was sooner, or a caller will."""
        if not self._waiting or self._is_left_to_caller(lane):
            return False
        lane.at_rest = False
        mine = lane.take()  # before the call: a caller may have the lane for long, and another one be free meanwhile
        call = None
        try:
            call = self._next()
            if call is not None:
                call.run(lane)
        finally:
            if mine:
                lane.release()
        if call is not None:
            call.tell_from(lane)
        return call is not None

    def do_next_of(self, hand: Hand, lane: Lane) -> bool:
        """Do the oldest in the calling thread, if it was submitted with that hand and the lane is free.

        Raises:
            BaseException: what interrupted the caller in it, which is not a failure of the call.
        """
        if not lane.take_if_free():
            return False
        call = None
        try:
            call = self._next(hand)
            if call is not None:
                call.run(lane)
        finally:
            lane.release()
        if call is None:
            self.pass_on(hand, lane)
            return False
        interrupt = call.interrupt()
        call.tell(lane)
        if interrupt is not None:
            try:
                raise interrupt
            finally:
                del interrupt
        return True

    def pass_on(self, hand: Hand, lane: Lane) -> None:
        """From a caller that has no use for that lane any more: see to the oldest, unless it is the caller's own."""
        oldest = self._oldest()
        if oldest is None or oldest.hand is hand:
            return
        if not self._is_left_to_caller(lane) and lane.at_rest and lane.thread is not None:
            lane.wake()

    def _is_left_to_caller(self, lane: Lane) -> bool:
        """Whether a caller will run the oldest in that lane; it is told, for it may wait for the lane."""
        oldest = self._oldest()
        if oldest is None or oldest.hand is None or not oldest.hand.keeps(lane):
            return False
        oldest.hand.ring()
        return True

    def _oldest(self) -> Whole | None:
        with self._taking:
            return self._waiting[0] if self._waiting else None

    def _next(self, hand: Hand | None = None) -> Whole | None:
        """The oldest, taken out; where a hand is given, only if it was submitted with that."""
        with self._taking:
            if not self._waiting or (hand is not None and self._waiting[0].hand is not hand):
                return None
            return self._waiting.popleft()
