"""`Launch`: the handle of a launch, and the thread that watches the launch until it ends."""

from __future__ import annotations

import atexit
import os
import tempfile
import threading
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Generic, Literal, NoReturn, Protocol, TypeVar

from parawrap._public import public
from parawrap.displays import Table, shorten
from parawrap.errors import LaunchCancelledError, LaunchError
from parawrap.launch._job import Job
from parawrap.launch._platform import Platform
from parawrap.launch._rank_results import RankResults
from parawrap.processes.fork_server import stop_server
from parawrap.processes.latch import Latch
from parawrap.processes.outcomes import Ending, values_of
from parawrap.processes.output import Printer, Transcript

R = TypeVar("R", covariant=True)
State = Literal["pending", "running", "finished", "failed", "cancelled"]

_LONGEST = 100  # characters of a line of output in a table
_running: set[Launch[Any]] = set()


class Run(Protocol):
    """The ranks of one launch: on this machine, on Ray, or in a Slurm job.

    The thread of the launch calls `supervise`. Any thread may call the other methods.
    """

    @property
    def has_begun(self) -> bool:
        """True if the ranks have their machines."""
        ...

    def supervise(self, transcripts: Sequence[Transcript]) -> Ending:
        """Start the ranks, and supervise them until the launch ends.

        Raises:
            LaunchError: If the ranks cannot be started.
        """
        ...

    def cancel(self) -> None:
        """Request the end of the launch without waiting for it."""

    def preempt(self) -> None:
        """Preempt the ranks without waiting for them."""

    def stacks(self) -> dict[int, str]:
        """Return the stacks of every running rank."""
        ...

    def state_of(self, rank: int) -> str:
        """Describe the state of a running rank."""
        ...


@public
class Launch(Generic[R]):
    r"""The handle of running or ended ranks.

    ``.submit`` of a decorated function returns one. Thread-safe.

    A thread of this process acquires and releases all resources of the launch. So a Ctrl-C in the
    main thread never leaves anything half done.

    Attributes:
        log_folder: The folder of this launch under ``Platform.console_logs``. None if
            ``console_logs`` is not set.

    >>> from parawrap import Platform, current_rank, wrapper
    >>> @wrapper(Platform(device="cpu", n_cpus=2, verbose=False))
    ... def train():
    ...     print("in rank", current_rank().global_rank)
    >>> launch = train.submit()
    >>> launch.results()
    RankResults(None, None)
    >>> launch.state, launch.done(), launch.logs(1)
    ('finished', True, 'in rank 1\n')
    """

    log_folder: Path | None = None

    def __init__(self, job: Job, run: Run | None) -> None:
        """Make the handle of a launch. Without `run`, other code ends it, and shows its output."""
        self._job = job
        self._run = run
        self._pid = os.getpid()
        self._claim = threading.Lock()  # of the thread that ends the launch
        if run is None:
            self._claim.acquire()
        else:
            self.log_folder = new_log_folder(job.platform, job.name)
        self._ended = Latch()
        self._reading = threading.Lock()
        self._known: Ending | RankResults[R] | BaseException | None = None
        self._summaries: dict[int, str] = {}
        self._printer = Printer()
        self._transcripts = make_transcripts(
            job.platform, self._printer, self.log_folder, job.number, is_shown=run is not None
        )
        self._watch = threading.Thread(
            target=self._watch_ranks, name="parawrap-launch", daemon=True
        )

    def results(self, timeout: float | None = None) -> RankResults[R]:
        """Wait for the ranks and return their results. May be called again.

        Args:
            timeout: Seconds to wait. None waits until the launch ends. The launch continues after a
                timeout.

        Raises:
            TimeoutError: If the ranks still run after `timeout` seconds.
            BaseException: If a rank raised: the exception of the rank that failed first, with notes
                that name the rank.
            RankDiedError: If a rank was killed, or exited without returning.
            LaunchError: If ranks could not be started, or wait for ranks that have exited.
            LaunchTimeoutError: If the launch exceeded the platform's ``timeout_min`` or
                ``hang_timeout_s``.
            LaunchCancelledError: If `cancel` was called.
        """
        if not self._has_ended(timeout):
            msg = (
                f"the ranks of {self._job.name} still run after {timeout} seconds, and they "
                "continue: call results() again, or cancel()"
            )
            raise TimeoutError(msg)
        with self._reading:
            if isinstance(self._known, Ending):
                self._known = self._read_results(self._known)
        if isinstance(self._known, BaseException):
            if self._run is not None:  # else it was raised in this process
                self._known.with_traceback(None)  # otherwise each call would add its frames
            raise self._known
        assert isinstance(self._known, RankResults)
        return self._known

    def _read_results(self, ending: Ending) -> RankResults[Any] | BaseException:
        size = self._job.platform.world_size
        try:
            return RankResults(values_of(self._job.name, ending, range(size), size))
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and not getattr(
                error, "__notes__", ()
            ):  # not the rank's
                raise
            return error

    def done(self) -> bool:
        """True if the launch has ended, including ``upon_finish``."""
        return self._ended.is_set()

    def cancel(self) -> None:
        """End the ranks and wait until they have ended.

        Ranks that do not end within ``grace_s`` are killed.
        """
        self.request_cancel()
        self._has_ended(None)

    def preempt(self) -> None:
        """Simulate a preemption, without waiting for it.

        Has no effect on a Slurm job that is still pending.

        ``current_rank().should_checkpoint()`` becomes True in every rank. Ranks that still run
        after the platform's ``grace_s`` are ended. The launch then restarts, unless all ranks
        returned. On Slurm, the job is requeued.
        """
        if self._run is not None and not self.done():
            self._run.preempt()

    @property
    def state(self) -> State:
        """``"pending"`` (waiting for machines), ``"running"``, ``"finished"``, ``"failed"``, or
        ``"cancelled"``.
        """
        known = self._known
        if not self.done():
            return "running" if self._run is not None and self._run.has_begun else "pending"
        if isinstance(known, LaunchCancelledError) or (
            isinstance(known, Ending) and known.cancelled
        ):
            return "cancelled"
        has_failed = isinstance(known, BaseException) or (
            isinstance(known, Ending) and not known.is_success
        )
        return "failed" if has_failed else "finished"

    def logs(self, rank: int) -> str:
        """Return a rank's output so far: standard output and standard error in order of arrival.

        Raises:
            IndexError: If `rank` is not a rank of this launch.
        """
        if not 0 <= rank < len(self._transcripts):
            msg = f"rank={rank}: this launch has the ranks 0 to {len(self._transcripts) - 1}"
            raise IndexError(msg)
        return self._transcripts[rank].text()

    def stacks(self) -> dict[int, str]:
        """Return the stacks of all threads of each running rank, by global rank.

        If a rank does not answer in time, its text says so.
        """
        return {} if self.done() or self._run is None else self._run.stacks()

    def __repr__(self) -> str:
        return (
            f"<launch of {self._job.name} on {self._job.platform.world_size} ranks: {self.state}>"
        )

    def _repr_html_(self) -> str:
        """Return the state now: one row per rank with its state and its last line of output."""
        rows = [
            (f"{rank}", self._state_of(rank), shorten(transcript.last_line(), _LONGEST))
            for rank, transcript in enumerate(self._transcripts)
        ]
        return Table(
            repr(self)[1:-1], ("rank", "state", "last line"), rows, texts=("state", "last line")
        ).html()

    def _state_of(self, rank: int) -> str:
        if rank in self._summaries:
            return self._summaries[rank]
        state = self.state
        return self._run.state_of(rank) if state == "running" and self._run is not None else state

    def __reduce__(self) -> NoReturn:
        msg = "a launch belongs to the process that started it: send its results instead"
        raise TypeError(msg)

    # -- the end of a launch

    def request_cancel(self) -> None:
        """Order the end of the ranks, without waiting for it.

        A launch whose thread has not started ends here.
        """
        if self._run is None or self.done():
            return
        self._run.cancel()
        if self._claim.acquire(blocking=False):
            self.end(
                LaunchCancelledError(
                    f"the launch of {self._job.name} was cancelled: it has no results"
                )
            )

    def _has_ended(self, timeout: float | None) -> bool:
        """Wait for the end.

        In ``upon_finish``, which the watching thread calls, the launch counts as ended.
        """
        if os.getpid() != self._pid:
            msg = (
                f"this launch of {self._job.name} belongs to process {self._pid}: use it there, "
                "not in a forked child"
            )
            raise LaunchError(msg)
        if threading.current_thread() is self._watch:
            return True
        return self._ended.wait(timeout)

    def _watch_ranks(self) -> None:
        if self._run is None or not self._claim.acquire(blocking=False):
            return
        try:
            ending = self._run.supervise(self._transcripts)
            self._note(ending)
            if ending.is_success:
                self._job.finish()
        except BaseException as error:  # noqa: BLE001 (raised by `results`)
            self._known = error  # also if the rest of the output cannot be printed
            self._note(error)
        finally:
            self._set_ended()

    def end(self, known: Ending | RankResults[Any] | BaseException) -> None:
        """End a launch that no thread watches."""
        try:
            self._note(known)
        finally:
            self._set_ended()

    def _note(self, known: Ending | RankResults[Any] | BaseException) -> None:
        """Note how the ranks have ended, and print the rest of their output."""
        self._known = known
        if isinstance(known, Ending):
            self._summaries = {rank: each.summary for rank, each in known.outcomes.items()}
        for transcript in self._transcripts:
            transcript.finish()
        self._printer.finish()

    def _set_ended(self) -> None:
        _running.discard(self)
        self._ended.set()


def start(launch: Launch[Any]) -> None:
    """Start the thread that watches a launch.

    Raises:
        LaunchError: If the system does not allow another thread.
    """
    _running.add(launch)
    try:
        launch._watch.start()
    except BaseException as error:  # also Ctrl-C
        launch.request_cancel()
        if isinstance(error, RuntimeError):
            msg = f"the thread that watches {launch._job.name} cannot be started: {error}"
            raise LaunchError(msg) from error
        raise


def new_log_folder(platform: Platform, name: str) -> Path | None:
    """Make the log folder of one launch under ``console_logs``.

    Return None if ``console_logs`` is not set.

    Args:
        platform: The launch's platform.
        name: The function's name. The folder's name consists of it and the time.

    Raises:
        LaunchError: If the folder cannot be made.
    """
    if platform.console_logs is None:
        return None
    readable = "".join(each if each.isalnum() else "-" for each in name).strip("-")
    folder = Path(platform.console_logs).expanduser().absolute()
    prefix = f"{readable}-{datetime.now():%Y%m%d-%H%M%S-%f}-"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=prefix, dir=folder))
    except OSError as error:
        msg = (
            f"console_logs={str(platform.console_logs)!r} cannot be written to: {error}; give "
            "another folder, or None"
        )
        raise LaunchError(msg) from error


def make_transcripts(
    platform: Platform,
    printer: Printer,
    folder: Path | None,
    number: int | None = None,
    *,
    is_shown: bool = True,
) -> list[Transcript]:
    """Return a transcript for each rank.

    The launches of `map` have a number, which stands in front of the output.
    """
    has_prefix = platform.world_size > 1 or number is not None
    launch = "" if number is None else f"{number}/"
    return [
        Transcript(
            printer if is_shown and platform.shows(rank) else None,
            f"[{launch}rank {rank}] " if has_prefix else "",
            None if folder is None else folder / f"rank-{rank}.log",
        )
        for rank in range(platform.world_size)
    ]


def cancel_launches(job: Job | None = None) -> None:
    """End the running launches of a job, or of all jobs, and wait until they have ended."""
    cancel_all([launch for launch in list(_running) if job is None or launch._job is job])


def cancel_all(launches: Iterable[Launch[Any]]) -> None:
    """Cancel several launches concurrently and wait until all have ended."""
    running = [launch for launch in launches if not launch.done()]
    for launch in running:
        launch.request_cancel()
    for launch in running:
        launch.cancel()


def _end_with_interpreter() -> None:
    """End the launches, and then the server, which ends after its ranks."""
    cancel_launches()
    stop_server()


atexit.register(_end_with_interpreter)
os.register_at_fork(after_in_child=_running.clear)
