"""`Ranks`: the handle of ranks that stay."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing import resource_tracker
from types import TracebackType
from typing import Any, NoReturn, ParamSpec, Self, TypeVar

from parawrap._public import public
from parawrap.displays import Table, spell_count
from parawrap.errors import LaunchError, PlatformError, add_note
from parawrap.launch._job import DECORATED, Job, check_function
from parawrap.launch._launcher import launcher_name, machines_for
from parawrap.launch._platform_fields import PlatformFields
from parawrap.launch._rank import inside_a_rank
from parawrap.launch._rank_results import RankResults
from parawrap.launch.launch import Launch
from parawrap.launch.ranks_run import LABEL, RanksCall, RanksRun, end_lost_ranks
from parawrap.processes.outcomes import values_of

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

    **The end.** `close`, or the end of a ``with`` block, ends the ranks, and so does the end of the
    script. A handle that nothing refers to ends them too; an output cell of a notebook refers to
    what it shows.

    **Failures.** An exception of the function is raised here, and the ranks stay usable. Other
    ranks that run Python code are interrupted; those in long C code are waited for. If a rank
    waited in a collective, all ranks form new process groups before the next call. If a rank dies,
    or a call exceeds the platform's ``timeout_min`` or ``hang_timeout_s``, which count per call,
    the ranks end. Ctrl-C raises KeyboardInterrupt in the function of each rank; the ranks stay if
    all of them answer within ``grace_s``. After such a failure, the ranks may be one step apart:
    the first error says so. `functional.sync` gives all ranks the state of one.

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

    def __init__(self, platform: PlatformFields) -> None:
        self.platform = platform
        self._all = range(platform.world_size)
        self._run = run = RanksRun(platform, machines_for(platform))
        # A handle that the program has dropped ends its ranks. So neither the run nor a frame in
        # the traceback of a call may refer to this handle
        weakref.finalize(self, run.lose_handle)
        run.start()
        try:
            run.ready.wait()
        except BaseException:  # Ctrl-C
            run.cancel()
            raise
        if isinstance(run.how, BaseException):
            raise run.how
        if run.last_ending is not None:
            # The ranks have ended before the first call. This raises the error
            values_of(LABEL, run.last_ending, self._all, len(self._all))

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
        run, ranks = self._run, self._all
        # The traceback of an error has this frame. An interactive interpreter keeps the traceback,
        # and would keep the ranks alive, with the memory of their devices
        del self
        return _call(run, ranks, function, args, kwargs)

    def submit(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Launch[R]:
        """Call the function once per rank, and return a handle without waiting.

        The call runs after those before it. `Launch.cancel` raises KeyboardInterrupt in the
        function, and keeps the ranks. `Launch.preempt` has no effect.
        """
        run, ranks = self._run, self._all
        del self  # as above
        job = _job_of(run, function, args, kwargs)
        with run.packing:
            request = RanksCall(run, job, ranks, has_handle=True)
            request.start()
        return Launch(request)

    def __getitem__(self, rank: int) -> OneRank:
        """Return one rank. Calling it runs a function on that rank only.

        Raises:
            IndexError: If the world does not have this rank.
        """
        size = len(self)
        if not -size <= rank < size:
            del self  # as in `__call__`
            msg = f"rank={rank}: there are the ranks 0 to {size - 1}"
            raise IndexError(msg)
        return OneRank(self, rank % size)  # a negative rank counts from the last one

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[OneRank]:
        return (OneRank(self, rank) for rank in self._all)

    # -- observation

    def stacks(self) -> dict[int, str]:
        """Return the stacks of all threads of each rank that runs a call, by global rank."""
        return self._run.stacks()

    def logs(self, rank: int) -> str:
        """Return all output of a rank so far, standard output and error in order of arrival.

        Raises:
            IndexError: If `rank` is not one of these ranks.
        """
        run = self._run
        del self  # as in `__call__`
        return run.log_of(rank)

    @property
    def state(self) -> str:
        """``"idle"``, ``"running"`` during a call, or ``"ended"``."""
        if self._run.is_closed or self._run.is_over:
            return "ended"
        return "running" if self._run.is_busy else "idle"

    def __repr__(self) -> str:
        return f"<{spell_count(len(self), 'rank')} of {self.platform.device}: {self.state}>"

    def _repr_html_(self) -> str:
        """Return the state now: one row per rank with its device and its state."""
        platform = self.platform.as_sent()  # the ranks number their devices in their own way
        have_ended = self.state == "ended"
        rows = []
        for rank in self._all:
            device = platform.device_of(rank % platform.ranks_per_node)
            state = "ended" if have_ended else self._run.state_of(rank)
            rows.append((f"{rank}", str(device), state))
        title = f"{self!r}".strip("<>")
        return Table(title, ("rank", "device", "state"), rows, texts=("device", "state")).html()

    # -- the end

    def close(self) -> None:
        """End the ranks once they have answered the calls that were submitted, and wait for it.

        May be called again.

        Ranks that do not end within ``grace_s`` are killed. The platform's ``upon_finish`` is
        called if all ranks ended on their own.
        """
        run = self._run
        # A forked child has a copy of the handle, and must not end the ranks of its parent
        if run.is_in_forked_child:
            return
        run.close()
        try:
            run.wait()
        except BaseException:  # Ctrl-C
            run.cancel()
            run.wait()
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
            self._run.cancel()
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
        run, ranks = self._ranks._run, (self._rank,)
        # As in `Ranks.__call__`
        del self
        results: RankResults[R] = _call(run, ranks, function, args, kwargs)
        return results[0]

    def __repr__(self) -> str:
        return f"<rank {self._rank} of {self._ranks!r}>"


# -- a call. No frame of these functions refers to a handle: see `Ranks.__call__`


def _call(
    run: RanksRun,
    ranks: Sequence[int],
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> RankResults[Any]:
    """Call a function on some of the ranks, wait, and return their values."""
    job = _job_of(run, function, args, kwargs)
    request: RanksCall | None = None
    try:
        # Released before the answers are read, so that other threads may put calls into the queue
        with run.packing:
            request = RanksCall(run, job, ranks)
            held = run.begin(request)
        if held is not None:
            run.drive(request, held)
        request.wait_for_end()
    except BaseException as error:
        # Ctrl-C. It is None if Ctrl-C came before, or if the call cannot be pickled
        if request is not None:
            _interrupt(run, request)
            _add_notes(error, request)
        raise
    ending = request.ending()
    if ending.has_output:
        _show_output(run)
    try:
        return RankResults(values_of(job.name, ending, ranks, len(run.output.transcripts)))
    except BaseException as error:
        _add_notes(error, request)
        raise


def _add_notes(error: BaseException, request: RanksCall) -> None:
    for note in request.take_notes():
        add_note(error, note)


def _job_of(run: RanksRun, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Job:
    """Return the job of a call: of the function inside, if `wrapper` has decorated this one.

    Raises:
        TypeError: If the function is not callable, or returns a coroutine or a generator.
        LaunchError: If the ranks have ended, or this process did not open them.
    """
    job = Job(run.job.platform, function, args, kwargs)
    make_job = DECORATED.get(type(function))
    if make_job is not None:
        job = replace(make_job(function, args, kwargs), platform=run.job.platform)
    check_function(job.function)
    run.check_open(job.name)
    return job


def _interrupt(run: RanksRun, request: RanksCall) -> None:
    """Interrupt a call, and wait for its end. A further Ctrl-C ends the ranks."""
    try:
        # Not as a cancel: the caller gets its KeyboardInterrupt, and no LaunchCancelledError
        run.interrupt(request, cancels=False)
        request.wait_for_end()
    except BaseException:
        run.cancel()
        raise


def _show_output(run: RanksRun) -> None:
    """Print the output of the ranks so far, also lines without an end, before the call returns."""
    for transcript in run.output.transcripts:
        transcript.show_unfinished()
    if run.output.printer is not None:
        run.output.printer.flush()


def open_ranks(platform: PlatformFields) -> Ranks:
    """Start the ranks of a platform, and return once they can be called."""
    if inside_a_rank():
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
    if name == "local":
        # Ranks that stay may use shared memory that the script makes later. They report it to the
        # script's resource tracker, which otherwise starts with the first memory
        resource_tracker.ensure_running()
    return Ranks(platform)
