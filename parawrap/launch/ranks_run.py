"""The run of ranks that stay, and the calls on their way to them and back.

::

    Ranks ── begin, drive ──► Pool ──► ranks     the caller reads the answers itself
      │                        ▲
      └── submit ──► queue ──► RanksRun          its thread does, for calls that wait their turn

A call belongs to its caller from `begin` to the end of `drive`, and to the run before and after.
While the caller has it, the pool lends the caller the connections on which answers arrive (`lend`,
`take_back` in `processes/events.py`): a warm call then needs no change of threads.

However the run ends, it ends all its calls. It has no reference to the handle: a handle that the
program drops can end the ranks.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import NoReturn

from parawrap.errors import LaunchError, ParawrapError, RankDiedError
from parawrap.launch._job import Job
from parawrap.launch._platform_fields import PlatformFields
from parawrap.launch.attempts import PoolRun
from parawrap.launch.machines import Machines
from parawrap.launch.run import How, Run, RunOutput, running
from parawrap.processes.calls import Call
from parawrap.processes.held_signals import HeldSignals, do_nothing
from parawrap.processes.latch import Latch
from parawrap.processes.outcomes import Ending, values_of
from parawrap.processes.pool import Pool
from parawrap.processes.script_globals import PackedCall, SentScript
from parawrap.processes.settings import SentSurroundings
from parawrap.processes.shared_memory import Block

LABEL = "ranks that stay"
_APART = (
    "The ranks may be one step apart now. Call functional.sync(model, optimizer) in all ranks (or "
    "load a checkpoint) before the next step. If you have a scheduler or GradScaler, add "
    "stateful=[scheduler]."
)
_WRAP_AGAIN = (
    " The next call has new process groups: make models in DistributedDataParallel again before "
    "that, with model = functional.to(functional.unwrap(model))."
)
_POLL_S = 1.0  # between two looks of a waiting caller: has the run ended, but not the call?
_NO_OUTPUT = RunOutput()  # for calls without a handle: the run of the ranks has their output


class RanksCall(Run):
    """A call on its way to ranks that stay and back.

    Attributes:
        packed: The pickled call.
        call: The state of the call in the pool.
        losses: The `losses` of the run before the pickle.
        leaves_ranks_apart: True if the call has ended in the middle of the function in some ranks,
            and the ranks stay.
    """

    finishes_job = False  # ``upon_finish`` belongs to the run of the ranks

    def __init__(
        self, ranks_run: RanksRun, job: Job, ranks: Sequence[int], *, has_handle: bool = False
    ) -> None:
        """Pickle a call. Calls must be submitted in the order of their pickles: hold `packing`.

        Args:
            ranks_run: The run of the ranks.
            job: The call.
            ranks: The ranks that make it.
            has_handle: True if a `Launch` shows it, and the caller may change its tensors.
        """
        output = RunOutput.of(job.platform, job.name, is_kept=True) if has_handle else _NO_OUTPUT
        super().__init__(job, output)
        self._ranks_run = ranks_run
        self.leaves_ranks_apart = False
        # The count first: a call that is lost later makes this pickle stale
        self.losses = ranks_run.losses
        while ranks_run.lost:
            ranks_run.script.forget(ranks_run.lost.popleft())
        # Packing notes nothing: a call that is never sent brings no globals to the ranks
        self.packed = job.pack(ranks_run.script)
        if has_handle:
            self.packed.block.copy_bytes()
        changes = ranks_run.surroundings.changes()
        self.call = Call(job.name, ranks, self.packed, changes)
        self.call.transcripts = dict(enumerate(output.transcripts))

    @property
    def has_begun(self) -> bool:
        return self.call.has_begun

    def start(self) -> None:
        self._ranks_run.submit(self)

    def cancel(self) -> None:
        self._ranks_run.interrupt(self, cancels=True)

    def stacks(self) -> dict[int, str]:
        return self._ranks_run.stacks() if self.has_begun else {}

    def state_of(self, rank: int) -> str:
        return self._ranks_run.state_of(rank) if self.has_begun else "idle"

    def take_notes(self) -> list[str]:
        if not self.leaves_ranks_apart:
            return []
        # Errors may be raised in several threads at once: one of them acquires it
        is_first = self._ranks_run.right_to_warn.acquire(blocking=False)
        if not is_first:
            return []
        note = _APART
        if isinstance(self.how, Ending) and self.how.regroups:
            note += _WRAP_AGAIN
        return [note]

    def wait_for_end(self) -> None:
        """Wait for the end, also if the run ends without ending this call."""
        while not self._ended.wait(_POLL_S):
            if self._ranks_run.is_done():
                self.end(self._ranks_run.error_of_end(self.call.name))

    def ending(self) -> Ending:
        """Return how the ranks ended the call, or raise its error if no rank got it."""
        if isinstance(self.how, BaseException):
            raise self.how
        assert isinstance(self.how, Ending)
        return self.how


class RanksRun(PoolRun):
    """Starts the ranks, supervises them, and makes the calls that wait for their turn.

    The pool's lock guards the writes of `_current`, `_driven`, `last_ending`, and `losses`. Reads
    without it see the old value or the new one.

    Attributes:
        script: The globals that the ranks have. Used with `packing` held. Only its `note_owned` is
            called by the pool, with the pool's lock; each step of that is atomic.
        surroundings: The environment and the folders that the ranks have. Used with `packing` held.
        packing: Held from the pickle of a call until the call is sent or in the queue.
        lost: Pickles that did not reach all ranks, and that `script` has not forgotten yet.
        losses: The number of calls whose function and globals did not reach all ranks.
        ready: Set once the ranks can be called, or could not be started.
        last_ending: The ending of the call or the idle time in which the ranks have ended. None
            while they take calls.
        has_lost_handle: True once nothing refers to the handle any more.
        is_closed: True once the user has closed the handle. Calls in the queue are still made.
        right_to_warn: A lock that the error with the note `_APART` has.
    """

    thread_name = "parawrap-ranks"

    def __init__(self, platform: PlatformFields, machines: Machines) -> None:
        super().__init__(Job(platform, _stay), machines, RunOutput.of(platform, LABEL))
        self.script = SentScript(imports=True)
        self.surroundings = SentSurroundings()
        # Calls must reach the ranks in the order of their pickles, because a pickle leaves out what
        # earlier ones bring. Reentrant: code that pickling runs may call the ranks
        self.packing = threading.RLock()
        self.lost: deque[PackedCall] = deque()
        self.losses = 0
        self.ready = Latch()
        self.last_ending: Ending | None = None
        self.has_lost_handle = False
        self._last_call_name = LABEL
        self._current: RanksCall | None = None  # that the ranks run
        # The same call, while its caller reads the answers itself, and finishes it
        self._driven: RanksCall | None = None
        self._queue: deque[RanksCall] = deque()
        self.is_closed = False
        # The first error after which the ranks may be one step apart acquires it, and never
        # releases it: the next call that succeeds puts a new lock here
        self.right_to_warn = threading.Lock()

    # -- any thread

    def submit(self, request: RanksCall) -> None:
        """Make a call after those before it."""
        # Ctrl-C waits: what is noted as sent is sent, and what leaves the queue is ended
        held = HeldSignals(do_nothing)
        self._note_sent(request)
        self._queue.append(request)
        self._wake()
        # The thread may have looked at the queue for the last time just before
        if self.is_done():
            self._fail_queue()
        held.end()

    def interrupt(self, request: RanksCall, *, cancels: bool) -> None:
        """Raise KeyboardInterrupt in the ranks of a call, or end a call that has not begun.

        If it `cancels`, the caller gets LaunchCancelledError.
        """
        pool = self._pool
        if pool is not None:
            pool.post(partial(self._interrupt, pool, request, cancels=cancels))

    def close(self) -> None:
        """End the ranks once they have answered the calls that were submitted."""
        self.is_closed = True
        self._wake()

    def lose_handle(self) -> None:
        """End the ranks, without waiting: the collector calls this in any thread."""
        self.has_lost_handle = True
        self.cancel()

    def check_open(self, name: str) -> None:
        """Raise LaunchError if the ranks have ended, or this process did not open them."""
        if self.is_in_forked_child:
            msg = (
                f"these ranks belong to process {self._pid}: call {name} there, not in a forked "
                "child"
            )
            raise LaunchError(msg)
        if self.is_closed:
            msg = (
                f"these ranks are closed, and cannot call {name}. Open new ones: "
                "Platform(...).open()"
            )
            raise LaunchError(msg)
        if self.is_over:
            raise self.error_of_end(name)

    @property
    def is_busy(self) -> bool:
        """True while a call runs or waits for its turn."""
        return self._current is not None or bool(self._queue)

    @property
    def is_over(self) -> bool:
        """True if the ranks have ended, or are about to: they take no call."""
        return self.last_ending is not None or self.is_done()

    def error_of_end(self, name: str) -> LaunchError:
        """Return the error of a call after the end of the ranks. It says how they have ended."""
        ending = self.last_ending
        died: RankDiedError | None = None
        text = "they were closed" if ending is None else "they were cancelled"
        # Raised and caught here, for its text: `values_of` has the words for each kind of ending
        try:
            if isinstance(self.how, BaseException):
                raise self.how
            if ending is not None and ending.lost:
                raise LaunchError(ending.lost)
            if ending is not None and not ending.cancelled:
                values_of(self._last_call_name, ending, (), len(self.output.transcripts))
        except BaseException as error:  # noqa: BLE001 (its text becomes a part of the message)
            text = f"{type(error).__name__}: {error}"
            if isinstance(error, ParawrapError):
                text = error.message  # `str` adds the page of the documentation
            text = text.partition("\n")[0]  # without a traceback
            if isinstance(error, RankDiedError):
                died = error
        msg = (
            f"these ranks have ended, and cannot call {name}. Open new ones: "
            f"Platform(...).open(). How they ended: {text}"
        )
        if died is not None:
            return RankDiedError(msg, rank=died.rank, signal=died.signal, exit_code=died.exit_code)
        return LaunchError(msg)

    # -- a caller

    def begin(self, request: RanksCall) -> HeldSignals | None:
        """Send a call from this thread if the ranks are idle, and submit it otherwise.

        Return the signals that are held back until the end of `drive`, which must follow; None if
        the call was submitted.
        """
        pool = self._pool
        if pool is None:
            self.submit(request)
            return None
        held = HeldSignals(pool.events.wake_caller)
        has_begun = False
        try:
            with pool.events.lock:
                # A stale pickle goes to the queue, where `_advance` refuses it
                is_stale = request.losses != self.losses
                can_begin = self._is_idle and not pool.is_ending
                if can_begin and not is_stale:
                    pool.begin(request.call)
                    self._current = self._driven = request
                    pool.events.lend()
                    self._note_sent(request)
                    has_begun = True
        except Exception as error:  # noqa: BLE001 (no rank has got the call)
            # Without its frames, which would keep the arguments alive
            request.end(error.with_traceback(None))
        if has_begun:
            return held
        held.end()
        if not request.is_done():
            self.submit(request)
        return None

    def drive(self, request: RanksCall, held: HeldSignals) -> None:
        """Read the answers to a call that this thread has begun, until its end or a signal.

        After a signal, the thread of the run goes on with the call.
        """
        pool = self._pool
        if pool is None:  # the run has ended since `begin`, and has ended the call
            held.end()
            return
        error: BaseException | None = None
        try:
            while self._driven is request and not held.has_arrived:
                if pool.has_ended(request.call):
                    break
                pool.events.turn_of_caller()
        except BaseException as reason:  # noqa: BLE001 (not of a signal: the run ends with it)
            error = reason
        self._give_back(pool, request, error)
        held.end()

    def _give_back(self, pool: Pool, request: RanksCall, error: BaseException | None) -> None:
        """Finish a call that has ended, or hand it to the thread of the run."""
        ending: Ending | None = None
        with pool.events.lock:
            if self._driven is not request:  # the run has ended, and ends the call
                return
            self._driven = None
            if error is None and pool.has_ended(request.call):
                # This thread still has the connections with answers. No rank answers before the
                # next call, which moves them to the thread that reads its answers
                ending = self._finish(pool, request)
            else:
                pool.events.take_back()
        if error is not None:
            pool.post(partial(_raise, error))  # in the thread of the run, which ends the ranks
        elif ending is not None:
            request.end(ending)
            is_last = self.is_closed or self.last_ending is not None
            run_has_work = bool(self._queue) or is_last or not ending.is_success
            if not run_has_work:
                return  # the thread of the run may sleep on
        self._wake()

    def _note_sent(self, request: RanksCall) -> None:
        """Note what later calls need not bring again. Call this while signals are held back."""
        self.script.note_sent(request.packed)
        self.surroundings.note_sent(request.call.changes)

    @property
    def _is_idle(self) -> bool:
        """True if the ranks take calls, and run none."""
        takes_no_calls = self.is_closed or self.last_ending is not None
        return not (self.is_busy or takes_no_calls)

    def _wake(self) -> None:
        pool = self._pool
        if pool is not None:
            pool.post(do_nothing)

    # -- the thread

    def _supervise(self) -> Ending:
        try:
            with self._open_pool(stays=True) as pool:
                if pool is None:
                    self.last_ending = Ending.of_cancelled()
                else:
                    self._has_begun = True  # for `Run.has_begun`
                    self.last_ending = self._run_ranks(pool)
        finally:
            self._machines.close()
        return self.last_ending or Ending({})  # closed: a success, so that `upon_finish` is called

    def end(self, how: How) -> None:
        """Report the end of the ranks to all that wait, whatever has ended the thread."""
        try:
            super().end(how)
        finally:
            self.ready.set()
            # No rank is alive, so nothing else can end these calls
            current, self._current = self._current, None
            if current is not None:
                current.end(self.error_of_end(current.call.name))
            self._fail_queue()

    def _run_ranks(self, pool: Pool) -> Ending | None:
        """Supervise the ranks. Return how they ended; None if they were closed."""
        pool.note_owned = self.script.note_owned
        ending = pool.set_up()
        if not ending.is_success:
            return ending
        self.ready.set()
        try:
            while self._serve(pool):
                pool.events.turn()
        finally:
            # A caller that reads answers now leaves its loop, and the run ends its call
            with pool.events.lock:
                self._driven = None
                pool.events.wake_caller()
                pool.events.take_back()
        # The user has closed the ranks, and nothing failed
        were_closed = self.is_closed and self.last_ending is None and not pool.is_ending
        if were_closed:
            return None
        # A call, or a death between two calls, notes `last_ending`. Without one, `cancel` has ended
        # ranks that were idle
        return self.last_ending or Ending.of_cancelled()

    def _serve(self, pool: Pool) -> bool:
        """Make the calls that are due. Return False once the ranks have nothing more to do."""
        while self._advance(pool):
            pass
        # Under the lock, because a caller may begin a call until then
        with pool.events.lock:
            if self._current is not None:
                return True
            if self.last_ending is None and pool.idle_deaths:
                self.last_ending = pool.end_of_idle_ranks()
                pool.end()
            have_ended = self.last_ending is not None or pool.is_ending
            gets_no_more_calls = self.is_closed and not self._queue
            return not (have_ended or gets_no_more_calls)

    def _advance(self, pool: Pool) -> bool:
        """End the call that has ended, or begin the next. Return False if nothing is due."""
        how: How | None = None
        with pool.events.lock:
            request = self._current
            if request is not None:
                if self._driven is not None or not pool.has_ended(request.call):
                    return False
                how = self._finish(pool, request)
            else:
                if not self._queue or self.last_ending is not None or pool.is_ending:
                    return False
                request = self._current = self._queue.popleft()
                pool.events.take_back()  # the connections with answers, from the last caller
                if request.losses != self.losses:
                    request.end(_error_of_loss(request.call.name))
                # Refused, or cancelled before its turn: it is sent for its globals and settings
                # alone, which later calls rely on, and no rank runs its function
                if request.is_done():
                    request.call.ranks = ()
                try:
                    pool.begin(request.call)
                except Exception as reason:  # noqa: BLE001 (nothing was sent)
                    self._note_loss(request)
                    self._current = None
                    # Without its frames, which would keep the arguments alive
                    how = reason.with_traceback(None)
        if how is not None:
            request.end(how)
        return True

    def _note_loss(self, request: RanksCall) -> None:
        """Note a call that did not reach all ranks. The pool's lock is held.

        Another thread may be pickling a call that relies on this one. So the next pickle changes
        `script`, not this thread, and `_advance` refuses the calls that are pickled by now.
        """
        # Without its memory, which would keep the arguments alive. It is here before the count
        # changes: a pickle that has the new count has forgotten it
        self.lost.append(request.packed._replace(block=Block()))
        if request.packed.brings_definitions:  # else no other call relies on it
            self.losses += 1

    def _finish(self, pool: Pool, request: RanksCall) -> Ending:
        """Note the end of a call."""
        ending = pool.finish(request.call)
        call = request.call
        if ending.is_success:
            self.right_to_warn = threading.Lock()  # a new one: the next such error may warn
        # Without process groups, no call keeps the states of the ranks equal
        elif ending.is_uneven and not pool.is_ending and self.job.platform.requires_ipc:
            have_begun = set(call.ranks) - call.unloaded
            request.leaves_ranks_apart = len(call.ranks) > 1 and bool(have_begun)
        # Ranks that could not unpickle the call lack its globals. If the ranks end, all calls fail
        # with them
        if call.unloaded and not pool.is_ending:
            self._note_loss(request)
        if pool.is_ending:
            self.last_ending, self._last_call_name = ending, request.call.name
        self._current = None
        return ending

    def _interrupt(self, pool: Pool, request: RanksCall, *, cancels: bool) -> None:
        if request is self._current:
            pool.interrupt(request.call, cancels=cancels)
        else:
            # The call is sent in its turn, without its function: later calls rely on its globals
            request.end(Ending.of_cancelled())

    def _fail_queue(self) -> None:
        """End the calls in the queue. Several threads may do so at the same time."""
        while True:
            try:
                request = self._queue.popleft()
            except IndexError:
                return
            request.end(self.error_of_end(request.call.name))


def end_lost_ranks() -> None:
    """Wait for the end of ranks whose handles are lost: they hold the memory of devices."""
    for run in running():
        if isinstance(run, RanksRun) and run.has_lost_handle:
            run.wait()


def _error_of_loss(name: str) -> LaunchError:
    """Return the error of a call that relies on another one, which did not reach all ranks."""
    return LaunchError(
        f"a call before {name} could not bring its function and globals to all ranks, and {name} "
        "may need them. Call it again"
    )


def _raise(error: BaseException) -> NoReturn:
    raise error


def _stay() -> None:
    """Stand for the function of ranks that stay."""
