"""`Ranks`: the handle of ranks that stay.

    Ranks ── Call ──► the thread of the ranks ── Pool ──► ranks
      ▲                        │
      └────── Ending ──────────┘

The thread refers to no handle, so that ranks whose handle is lost end.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, NoReturn, ParamSpec, Self, TypeVar

from parawrap._public import public
from parawrap.displays import Table
from parawrap.errors import LaunchError, PlatformError, RankDiedError
from parawrap.launch._devices import Device, rank_device
from parawrap.launch._job import DECORATED, Job, check_function, check_signature
from parawrap.launch._launcher import launcher_name
from parawrap.launch._platform import OPEN_RANKS, Platform
from parawrap.launch._rank import below_a_rank, inside_a_rank
from parawrap.launch._rank_results import RankResults
from parawrap.launch.attempts import make_pool
from parawrap.launch.launch import Launch, make_transcripts, new_log_folder
from parawrap.launch.lost_handles import is_lost
from parawrap.launch.machines import Hosts, Machines, machines_for
from parawrap.processes.outcomes import Ending, values_of
from parawrap.processes.output import Printer
from parawrap.processes.pool import Call, Limits, Pool, stacks_of
from parawrap.processes.script import SentScript
from parawrap.processes.settings import Surroundings

P = ParamSpec("P")
R = TypeVar("R")

_LABEL = "ranks that stay"
_NEVER = float("inf")  # by the monotonic clock
_HANDLED_S = 1.0  # for a program to handle an error, which keeps the handle in its traceback


class _Request:
    """A call on its way to the ranks and back. Implements `Run` for the handle of the call."""

    def __init__(
        self,
        thread: _RanksThread,
        call: Call,
        sent: list[Any],
        on_end: Callable[[Ending | BaseException], None] | None = None,
    ) -> None:
        self._thread = thread
        self.call = call
        self.sent = sent  # the globals that come with it
        self.done = threading.Event()
        self.ending: Ending | None = None
        self._on_end = on_end

    def end(self, ending: Ending | LaunchError) -> None:
        self.ending = ending if isinstance(ending, Ending) else None
        if self._on_end is not None:
            self._on_end(ending)
        self.done.set()

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


class _RanksThread:
    """Owns the pool of ranks that stay. Any thread may call its methods, except `_run` and those below it."""

    def __init__(self, platform: Platform, machines: Machines) -> None:
        self.platform = platform
        self._machines = machines
        self.printer = Printer()
        self.transcripts = make_transcripts(platform, self.printer, new_log_folder(platform, _LABEL))
        self.script = SentScript(imports=True)
        self.ready = threading.Event()
        self.ended = threading.Event()
        self.error: BaseException | None = None  # of the start
        self.last: Ending | None = None  # that ended the ranks
        self.last_name = ""
        self.current: _Request | None = None
        self._settings = machines.settings()
        self._queue: deque[_Request] = deque()
        self._pool: Pool | None = None
        self._is_closing = False
        self.handle: weakref.ref[Ranks] | None = None
        self._look_at = _NEVER  # whether an error is all that keeps the handle
        self._thread = threading.Thread(target=self._run, name="parawrap-ranks", daemon=True)
        self._thread.start()

    def submit(self, request: _Request) -> None:
        """Make a call after those before it."""
        self._queue.append(request)
        self._wake(lambda: None)
        if self.ended.is_set():
            self._fail_queue()

    def interrupt(self, request: _Request, *, cancels: bool) -> None:
        """Raise KeyboardInterrupt in the function of each rank that runs it, or drop a call that has not begun."""
        request.call.is_cancelled = request.call.is_cancelled or cancels
        self._wake(partial(self._interrupt, request, cancels=cancels))

    def cancel(self) -> None:
        """End the ranks."""
        self._is_closing = True
        if (pool := self._pool) is not None:
            pool.post(pool.cancel)

    def close(self) -> None:
        """End the ranks once they have answered the calls that were submitted."""
        self._is_closing = True
        self._wake(lambda: None)

    def stacks(self) -> dict[int, str]:
        """Return the stacks of every rank that runs a call."""
        pool = self._pool
        return {} if pool is None or self.ended.is_set() else stacks_of(pool)

    @property
    def is_busy(self) -> bool:
        """True while a call runs or waits for its turn."""
        return self.current is not None or bool(self._queue)

    def state_of(self, rank: int) -> str:
        """Describe the state of a rank."""
        pool = self._pool
        return "ended" if pool is None or self.ended.is_set() else pool.state_of(rank)

    def error_of_end(self, name: str) -> LaunchError:
        """Return the error of a call that comes after the end of the ranks. It says how they have ended."""
        died, how = None, "they were cancelled"
        try:
            if self.error is not None:
                raise self.error
            if self.last is not None and self.last.lost:
                raise LaunchError(self.last.lost)
            if self.last is not None and not self.last.cancelled:
                values_of(self.last_name, self.last, (), self.platform.world_size)
        except BaseException as error:  # noqa: BLE001 (described)
            how = str(getattr(error, "message", f"{type(error).__name__}: {error}")).partition("\n")[0]
            died = error if isinstance(error, RankDiedError) else None
        msg = f"these ranks have ended, and cannot call {name}. Open new ones: Platform(...).open(). How they ended: {how}"
        if died is not None:
            return RankDiedError(msg, rank=died.rank, signal=died.signal, exit_code=died.exit_code)
        return LaunchError(msg)

    def _wake(self, act: Callable[[], None]) -> None:
        if (pool := self._pool) is not None:
            pool.post(act)

    # -- the thread

    def _run(self) -> None:
        try:
            with self._machines.open(lambda: self._is_closing) as hosts:
                if hosts is None:
                    self.last = Ending({}, cancelled=True)
                else:
                    self._run_ranks(hosts)
            if self.last is None:
                Job(self.platform, _stay).finish()
        except BaseException as error:  # noqa: BLE001 (raised by the handle)
            self.error = error
        finally:
            self._machines.close()
            for transcript in self.transcripts:
                transcript.finish()
            self.printer.finish()
            self.ended.set()
            self.ready.set()
            self._fail_queue()

    def _run_ranks(self, hosts: Hosts) -> None:
        platform = self.platform
        limits = Limits(platform.grace_s, platform.timeout_min, platform.hang_timeout_s)
        pool = make_pool(Job(platform, _stay), hosts, self._settings, self.transcripts, limits, stays=True)
        pool.owned = self.script.note_owned
        self._pool = pool
        try:
            pool.fork()
            self.last = pool.set_up()
            if self.last.is_success:
                self.last = None
                self.ready.set()
                self._serve(pool)
        finally:
            pool.close()

    def _serve(self, pool: Pool) -> None:
        while self.last is None and not pool.has_given_up:
            if self._queue:
                self._make_call(pool, self._queue.popleft())
            elif self._is_closing:
                return
            else:
                pool.turn(self._look_at)
            if time.monotonic() >= self._look_at:
                self._look_at = _NEVER
                self._is_closing = self._is_closing or (self.handle is not None and is_lost(self.handle))
            if self.last is None and pool.idle_deaths:
                self.last, self.last_name = Ending(pool.idle_deaths, pool.places()), _LABEL
                pool.end()
        if self.last is None:  # cancelled while no call ran
            self.last = Ending({}, cancelled=True)

    def _make_call(self, pool: Pool, request: _Request) -> None:
        if request.done.is_set():  # cancelled before its turn
            pool.call(Call(request.call.name, (), request.call.packed, changes=request.call.changes))  # with its globals
            return
        self.current = request
        ending = pool.call(request.call)
        self.current = None
        if not request.call.has_loaded:
            self.script.forget(request.sent)
        if pool.is_ending:
            self.last, self.last_name = ending, request.call.name
        request.end(ending)
        self._look_at = _NEVER if ending.is_success else time.monotonic() + _HANDLED_S
        if self.last is not None:
            pool.cancel()

    def _interrupt(self, request: _Request, *, cancels: bool) -> None:
        if request is self.current and self._pool is not None:
            self._pool.interrupt(request.call, cancels=cancels)
        elif request in self._queue:  # it stays there, because later calls rely on the globals that come with it
            request.end(Ending({}, cancelled=True))

    def _fail_queue(self) -> None:
        while self._queue:
            try:
                request = self._queue.popleft()
            except IndexError:  # another thread was faster
                return
            if not request.done.is_set():
                request.end(self.error_of_end(request.call.name))


@public
class Ranks:
    """Ranks that stay: processes that answer any number of calls. `Platform.open` returns one. Thread-safe.

    The ranks start once. Each call runs a function once per rank, as a function decorated with `wrapper` does: with the
    same arguments, results, output, and errors. Between calls, the ranks keep their process group, their CUDA context,
    their random numbers, and whatever functions stored, for example in a global variable. Calls of several threads run one
    after the other.

    **Globals.** A function of ``__main__``, such as one in a cell of a notebook, runs with the globals of the rank's own
    ``__main__``:

    - A call brings the globals that its functions use, if they are bound to other objects here than at the last call, or if
      they are small lists, dicts, or sets with other contents.
    - A global that a function assigns (``global model``) belongs to the ranks from then on. To set it from here, pass the
      value as an argument.
    - Other objects that changed in place here are not sent again. Bind the name to a new object instead.

    **Settings.** The working folder, the environment, and ``sys.path`` go with a call if they changed here.

    **Failures.** An exception of the function is raised here, and the ranks stay usable. Other ranks that run Python code
    are interrupted; those in long C code are waited for. If a rank waited in a collective, all ranks form new process
    groups before the next call. If a rank dies, or a call exceeds the platform's ``timeout_min`` or ``hang_timeout_s``,
    which count per call, the ranks end. Ctrl-C raises KeyboardInterrupt in the function of each rank; the ranks stay if all
    of them answer within ``grace_s``.

    Attributes:
        platform: The platform of the ranks.

    >>> from parawrap import Platform, current_rank
    >>> def load(size):
    ...     global weights
    ...     weights = [current_rank().global_rank] * size
    >>> def total():
    ...     return sum(weights)
    >>> with Platform(device="cpu", n_cpus=2).open() as ranks:
    ...     ranks(load, 3)
    ...     ranks(total)
    ...     ranks[1](total)
    RankResults(None, None)
    RankResults(0, 3)
    3
    """

    def __init__(self, platform: Platform) -> None:
        self.platform = platform
        self._packing = threading.RLock()
        self._surroundings = Surroundings()
        self._pid = os.getpid()
        self._is_closed = False
        self._thread = thread = _RanksThread(platform, machines_for(platform))
        self._end = weakref.finalize(self, _abandon, thread, self._pid)
        thread.handle = weakref.ref(self, _open.discard)
        _open.add(thread.handle)
        try:
            thread.ready.wait()
        except BaseException:  # Ctrl-C
            thread.cancel()
            raise
        if thread.error is not None:
            raise thread.error
        if thread.last is not None:
            values_of(_LABEL, thread.last, self._all(), platform.world_size)

    # -- calls

    def __call__(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> RankResults[R]:
        """Call the function once per rank, wait, and return the value of each rank.

        Raises:
            BaseException: The exception of the rank that failed first, with notes that name the rank.
            UnsendableError: If the function, an argument, a result, or a global cannot be sent.
            RankDiedError: If a rank was killed, or exited. The ranks end.
            LaunchTimeoutError: If the call exceeded ``timeout_min`` or ``hang_timeout_s``. The ranks end.
            LaunchError: If the ranks are closed, or wait for each other in a collective that others did not call.
        """
        return self._call(self._all(), function, args, kwargs)

    def submit(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Launch[R]:
        """Call the function once per rank, and return a handle without waiting. The call runs after those before it.

        `Launch.cancel` raises KeyboardInterrupt in the function, and keeps the ranks. `Launch.preempt` has no effect.
        """
        job = self._check(function, args, kwargs)
        launch: Launch[R] = Launch(replace(job, platform=self.platform), None)
        request = self._pack(job, self._all(), launch.end, dict(enumerate(launch._transcripts)), is_later=True)
        launch._run = request
        self._thread.submit(request)
        return launch

    def __getitem__(self, rank: int) -> OneRank:
        """Return one rank. Calling it runs a function on that rank only.

        Raises:
            IndexError: If the world does not have this rank.
        """
        size = self.platform.world_size
        if not -size <= rank < size:
            msg = f"rank={rank}: there are the ranks 0 to {size - 1}"
            raise IndexError(msg)
        return OneRank(self, rank % size)

    def __len__(self) -> int:
        return self.platform.world_size

    def __iter__(self) -> Iterator[OneRank]:
        return (OneRank(self, rank) for rank in self._all())

    def _all(self) -> Sequence[int]:
        return range(self.platform.world_size)

    def _call(self, ranks: Sequence[int], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RankResults[Any]:
        job = self._check(function, args, kwargs)
        request = None
        try:
            with self._packing:
                request = self._pack(job, ranks)
                self._thread.submit(request)
            request.done.wait()
        except BaseException:  # Ctrl-C, or a call that cannot be sent
            if request is not None:
                self._interrupt(request)
            raise
        if request.call.has_output:
            for transcript in self._thread.transcripts:
                transcript.show_unfinished()
            self._thread.printer.flush()
        return self._results(request)

    def _check(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Job:
        """Return the job of a call. A function that `wrapper` decorated is unwrapped.

        Raises:
            TypeError: If the function cannot be called so, or returns a coroutine or a generator.
            LaunchError: If the ranks have ended, or this process did not open them.
        """
        job = Job(self.platform, function, args, kwargs)
        if (job_of := DECORATED.get(type(function))) is not None:
            job = job_of(function, args, kwargs)
        check_function(job.function)
        check_signature(job.function, (*job.bound_to, *job.args), kwargs)
        self._check_open(job.name)
        return job

    def _pack(
        self, job: Job, ranks: Sequence[int], on_end: Any = None, transcripts: Any = None, *, is_later: bool = False
    ) -> _Request:
        """Pickle a call. `is_later` if the caller does not wait for it, and may change the arguments."""
        with self._packing:
            packed = job.pack(self._thread.script)
            if is_later:
                packed.detach()
            changes, sent = self._surroundings.changes(), self._thread.script.last_sent
        call = Call(job.name, ranks, packed, changes=changes, transcripts=transcripts or {})
        return _Request(self._thread, call, sent, on_end)

    def _interrupt(self, request: _Request) -> None:
        """Interrupt a call, and wait for its end. A further Ctrl-C ends the ranks."""
        try:
            self._thread.interrupt(request, cancels=False)
            request.done.wait()
        except BaseException:
            self._thread.cancel()
            raise

    def _results(self, request: _Request) -> RankResults[Any]:
        ending, call = request.ending, request.call
        if not call.has_begun:
            self._check_open(call.name)
        assert ending is not None
        try:
            return RankResults(values_of(call.name, ending, call.ranks, self.platform.world_size))
        finally:
            del ending, request  # the traceback of an error keeps this frame

    def _check_open(self, name: str) -> None:
        """Raise an error if the ranks have ended, or this process did not open them."""
        if os.getpid() != self._pid:
            msg = f"these ranks belong to process {self._pid}: call {name} there, not in a forked child"
            raise LaunchError(msg)
        if self._is_closed:
            msg = f"these ranks are closed, and cannot call {name}. Open new ones: Platform(...).open()"
            raise LaunchError(msg)
        if self._thread.last is not None or self._thread.ended.is_set():
            raise self._thread.error_of_end(name)

    # -- observation

    def stacks(self) -> dict[int, str]:
        """Return the stacks of all threads of each rank that runs a call, by global rank."""
        return self._thread.stacks()

    def logs(self, rank: int) -> str:
        """Return all output of a rank so far: standard output and standard error in order of arrival.

        Raises:
            IndexError: If `rank` is not one of these ranks.
        """
        if not 0 <= rank < len(self):
            msg = f"rank={rank}: there are the ranks 0 to {len(self) - 1}"
            raise IndexError(msg)
        return self._thread.transcripts[rank].text()

    @property
    def state(self) -> str:
        """``"idle"``, ``"running"`` during a call, or ``"ended"``."""
        if self._is_closed or self._thread.last is not None or self._thread.ended.is_set():
            return "ended"
        return "running" if self._thread.is_busy else "idle"

    def __repr__(self) -> str:
        return f"<{len(self)} ranks of {self.platform.device}: {self.state}>"

    def _repr_html_(self) -> str:
        """Return the state now: one row per rank with its device and its state."""
        rows = []
        for rank in self._all():
            device = rank_device(Device(self.platform.device), rank % self.platform.ranks_per_node)
            state = "ended" if self.state == "ended" else self._thread.state_of(rank)
            rows.append((f"{rank}", str(device), state))
        return Table(repr(self)[1:-1], ("rank", "device", "state"), rows, texts=("device", "state")).html()

    # -- the end

    def close(self) -> None:
        """End the ranks once they have answered the calls that were submitted, and wait for it. May be called again.

        Ranks that do not end within ``grace_s`` are killed. The platform's ``upon_finish`` is called if all ranks ended on
        their own.
        """
        if os.getpid() != self._pid:
            return
        self._is_closed = True
        try:
            self._thread.close()
            self._thread.ended.wait()
        except BaseException:  # Ctrl-C
            self._thread.cancel()
            self._thread.ended.wait()
            raise
        finally:
            self._end.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None and not issubclass(kind, Exception):  # Ctrl-C
            self._thread.cancel()
        self.close()

    def __reduce__(self) -> NoReturn:
        msg = "ranks belong to the process that opened them: call them there"
        raise TypeError(msg)


@public
class OneRank:
    """One rank of `Ranks`. Calling it runs a function on this rank, while the others are idle.

    >>> from parawrap import Platform, current_rank
    >>> with Platform(device="cpu", n_cpus=2).open() as ranks:
    ...     ranks[1](lambda: current_rank().global_rank)
    1
    """

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self._ranks = ranks
        self._rank = rank

    def __call__(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function on this rank, and return its value. Raises as a call of all ranks does."""
        value: R = self._ranks._call((self._rank,), function, args, kwargs)[0]
        return value

    def __repr__(self) -> str:
        return f"<rank {self._rank} of {self._ranks!r}>"


_open: set[weakref.ref[Ranks]] = set()


def open_ranks(platform: Platform) -> Ranks:
    """Start the ranks of a platform, and return once they can be called."""
    if inside_a_rank() or below_a_rank():
        msg = "Platform.open was called within a rank: a rank cannot launch ranks. Open them in the launching process"
        raise LaunchError(msg)
    name = launcher_name(platform)
    if name == "slurm":
        msg = (
            "launcher='slurm': a batch job cannot keep ranks for calls of this process. Start Ray in an allocation and "
            "give launcher='ray', give launcher='local' to keep them on this machine, or decorate the function with "
            "@wrapper(Platform(...))"
        )
        raise PlatformError(msg)
    if name == "env":
        msg = (
            "launcher='env': torchrun, srun, or mpirun has started this process as one rank of a world, and runs the "
            "script in every rank. Call the function directly, decorate it with @wrapper(Platform(...)), or give "
            "launcher='local' to start further ranks here"
        )
        raise PlatformError(msg)
    if platform.max_restarts:
        msg = (
            f"max_restarts={platform.max_restarts}: ranks that stay cannot restart, because what they keep would be lost. "
            "Leave max_restarts out, and open new ranks after a failure"
        )
        raise PlatformError(msg)
    for each in list(_open):
        if is_lost(each) and (handle := each()) is not None:
            handle.close()
    return Ranks(platform)


OPEN_RANKS.append(open_ranks)


def _abandon(thread: _RanksThread, pid: int) -> None:
    """End ranks that were never closed. Does not wait: the collector may run in any thread."""
    if os.getpid() == pid:
        thread.cancel()


def _end_with_interpreter() -> None:
    """End ranks that the script has left open. It runs before the server ends, which waits for its ranks."""
    threads = [handle._thread for each in list(_open) if (handle := each()) is not None]
    for thread in threads:
        thread.cancel()
    for thread in threads:
        thread.ended.wait()


atexit.register(_end_with_interpreter)
os.register_at_fork(after_in_child=_open.clear)


def _stay() -> None:
    """Stand for the function of ranks that stay."""
