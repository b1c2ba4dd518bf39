"""The thread that owns the pool of ranks that stay, and the calls on their way to it.

::

    Ranks ── begin, drive ──► Pool ──► ranks     the caller reads the answers itself
      │                        ▲
      └── submit ──► queue ──► RanksThread       the thread does, for calls that wait their turn

A call belongs to its caller from `begin` to the end of `drive`, and to the thread otherwise. The
thread resolves the future of every call on every way out. It refers to no handle, so that ranks
whose handle is lost end.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
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
from parawrap.processes.events import NEVER
from parawrap.processes.held_signals import HeldSignals
from parawrap.processes.latch import Latch
from parawrap.processes.outcomes import Ending, values_of
from parawrap.processes.output import Printer
from parawrap.processes.pool import Call, Pool
from parawrap.processes.script_globals import SentScript
from parawrap.processes.settings import Surroundings

LABEL = "ranks that stay"
_LOOK_S = 1.0  # between two looks whether the ranks have ended without a word on a call
_HANDLED_S = 1.0  # for a program to handle an error, which keeps the handle in its traceback
_running: set[RanksThread] = set()


class RanksCall:
    """A call on its way to the ranks and back. Implements `Run` for the handle of a submitted call.

    Attributes:
        packed: The call as it is sent.
        upon_end: Called with how it has ended.
    """

    def __init__(self, thread: RanksThread, call: Call) -> None:
        assert call.packed is not None
        self._thread = thread
        self.call = call
        self.packed = call.packed
        self.upon_end: Callable[[Ending | BaseException], object] | None = None
        self._how: Ending | BaseException | None = None
        self._ended = Latch()

    @property
    def is_done(self) -> bool:
        """True once it has ended."""
        return self._how is not None

    def end(self, how: Ending | BaseException) -> None:
        """Note how it has ended. The first note holds."""
        if self._how is None:
            self._how = how
            self._ended.set()
            if self.upon_end is not None:
                self.upon_end(how)

    def wait(self) -> None:
        """Wait for the end."""
        while not self._ended.wait(_LOOK_S):
            self._thread.end_if_over(self)

    def result(self) -> Ending:
        """Return how it has ended, or raise the error of ranks that had ended before."""
        assert self._how is not None
        if isinstance(self._how, BaseException):
            raise self._how
        return self._how

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
    """Starts the ranks in a thread, supervises them, and makes the calls that wait for their turn.

    The pool's lock guards `_current`, `_driven`, and `last`.

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
        self.surroundings = Surroundings()
        self.ready = Latch()
        self.ended = Latch()
        self.error: BaseException | None = None
        self.last: Ending | None = None
        self.handle: ref[Any] | None = None
        self._last_name = LABEL
        self._current: RanksCall | None = None  # that the ranks run
        self._driven: RanksCall | None = None  # the same, while its caller reads the answers
        self._queue: deque[RanksCall] = deque()
        self._is_closing = False
        self._look_at = NEVER  # whether an error is all that keeps the handle
        threading.Thread(target=self._run, name="parawrap-ranks", daemon=True).start()

    def submit(self, request: RanksCall) -> None:
        """Make a call after those before it."""
        held = HeldSignals(_do_nothing)
        self._queue.append(request)
        self._note_sent(request)
        held.end()
        self._wake()
        if self.ended.is_set():  # the thread may have missed it
            self._fail_queue()

    def end_if_over(self, request: RanksCall) -> None:
        """End a call that nothing else ends: it was on its way when the thread ended."""
        if self.ended.is_set() and not request.is_done:
            request.end(self.error_of_end(request.call.name))

    def interrupt(self, request: RanksCall, *, cancels: bool) -> None:
        """Raise KeyboardInterrupt in the function of each rank that runs it, or drop a call that
        has not begun.
        """
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
        """Return the error of a call that comes after the end of the ranks.

        It says how they have ended.
        """
        died, how = None, "they were closed" if self.last is None else "they were cancelled"
        try:
            if self.error is not None:
                raise self.error
            if self.last is not None and self.last.lost:
                raise LaunchError(self.last.lost)
            if self.last is not None and not self.last.cancelled:
                values_of(self._last_name, self.last, (), len(self.transcripts))
        except BaseException as error:  # noqa: BLE001 (described)
            how = str(getattr(error, "message", f"{type(error).__name__}: {error}")).partition(
                "\n"
            )[0]
            died = error if isinstance(error, RankDiedError) else None
        msg = (
            f"these ranks have ended, and cannot call {name}. Open new ones: "
            f"Platform(...).open(). How they ended: {how}"
        )
        if died is not None:
            return RankDiedError(msg, rank=died.rank, signal=died.signal, exit_code=died.exit_code)
        return LaunchError(msg)

    # -- a caller

    def begin(self, request: RanksCall) -> HeldSignals | None:
        """Send a call from this thread if the ranks are idle:

        `drive` must follow. Otherwise submit it.
        """
        pool = self._pool
        if pool is None or not self._is_idle:
            self.submit(request)
            return None
        held = HeldSignals(pool.events.wake_caller)
        has_begun = False
        try:
            with pool.events.lock:
                if self._is_idle and not pool.is_ending:
                    pool.begin(request.call)
                    self._current = self._driven = request
                    pool.events.lend()
                    self._note_sent(request)
                    has_begun = True
        except Exception as error:  # noqa: BLE001 (no rank has got the call)
            request.end(error.with_traceback(None))  # its frames hold the arguments
        if has_begun:
            return held
        held.end()
        if not request.is_done:
            self.submit(request)
        return None

    def drive(self, request: RanksCall, held: HeldSignals) -> None:
        """Read the answers to a call that this thread has begun, until it has ended, or a signal
        arrives.

        After a signal, the thread of the ranks goes on with the call.
        """
        pool = self._pool
        error: BaseException | None = None
        try:
            while pool is not None and self._driven is request and not held.has_arrived:
                if pool.has_ended(request.call):
                    break
                pool.events.turn_of_caller()
        except BaseException as reason:  # noqa: BLE001 (no signal may interrupt it: ends the ranks)
            error = reason
        if pool is not None:
            self._give_back(pool, request, error)
        held.end()

    def _give_back(self, pool: Pool, request: RanksCall, error: BaseException | None) -> None:
        """Finish a call that has ended, or hand it to the thread of the ranks."""
        ending: Ending | None = None
        with pool.events.lock:
            if self._driven is not request:  # the thread of the ranks has ended, and ends the call
                return
            self._driven = None
            if error is None and pool.has_ended(request.call):
                ending = self._finish(pool, request)
            else:
                pool.events.take_back()
        if error is not None:
            pool.post(partial(_raise, error))
        elif ending is not None:
            request.end(ending)
            if not (
                self._queue or self._is_closing or self.last is not None or not ending.is_success
            ):
                return  # the thread has nothing to do
        self._wake()

    def _note_sent(self, request: RanksCall) -> None:
        """Note what later calls need not bring again. Signals are held back."""
        self.script.note_sent(request.packed)
        self.surroundings.note_sent(request.call.changes)

    @property
    def _is_idle(self) -> bool:
        return (
            self._current is None and not self._queue and not self._is_closing and self.last is None
        )

    def _wake(self) -> None:
        if (pool := self._pool) is not None:
            pool.post(lambda: None)

    # -- the thread

    def _run(self) -> None:
        try:
            _running.add(self)
            with self._open_pool(self.transcripts, stays=True) as pool:
                self.last = Ending({}, cancelled=True) if pool is None else self._run_ranks(pool)
            if self.last is None:
                self._job.finish()
        except BaseException as error:  # noqa: BLE001 (raised by the handle)
            self.error = error
        finally:
            try:
                self._machines.close()
                for transcript in self.transcripts:
                    transcript.finish()
                self.printer.finish()
            except BaseException as error:  # noqa: BLE001
                self.error = self.error or error
            finally:
                self._resolve_all()

    def _resolve_all(self) -> None:
        """Report the end of the ranks to all who wait.

        No caller waits for ever, whatever ended this thread.
        """
        _running.discard(self)
        self.ended.set()
        self.ready.set()
        current, self._current = self._current, None
        if current is not None:
            current.end(self.error_of_end(current.call.name))
        self._fail_queue()

    def _run_ranks(self, pool: Pool) -> Ending | None:
        """Supervise the ranks. Return how they ended; None if they were closed."""
        pool.owned = self.script.note_owned
        ending = pool.set_up()
        if not ending.is_success:
            return ending
        self.ready.set()
        try:
            while not self._has_ended(pool):
                pool.events.turn(self._look_at)
        finally:
            with pool.events.lock:  # a caller that reads leaves then
                self._driven = None
                pool.events.wake_caller()
                pool.events.take_back()
        if self._is_closing and self.last is None and not pool.is_ending:
            return None
        return self.last or Ending({}, cancelled=True)  # cancelled while no call ran

    def _has_ended(self, pool: Pool) -> bool:
        """Do what is due between two turns. Return True if the ranks have nothing more to do."""
        while self._advance(pool):
            pass
        if time.monotonic() >= self._look_at:
            self._look_at = NEVER
            self._is_closing = self._is_closing or (
                self.handle is not None and is_lost(self.handle)
            )
        with pool.events.lock:  # a caller may begin a call until then
            if self._current is not None:
                return False
            if self.last is None and pool.idle_deaths:
                self.last = pool.end_of_idle_ranks()
                pool.end()
            return self.last is not None or pool.is_ending or (self._is_closing and not self._queue)

    def _advance(self, pool: Pool) -> bool:
        """End the call that has ended, or begin the next.

        Return False if there is nothing to do now.
        """
        ending: Ending | None = None
        error: Exception | None = None
        with pool.events.lock:
            request = self._current
            if request is not None:
                if self._driven is not None or not pool.has_ended(request.call):
                    return False
                ending = self._finish(pool, request)
            else:
                if not self._queue or self.last is not None or pool.is_ending:
                    return False
                request = self._current = self._queue.popleft()
                pool.events.take_back()
                if request.is_done:  # cancelled before its turn: the ranks get its globals
                    request.call.ranks = ()
                try:
                    pool.begin(request.call)
                except Exception as reason:  # noqa: BLE001 (nothing was sent)
                    self._forget(request)
                    self._current, error = (
                        None,
                        reason.with_traceback(None),
                    )  # its frames hold the arguments
        if (how := ending or error) is not None:
            request.end(how)
        return True

    def _forget(self, request: RanksCall) -> None:
        """Forget what a call should have brought to all ranks, and refuse the calls that rely on
        it.
        """
        self.script.forget(request.packed)
        if not request.packed.is_news:
            return
        for later in list(self._queue):
            self.script.forget(later.packed)
            msg = (
                f"{request.call.name} could not bring its function and globals to all ranks, and "
                f"{later.call.name} waits behind it and may need them. Call it again"
            )
            later.end(LaunchError(msg))
        self._queue.clear()

    def _finish(self, pool: Pool, request: RanksCall) -> Ending:
        """Note the end of a call."""
        ending = pool.finish(request.call)
        if request.call.unloaded and not pool.is_ending:  # else all calls fail with the ranks
            self._forget(request)
        if pool.is_ending:
            self.last, self._last_name = ending, request.call.name
            pool.cancel()
        self._current = None
        self._look_at = NEVER if ending.is_success else time.monotonic() + _HANDLED_S
        return ending

    def _interrupt(self, pool: Pool, request: RanksCall, *, cancels: bool) -> None:
        if request is self._current:
            pool.interrupt(request.call, cancels=cancels)
        # also before it was submitted; in the queue it stays, because later calls rely on its
        # globals
        else:
            request.end(Ending({}, cancelled=True))

    def _fail_queue(self) -> None:
        with contextlib.suppress(
            IndexError
        ):  # it is empty, maybe because another thread was faster
            while True:
                request = self._queue.popleft()
                request.end(self.error_of_end(request.call.name))


def end_lost_ranks() -> None:
    """End the ranks whose handles are lost, and wait for it."""
    lost = [
        thread for thread in list(_running) if thread.handle is not None and is_lost(thread.handle)
    ]
    for thread in lost:
        thread.close()
    for thread in lost:
        thread.ended.wait()


def _end_with_interpreter() -> None:
    """End ranks that the script has left open.

    It runs before the server ends, which waits for its ranks.
    """
    threads = list(_running)
    for thread in threads:
        thread.cancel()
    for thread in threads:
        thread.ended.wait()


atexit.register(_end_with_interpreter)
os.register_at_fork(after_in_child=_running.clear)


def _raise(error: BaseException) -> NoReturn:
    raise error


def _do_nothing() -> None:
    """Stand for the wake-up of a thread that does not wait."""


def _stay() -> None:
    """Stand for the function of ranks that stay."""
