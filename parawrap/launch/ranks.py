"""`Ranks`: the handle of ranks that stay."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, NoReturn, ParamSpec, Self, TypeVar

from parawrap._public import public
from parawrap.displays import Table
from parawrap.errors import LaunchError, PlatformError
from parawrap.launch._devices import Device, rank_device
from parawrap.launch._job import DECORATED, Job, check_function
from parawrap.launch._launcher import launcher_name, machines_for
from parawrap.launch._platform import OPEN_RANKS, Platform
from parawrap.launch._rank import below_a_rank, inside_a_rank
from parawrap.launch._rank_results import RankResults
from parawrap.launch.launch import Launch
from parawrap.launch.ranks_thread import LABEL, RanksCall, RanksThread, end_lost_ranks
from parawrap.processes.outcomes import values_of
from parawrap.processes.pool import Call

P = ParamSpec("P")
R = TypeVar("R")


@public
class Ranks:
    """Ranks that stay: processes that answer any number of calls.

    `Platform.open` returns one. Thread-safe.

    The ranks start once. Each call runs a function once per rank, as a function decorated with
    `wrapper` does: with the same arguments, results, output, and errors. Between calls, the ranks
    keep their process group, their CUDA context, their random numbers, and whatever functions
    stored, for example in a global variable. Calls of several threads run one after the other.

    **Globals.** A function of ``__main__``, such as one in a cell of a notebook, runs with the
    globals of the rank's own ``__main__``:

    - A call brings the globals that its functions use, if they are bound to other objects here than
      at the last call, or if they are small lists, dicts, or sets with other contents.
    - A global that a function assigns (``global model``) belongs to the ranks from then on. To set
      it from here, pass the value as an argument.
    - Other objects that changed in place here are not sent again. Bind the name to a new object
      instead.

    **Settings.** The working folder, the environment, and ``sys.path`` go with a call if they
    changed here.

    **Failures.** An exception of the function is raised here, and the ranks stay usable. Other
    ranks that run Python code are interrupted; those in long C code are waited for. If a rank
    waited in a collective, all ranks form new process groups before the next call. If a rank dies,
    or a call exceeds the platform's ``timeout_min`` or ``hang_timeout_s``, which count per call,
    the ranks end. Ctrl-C raises KeyboardInterrupt in the function of each rank; the ranks stay if
    all of them answer within ``grace_s``.

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
        self._all = range(platform.world_size)
        self._packing = threading.RLock()
        self._pid = os.getpid()
        self._is_closed = False
        self._thread = thread = RanksThread(platform, machines_for(platform))
        thread.handle = weakref.ref(self)
        weakref.finalize(self, thread.cancel)  # does not wait: the collector may run in any thread
        try:
            thread.ready.wait()
        except BaseException:  # Ctrl-C
            thread.cancel()
            raise
        if thread.error is not None:
            raise thread.error
        if thread.last is not None:
            values_of(LABEL, thread.last, self._all, len(self._all))

    # -- calls

    def __call__(
        self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> RankResults[R]:
        """Call the function once per rank, wait, and return the value of each rank.

        Raises:
            BaseException: The exception of the rank that failed first, with notes that name the
                rank.
            UnsendableError: If the function, an argument, a result, or a global cannot be sent.
            RankDiedError: If a rank was killed, or exited. The ranks end.
            LaunchTimeoutError: If the call exceeded ``timeout_min`` or ``hang_timeout_s``. The
                ranks end.
            LaunchError: If the ranks are closed, or wait for each other in a collective that others
                did not call.
        """
        return self._call(self._all, function, args, kwargs)

    def submit(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Launch[R]:
        """Call the function once per rank, and return a handle without waiting.

        The call runs after those before it.

        `Launch.cancel` raises KeyboardInterrupt in the function, and keeps the ranks.
        `Launch.preempt` has no effect.
        """
        job = self._check(function, args, kwargs)
        launch: Launch[R] = Launch(replace(job, platform=self.platform), None)
        with self._packing:
            launch._run = request = self._pack(job, self._all, detaches=True)
            request.call.transcripts = dict(enumerate(launch._transcripts))
            request.upon_end = launch.end
            self._thread.submit(request)
        return launch

    def __getitem__(self, rank: int) -> OneRank:
        """Return one rank. Calling it runs a function on that rank only.

        Raises:
            IndexError: If the world does not have this rank.
        """
        size = len(self)
        if not -size <= rank < size:
            msg = f"rank={rank}: there are the ranks 0 to {size - 1}"
            raise IndexError(msg)
        return OneRank(self, rank % size)

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[OneRank]:
        return (OneRank(self, rank) for rank in self._all)

    def _call(
        self, ranks: Sequence[int], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> RankResults[Any]:
        job = self._check(function, args, kwargs)
        request = None
        try:
            with self._packing:
                request = self._pack(job, ranks)
                held = self._thread.begin(request)
            if held is not None:
                self._thread.drive(request, held)
            request.wait()
        except BaseException:  # Ctrl-C, or a call that cannot be sent
            if request is not None:
                self._interrupt(request)
            raise
        ending = request.result()
        if ending.has_output:
            for transcript in self._thread.transcripts:
                transcript.show_unfinished()
            self._thread.printer.flush()
        return RankResults(values_of(job.name, ending, ranks, len(self)))

    def _check(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Job:
        """Return the job of a call. A function that `wrapper` decorated is unwrapped.

        Raises:
            TypeError: If the function is not callable, or returns a coroutine or a generator.
            LaunchError: If the ranks have ended, or this process did not open them.
        """
        job = Job(self.platform, function, args, kwargs)
        if (job_of := DECORATED.get(type(function))) is not None:
            job = job_of(function, args, kwargs)
        check_function(job.function)
        self._check_open(job.name)
        return job

    def _pack(self, job: Job, ranks: Sequence[int], *, detaches: bool = False) -> RanksCall:
        """Pickle a call.

        Calls must be submitted in the order of their pickles. `detaches` copies its tensors.
        """
        packed = job.pack(self._thread.script)
        if detaches:
            packed.block.detach()
        return RanksCall(
            self._thread, Call(job.name, ranks, packed, self._thread.surroundings.changes())
        )

    def _interrupt(self, request: RanksCall) -> None:
        """Interrupt a call, and wait for its end. A further Ctrl-C ends the ranks."""
        try:
            self._thread.interrupt(request, cancels=False)
            request.wait()
        except BaseException:
            self._thread.cancel()
            raise

    def _check_open(self, name: str) -> None:
        """Raise an error if the ranks have ended, or this process did not open them."""
        if os.getpid() != self._pid:
            msg = (
                f"these ranks belong to process {self._pid}: call {name} there, not in a forked "
                "child"
            )
            raise LaunchError(msg)
        if self._is_closed:
            msg = (
                f"these ranks are closed, and cannot call {name}. Open new ones: "
                "Platform(...).open()"
            )
            raise LaunchError(msg)
        if self._thread.last is not None or self._thread.ended.is_set():
            raise self._thread.error_of_end(name)

    # -- observation

    def stacks(self) -> dict[int, str]:
        """Return the stacks of all threads of each rank that runs a call, by global rank."""
        return self._thread.stacks()

    def logs(self, rank: int) -> str:
        """Return all output of a rank so far: standard output and standard error in order of
        arrival.

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
        for rank in self._all:
            device = rank_device(Device(self.platform.device), rank % self.platform.ranks_per_node)
            state = "ended" if self.state == "ended" else self._thread.state_of(rank)
            rows.append((f"{rank}", str(device), state))
        return Table(
            repr(self)[1:-1], ("rank", "device", "state"), rows, texts=("device", "state")
        ).html()

    # -- the end

    def close(self) -> None:
        """End the ranks once they have answered the calls that were submitted, and wait for it.

        May be called again.

        Ranks that do not end within ``grace_s`` are killed. The platform's ``upon_finish`` is
        called if all ranks ended on their own.
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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
        """Call the function on this rank, and return its value.

        Raises as a call of all ranks does.
        """
        value: R = self._ranks._call((self._rank,), function, args, kwargs)[0]
        return value

    def __repr__(self) -> str:
        return f"<rank {self._rank} of {self._ranks!r}>"


def open_ranks(platform: Platform) -> Ranks:
    """Start the ranks of a platform, and return once they can be called."""
    if inside_a_rank() or below_a_rank():
        msg = (
            "Platform.open was called within a rank: a rank cannot launch ranks. Open them in "
            "the launching process"
        )
        raise LaunchError(msg)
    name = launcher_name(platform)
    if name == "slurm":
        msg = (
            "launcher='slurm': a batch job cannot keep ranks for this process. Give "
            "launcher='ray' and start Ray in an allocation, give launcher='local', or decorate "
            "the function with @wrapper(Platform(...))"
        )
        raise PlatformError(msg)
    if name == "env":
        msg = (
            "launcher='env': torchrun, srun, or mpirun has started this process as a rank. Call "
            "the function directly, decorate it with @wrapper(Platform(...)), or give "
            "launcher='local' to start further ranks here"
        )
        raise PlatformError(msg)
    if platform.max_restarts:
        msg = (
            f"max_restarts={platform.max_restarts}: ranks that stay cannot restart, because what "
            "they keep would be lost. Leave max_restarts out, and open new ranks after a failure"
        )
        raise PlatformError(msg)
    end_lost_ranks()
    return Ranks(platform)


OPEN_RANKS.append(open_ranks)
