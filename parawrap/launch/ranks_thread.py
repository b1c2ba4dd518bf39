"""The thread that owns the pool of ranks that stay, and the calls on their way to it.

    Ranks ── RanksCall ──► RanksThread ── Pool ──► ranks
      ▲                        │
      └────── Ending ──────────┘

The thread refers to no handle, so that ranks whose handle is lost end.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NoReturn
from weakref import ref

from parawrap.errors import LaunchError, RankDiedError
from parawrap.launch._job import Job
from parawrap.launch._platform import Platform
from parawrap.launch.attempts import PoolOwner
from parawrap.launch.launch import make_transcripts, new_log_folder
from parawrap.launch.lost_handles import is_lost
from parawrap.launch.machines import Machines
from parawrap.processes.outcomes import Ending, values_of
from parawrap.processes.output import Printer
from parawrap.processes.pool import Call, Pool
from parawrap.processes.script_globals import SentScript

LABEL = "ranks that stay"
_NEVER = float("inf")  # by the monotonic clock
_HANDLED_S = 1.0  # for a program to handle an error, which keeps the handle in its traceback
_running: set[RanksThread] = set()


class RanksCall:
    """A call on its way to the ranks and back. Implements `Run` for the handle of a submitted call.

    Attributes:
        sent: The globals that come with the call.
        ending: How it has ended, or the LaunchError of ranks that had ended before.
    """

    def __init__(self, thread: RanksThread, call: Call, sent: list[Any]) -> None:
        self._thread = thread
        self.call = call
        self.sent = sent
        self.ending: Future[Ending] = Future()

    @property
    def has_begun(self) -> bool:
        return self.call.has_begun

    def supervise(self, transcripts: Sequence[Any]) -> NoReturn:
        raise AssertionError  # the thread of the ranks makes the call

    def cancel(self) -> None:
        self._thread.interrupt(self, cancels=True)

    def preempt(self) -> None:
        """Do nothing: ranks that stay cannot restart."""

    def stacks(self) -> dict[int, str]:
        return self._thread.stacks() if self.has_begun else {}

    def state_of(self, rank: int) -> str:
        return self._thread.state_of(rank) if self.has_begun else "idle"


class RanksThread(PoolOwner):
    """Starts the ranks in a thread, and makes their calls there.

    Attributes:
        ready: Set once the ranks can be called, or could not be started.
        ended: Set once no rank is alive.
        error: The error of the start.
        last: The ending of the ranks.
        handle: The handle of the ranks.
    """

    def __init__(self, platform: Platform, machines: Machines) -> None:
        super().__init__(Job(platform, _stay), machines)
        self.printer = Printer()
        self.transcripts = make_transcripts(platform, self.printer, new_log_folder(platform, LABEL))
        self.script = SentScript(imports=True)
        self.ready = threading.Event()
        self.ended = threading.Event()
        self.error: BaseException | None = None
        self.last: Ending | None = None
        self.handle: ref[Any] | None = None
        self._last_name = LABEL
        self._current: RanksCall | None = None
        self._queue: deque[RanksCall] = deque()
        self._is_closing = False
        self._look_at = _NEVER  # whether an error is all that keeps the handle
        threading.Thread(target=self._run, name="parawrap-ranks", daemon=True).start()

    def submit(self, request: RanksCall) -> None:
        """Make a call after those before it."""
        self._queue.append(request)
        self._wake()
        if self.ended.is_set():
            self._fail_queue()

    def interrupt(self, request: RanksCall, *, cancels: bool) -> None:
        """Raise KeyboardInterrupt in the function of each rank that runs it, or drop a call that has not begun."""
        if (pool := self._pool) is not None:
            pool.post(partial(self._interrupt, pool, request, cancels=cancels))

    def close(self) -> None:
        """End the ranks once they have answered the calls that were submitted."""
        self._is_closing = True
        self._wake()

    @property
    def is_busy(self) -> bool:
        """True while a call runs or waits for its turn."""
        return self._current is not None or bool(self._queue)

    def error_of_end(self, name: str) -> LaunchError:
        """Return the error of a call that comes after the end of the ranks. It says how they have ended."""
        died, how = None, "they were closed" if self.last is None else "they were cancelled"
        try:
            if self.error is not None:
                raise self.error
            if self.last is not None and self.last.lost:
                raise LaunchError(self.last.lost)
            if self.last is not None and not self.last.cancelled:
                values_of(self._last_name, self.last, (), len(self.transcripts))
        except BaseException as error:  # noqa: BLE001 (described)
            how = str(getattr(error, "message", f"{type(error).__name__}: {error}")).partition("\n")[0]
            died = error if isinstance(error, RankDiedError) else None
        msg = f"these ranks have ended, and cannot call {name}. Open new ones: Platform(...).open(). How they ended: {how}"
        if died is not None:
            return RankDiedError(msg, rank=died.rank, signal=died.signal, exit_code=died.exit_code)
        return LaunchError(msg)

    def _wake(self) -> None:
        if (pool := self._pool) is not None:
            pool.post(lambda: None)

    # -- the thread

    def _run(self) -> None:
        _running.add(self)
        try:
            with self._open_pool(self.transcripts, stays=True) as pool:
                self.last = Ending({}, cancelled=True) if pool is None else self._run_ranks(pool)
            if self.last is None:
                self._job.finish()
        except BaseException as error:  # noqa: BLE001 (raised by the handle)
            self.error = error
        finally:
            self._machines.close()
            for transcript in self.transcripts:
                transcript.finish()
            self.printer.finish()
            _running.discard(self)
            self.ended.set()
            self.ready.set()
            self._fail_queue()

    def _run_ranks(self, pool: Pool) -> Ending | None:
        """Make the calls of the ranks. Return how the ranks ended; None if they were closed."""
        pool.owned = self.script.note_owned
        ending = pool.set_up()
        if not ending.is_success:
            return ending
        self.ready.set()
        while self.last is None and not pool.is_ending:
            if self._queue:
                self._make_call(pool, self._queue.popleft())
            elif self._is_closing:
                return None
            else:
                pool.turn(self._look_at)
            if time.monotonic() >= self._look_at:
                self._look_at = _NEVER
                self._is_closing = self._is_closing or (self.handle is not None and is_lost(self.handle))
            if self.last is None and pool.idle_deaths:
                self.last = Ending(pool.idle_deaths, pool.places())
                pool.end()
        return self.last or Ending({}, cancelled=True)  # cancelled while no call ran

    def _make_call(self, pool: Pool, request: RanksCall) -> None:
        if request.ending.done():  # cancelled before its turn
            pool.call(Call(request.call.name, (), request.call.packed, changes=request.call.changes))  # with its globals
            return
        self._current = request
        ending = pool.call(request.call)
        self._current = None
        if not request.call.has_loaded:
            self.script.forget(request.sent)
        if pool.is_ending:
            self.last, self._last_name = ending, request.call.name
        request.ending.set_result(ending)
        self._look_at = _NEVER if ending.is_success else time.monotonic() + _HANDLED_S
        if self.last is not None:
            pool.cancel()

    def _interrupt(self, pool: Pool, request: RanksCall, *, cancels: bool) -> None:
        if request is self._current:
            pool.interrupt(request.call, cancels=cancels)
        elif request in self._queue and not request.ending.done():
            request.ending.set_result(Ending({}, cancelled=True))  # it stays there: later calls rely on its globals

    def _fail_queue(self) -> None:
        with contextlib.suppress(IndexError):  # it is empty, maybe because another thread was faster
            while True:
                request = self._queue.popleft()
                if not request.ending.done():
                    request.ending.set_exception(self.error_of_end(request.call.name))


def end_lost_ranks() -> None:
    """End the ranks whose handles are lost, and wait for it."""
    lost = [thread for thread in list(_running) if thread.handle is not None and is_lost(thread.handle)]
    for thread in lost:
        thread.close()
    for thread in lost:
        thread.ended.wait()


def _end_with_interpreter() -> None:
    """End ranks that the script has left open. It runs before the server ends, which waits for its ranks."""
    threads = list(_running)
    for thread in threads:
        thread.cancel()
    for thread in threads:
        thread.ended.wait()


atexit.register(_end_with_interpreter)
os.register_at_fork(after_in_child=_running.clear)


def _stay() -> None:
    """Stand for the function of ranks that stay."""
