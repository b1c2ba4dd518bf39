"""`Ranks`: the handle of ranks that stay."""

from __future__ import annotations

import copy
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from types import TracebackType
from typing import Any, NoReturn, ParamSpec, Self, TypeVar

from parawrap._public import public
from parawrap.displays import Table
from parawrap.errors import LaunchCancelledError, LaunchError, ParawrapError, PlatformError, RankDiedError
from parawrap.launch._devices import Device, rank_device
from parawrap.launch._packed_call import DECORATED, Job, check_function, check_signature
from parawrap.launch._platform import Platform
from parawrap.launch._rank import below_a_rank, inside_a_rank
from parawrap.launch._rank_results import RankResults
from parawrap.launch.coordinator._calls import Calls, RankCall
from parawrap.launch.coordinator._ending import Ending, results_or_error
from parawrap.launch.coordinator._launch import Launch, start
from parawrap.launch.coordinator._transcript import Transcript
from parawrap.launch.messages._sent_globals import SentGlobals
from parawrap.launch.rank._serve_calls import serve_calls

__all__ = ["OneRank", "Ranks", "open_ranks"]

P = ParamSpec("P")
R = TypeVar("R")

_LABEL = "ranks that stay"


@public
class Ranks:
    """Ranks that stay: processes that answer any number of calls. `Platform.open` returns one. Thread-safe.

    The ranks start once. Each call runs a function once per rank, as a function decorated with `wrapper` does: with the
    same arguments, results, output, and errors. Between calls, the ranks keep their process group, their CUDA context,
    their random numbers, and whatever functions stored, for example in a global variable. Calls of several threads run one
    after the other.

    **Globals.** A function of ``__main__``, such as one in a cell of a notebook, runs with the globals of the rank's own
    ``__main__``:

    - A global that a function assigns (``global model``) belongs to the ranks, and stays until the next call.
    - The ranks receive all other globals that the function uses, when they are new here or have changed here.
    - If this process and the ranks both assign a global, the next call that uses it raises UnsendableError.

    **Failures.** An exception of the function is raised here, and the ranks stay usable, also if others waited in a
    collective: then all ranks form new process groups. If a rank dies, or a call exceeds the platform's ``timeout_min`` or
    ``hang_timeout_s``, which count per call, the ranks end. Ctrl-C raises KeyboardInterrupt in the function of each rank;
    the ranks stay if all of them answer within ``grace_s``.

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
        self._sent = SentGlobals()
        self._calls = Calls(platform, self._sent)
        self._packing = threading.RLock()
        self._numbers = count(1)
        self._pid = os.getpid()
        self._is_closed = False
        job = Job(platform, serve_calls, calls=self._calls, label=_LABEL)
        self._launch: Launch[Any] = _launch(job)
        self._calls.transcripts = self._launch.records
        self._end = weakref.finalize(self, _abandon, self._launch, self._pid)
        self._end.atexit = False  # `_launch` ends all launches then
        try:
            self._calls.ready.wait()
        except BaseException:  # Ctrl-C
            self._launch.cancel()
            raise
        if self._calls.ending is not None:
            self._launch.results()

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
        return self._run(self._all(), function, args, kwargs)

    def submit(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Launch[R]:
        """Call the function once per rank, and return a handle without waiting. The call runs after those before it.

        `Launch.cancel` raises KeyboardInterrupt in the function, and keeps the ranks. `Launch.preempt` has no effect.
        """
        bare, sent_as, arguments = _check_call(function, args, kwargs)
        call = self._new_call(bare, self._all())
        job = Job(_quiet(self.platform), bare, arguments, kwargs)
        launch: Launch[R] = Launch(job, _CallBackend(self, call))
        call.records = launch.records
        self._submit(call, sent_as, arguments, kwargs, is_later=True)
        start(launch)
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

    def _new_call(self, function: Any, ranks: Sequence[int]) -> RankCall:
        name = str(getattr(function, "__qualname__", type(function).__qualname__))
        return RankCall(next(self._numbers), name, ranks)

    def _run(self, ranks: Sequence[int], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RankResults[Any]:
        bare, sent_as, arguments = _check_call(function, args, kwargs)
        call = self._new_call(bare, ranks)
        try:
            self._submit(call, sent_as, arguments, kwargs)
            call.done.wait()
            self._await_output(call)
        except BaseException:
            if self._calls.has(call):
                self._interrupt(call)
            raise
        return self._results(call)

    def _submit(
        self, call: RankCall, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_later: bool = False
    ) -> None:
        """Pickle a call, and hand it to the thread of the launch. `is_later` if the caller does not wait for it."""
        self._check_open(call.name)
        with self._packing:
            packed = self._sent.pack(function, args, kwargs, call.name)
            call.before = self._sent.commit(packed.sent)
            try:
                call.packed = packed.detached() if is_later else packed
                self._calls.submit(call)
            except BaseException:  # Ctrl-C
                if not self._calls.has(call):
                    self._sent.restore(call.before)
                raise

    def _interrupt(self, call: RankCall) -> None:
        """Interrupt a call, and wait for its end. A further Ctrl-C ends the ranks."""
        try:
            self._calls.interrupt(call)
            call.done.wait()
            self._await_output(call)
        except BaseException:
            self._launch.cancel()
            raise

    def _await_output(self, call: RankCall) -> None:
        if call.has_output:
            self._launch.flush_output()

    def _results(self, call: RankCall) -> RankResults[Any]:
        ending = call.ending
        assert ending is not None
        if not call.has_begun:
            self._check_open(call.name)
        results = results_or_error(call.name, self.platform, ending, call.ranks)
        if isinstance(results, BaseException):
            try:
                raise results
            finally:
                del results
        ending.close()
        return results

    def _check_open(self, name: str) -> None:
        """Raise an error if the ranks have ended, or this process did not open them."""
        if os.getpid() != self._pid:
            msg = f"these ranks belong to process {self._pid}: call {name} there, not in a forked child"
            raise LaunchError(msg)
        if self._is_closed:
            msg = f"these ranks are closed, and cannot call {name}. Open new ones: Platform(...).open()"
            raise LaunchError(msg)
        if self._calls.ending is not None:
            self._raise_first_death(name)

    def _raise_first_death(self, name: str) -> NoReturn:
        ending, place, error = self._calls.ending, self._calls.ended_in or _LABEL, None
        if self._calls.lost is None:
            error = results_or_error(place, self.platform, ending) if isinstance(ending, Ending) else ending
        if self._calls.lost is not None:
            how = self._calls.lost
        elif isinstance(error, LaunchCancelledError):
            how = "they were cancelled"
        elif isinstance(error, ParawrapError):
            how = error.message.partition("\n")[0]
        else:
            how = f"{type(error).__name__}: {error}" if isinstance(error, BaseException) else "all have returned"
        msg = f"these ranks have ended, and cannot call {name}. Open new ones: Platform(...).open(). How they ended: {how}"
        if isinstance(error, RankDiedError):
            raise RankDiedError(msg, rank=error.rank, signal=error.signal, exit_code=error.exit_code)
        raise LaunchError(msg)

    # -- observation

    def stacks(self) -> dict[int, str]:
        """Return the stacks of all threads of each rank, by global rank. Empty once the ranks have ended."""
        return self._launch.stacks()

    def logs(self, rank: int) -> str:
        """Return all output of a rank so far: standard output and standard error in order of arrival."""
        return self._launch.logs(rank)

    @property
    def state(self) -> str:
        """``"idle"``, ``"running"`` during a call, or ``"ended"``."""
        if self._is_closed or self._calls.ending is not None:
            return "ended"
        return "running" if self._calls.is_busy else "idle"

    def __repr__(self) -> str:
        return f"<{len(self)} ranks of {self.platform.device}: {self.state}>"

    def _repr_html_(self) -> str:
        """Return the state now: one row per rank with its device, its process, its state, and its last call."""
        has_ended = self.state == "ended"
        rows = [
            (
                f"{rank}",
                str(rank_device(Device(self.platform.device), rank % self.platform.ranks_per_node)),
                f"{self._calls.pid_of(rank)}",
                "ended" if has_ended else "running" if self._calls.is_running(rank) else "idle",
                self._calls.last_call_of(rank),
            )
            for rank in self._all()
        ]
        head = ("rank", "device", "process", "state", "last call")
        return Table(repr(self)[1:-1], head, rows, texts=("device", "state", "last call")).html()

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
            self._calls.close()
            self._calls.idle.wait()
            self._launch.await_end(self.platform.grace_s)
        finally:  # also after Ctrl-C
            self._launch.cancel()
            self._end.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None and not issubclass(kind, Exception):  # Ctrl-C
            self._launch.cancel()
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
        value: R = self._ranks._run((self._rank,), function, args, kwargs)[0]
        return value

    def __repr__(self) -> str:
        return f"<rank {self._rank} of {self._ranks!r}>"


class _CallBackend:
    """Implements `LaunchBackend` for the handle of one call."""

    def __init__(self, ranks: Ranks, call: RankCall) -> None:
        self._ranks = ranks
        self._call = call

    @property
    def has_begun(self) -> bool:
        return self._call.has_begun

    def supervise(self, transcripts: Sequence[Transcript], on_begin: Callable[[], None]) -> Ending:
        on_begin()
        self._call.done.wait()
        self._ranks._await_output(self._call)
        if not self._call.has_begun and not self._call.is_cancelled:
            self._ranks._check_open(self._call.name)
        assert self._call.ending is not None
        return self._call.ending

    def cancel(self) -> None:
        self._ranks._calls.interrupt(self._call, cancels=True)

    def preempt(self) -> None:
        """Do nothing: ranks that stay cannot restart."""

    def stacks(self) -> dict[int, str]:
        return self._ranks.stacks() if self._call.has_begun else {}

    def state_of(self, rank: int) -> str:
        return "running" if self._call.has_begun and self._ranks._calls.is_running(rank) else "idle"


def open_ranks(platform: Platform) -> Ranks:
    """Start the ranks of a platform, and return once they can be called."""
    if inside_a_rank() or below_a_rank():
        msg = "Platform.open was called within a rank: a rank cannot launch ranks. Open them in the launching process"
        raise LaunchError(msg)
    from parawrap.launch._launcher import launcher_name

    name = launcher_name(platform)
    if name == "slurm":
        msg = (
            "launcher='slurm': a batch job cannot keep ranks for calls of this process. Start Ray in an allocation and "
            "give launcher='ray', or decorate the function with @wrapper(Platform(...))"
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
    return Ranks(platform)


def _launch(job: Job) -> Launch[Any]:
    from parawrap.launch._launcher import launch

    return launch(job)


def _abandon(launch: Launch[Any], pid: int) -> None:
    """End ranks that were never closed. Does not wait: the collector may run in any thread."""
    if os.getpid() == pid:
        launch.request_cancel()


def _check_call(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, tuple[Any, ...]]:
    """Return the function, what to send for it, and the arguments. A function that `wrapper` decorated is unwrapped.

    Raises:
        TypeError: If the function cannot be called so, or returns a coroutine or a generator.
    """
    sent_as = function
    if (job_of := DECORATED.get(type(function))) is not None:
        job = job_of(function, args, kwargs)
        function, args = job.function, (*job.bound_to, *job.args)
        sent_as = function if job.sent_as is None else job.sent_as
    check_function(function)
    check_signature(function, args, kwargs)
    return function, sent_as, args


def _quiet(platform: Platform) -> Platform:
    """Return the platform without output and files: the launch of the ranks makes them."""
    quiet = copy.copy(platform)
    for name, value in {"verbose": False, "console_logs": None, "trace": None, "upon_finish": None}.items():
        object.__setattr__(quiet, name, value)
    return quiet
