"""Whole calls that wait for any lane, and a caller that works while it waits for its own.

To wake a thread that waits costs as much as some calls do, and a thread beyond the number of cores gets its turn at the
expense of a lane. So a caller that comes back promptly for one short call after another runs the oldest of its own that
no lane has begun, as lane 0 and instead of that lane's thread, until the one that it waits for is done.

It does so only where nobody loses by it. Calls of others are left to the lanes, however old. One that stays away for long
leaves all to the lanes, and so does one whose calls are long, or not known yet: while it runs one it submits nothing, and
takes nothing in.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from time import perf_counter_ns
from typing import Any

from parawrap.lanes._lane import PATIENCE_S, Lane
from parawrap.lanes._outcome import Outcome, note
from parawrap.lanes._streams import LaneFuture, Reached
from parawrap.lanes._threads import intra_op_threads

__all__ = ["Backlog", "Hand", "Whole"]

_LONGEST_NS = 5_000_000  # a wake-up is at most a fiftieth of what is longer
_PROMPT = 4  # away for less than this part of a call
_KNOWN = 4  # calls, after which the next ones are taken to be as long


class Whole:
    """A call that one lane runs whole; its future tells what came of it. `work` is told the lane.

    As a share, it holds nothing of the call once somebody is told. `hand` is that of a caller who may run it while waiting.
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


class Hand:
    """Used by one thread, which gives it with what it submits to any lane, and waits for that by it."""

    __slots__ = ("_awaited", "_backlog", "_bell", "_call_ns", "_heard_of", "_lane", "_since", "_threads")

    def __init__(self, backlog: Backlog, lane: Lane, threads: int | None) -> None:
        self._backlog = backlog
        self._lane = lane
        self._threads = threads
        self._awaited: LaneFuture | None = None
        self._bell = threading.Lock()  # held, until somebody rings
        self._bell.acquire()
        self._call_ns = _LONGEST_NS  # what a call takes
        self._heard_of = 0
        self._since = perf_counter_ns()

    def keeps(self, lane: Lane) -> bool:
        """Whether that lane's thread is to leave the hand's calls to the caller, which waits and will run them."""
        return lane is self._lane and self._awaited is not None

    def does_well_to_help(self) -> bool:
        """Whether the caller had better work as a lane: its calls are known to be short, and it came back soon."""
        are_short = self._heard_of >= _KNOWN and self._call_ns <= _LONGEST_NS
        return are_short and (perf_counter_ns() - self._since) * _PROMPT < self._call_ns

    def wait_for(self, future: LaneFuture) -> None:
        """Return when it is done, having worked meanwhile; or at once, where that does not pay.

        Raises:
            BaseException: what interrupted the caller in its work.
        """
        if future.done() or not self.does_well_to_help():
            return
        try:
            self._awaited = future
            del future  # an interrupted one has the error, whose traceback holds this frame
            with intra_op_threads(self._threads):
                while not self._is_done():
                    if not self._backlog.do_next_of(self, self._lane):
                        self._listen()
        finally:
            self._awaited = None
            self._backlog.pass_on(self, self._lane)

    def took(self, call_ns: int) -> None:
        """Hear what one of its calls took."""
        self._heard_of += 1
        self._call_ns = max(1, min(call_ns, 2 * self._call_ns))  # one that the machine held up changes little

    def landed(self, future: LaneFuture) -> None:
        """Hear, from whichever thread, that one of its calls is done."""
        if self._awaited is future:
            self.ring()

    def ring(self) -> None:
        """Have the caller, which waits, look again."""
        with contextlib.suppress(RuntimeError):  # it rings already
            self._bell.release()

    def back_to_caller(self) -> None:
        """Say that the caller has what it waited for, and goes its way."""
        self._since = perf_counter_ns()

    def _is_done(self) -> bool:
        return self._awaited is None or self._awaited.done()

    def _listen(self) -> None:
        self._bell.acquire(timeout=PATIENCE_S)
