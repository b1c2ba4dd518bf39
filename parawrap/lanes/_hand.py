"""A caller that works while it waits for what it submitted.

To wake a thread that waits costs as much as some calls do, and a thread beyond the number of cores gets its turn at the
expense of a lane. So a caller that comes back promptly for one short call after another runs the oldest of its own that
no lane has begun, as lane 0 and instead of that lane's thread, until the one that it waits for is done.

It does so only where nobody loses by it. Calls of others are left to the lanes, however old. One that stays away for long
leaves all to the lanes, and so does one whose calls are long: while it runs one it submits nothing, and takes nothing in.
"""

from __future__ import annotations

import contextlib
import threading
from time import perf_counter_ns
from typing import TYPE_CHECKING

from parawrap.lanes._lane import PATIENCE_S, Lane
from parawrap.lanes._streams import LaneFuture
from parawrap.lanes._threads import intra_op_threads

if TYPE_CHECKING:
    from parawrap.lanes._flight import Backlog

__all__ = ["Hand"]

_LONGEST_NS = 5_000_000  # a wake-up is at most a fiftieth of what is longer
_PROMPT = 4  # away for less than this part of a call


class Hand:
    """Used by one thread, which gives it with what it submits to any lane, and waits for that by it."""

    __slots__ = ("_awaited", "_backlog", "_bell", "_call_ns", "_lane", "_since", "_threads")

    def __init__(self, backlog: Backlog, lane: Lane, threads: int | None) -> None:
        self._backlog = backlog
        self._lane = lane
        self._threads = threads
        self._awaited: LaneFuture | None = None
        self._bell = threading.Lock()  # held, until somebody rings
        self._bell.acquire()
        self._call_ns = _LONGEST_NS  # what a call takes; until one is done, that it will pay
        self._since = perf_counter_ns()

    def keeps(self, lane: Lane) -> bool:
        """Whether that lane's thread is to leave the hand's calls to the caller, which waits and will run them."""
        return lane is self._lane and self._awaited is not None

    def is_prompt(self) -> bool:
        """Whether the caller came back so soon, and its calls are so short, that it does best to work as a lane itself."""
        return self._call_ns <= _LONGEST_NS and (perf_counter_ns() - self._since) * _PROMPT < self._call_ns

    def wait_for(self, future: LaneFuture) -> None:
        """Return when it is done, having worked meanwhile; or at once, where that does not pay.

        Raises:
            BaseException: what interrupted the caller in its work.
        """
        if future.done() or not self.is_prompt():
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
        self._call_ns = min(call_ns, 2 * self._call_ns)  # one that the machine held up changes little

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
