"""`Run`: the ranks of one launch, from their start to their end.

::

    Launch ── results, logs, html ──► Run ◄── Attempts     on a pool: this machine, Ray
    Ranks  ── calls ────────────────►     ◄── BatchRun     a Slurm job
                                          ◄── FinishedRun  the function ran in this process
                                          ◄── RanksRun     ranks that stay, and RanksCall, a call

A run has one owner, its thread: it acquires and releases all that the run needs. Python runs signal
handlers in the main thread only, so Ctrl-C never leaves anything half done. All runs of this
process are in one registry until they have ended. Runs that are left there end with the
interpreter.
"""

from __future__ import annotations

import atexit
import logging
import os
import tempfile
import threading
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from parawrap.errors import LaunchError
from parawrap.launch._job import Job
from parawrap.launch._platform_fields import PlatformFields
from parawrap.launch._rank_results import RankResults
from parawrap.processes.fork_server import stop_server
from parawrap.processes.held_signals import HeldSignals, do_nothing
from parawrap.processes.latch import Latch
from parawrap.processes.outcomes import Ending, describe_lines
from parawrap.processes.output import Printer, Transcript

How = Ending | RankResults[Any] | BaseException
"""How a run has ended: the outcomes of its ranks, what they returned, or an error of the run."""

_log = logging.getLogger("parawrap.launch")

# Adding and removing an item are atomic, with and without the interpreter lock. Loops run over a
# copy: `list` of a set is atomic too
_running: set[Run] = set()
_is_exiting = False  # set once, by the exit hook


class RunOutput(NamedTuple):
    """The output of the ranks of one run: kept, written to files, and printed.

    Attributes:
        transcripts: One per rank.
        printer: Prints the output of the ranks that the platform shows; None to print nothing.
        folder: The folder of the files under ``console_logs``; None without files.
    """

    transcripts: Sequence[Transcript] = ()
    printer: Printer | None = None
    folder: Path | None = None

    @classmethod
    def of(
        cls,
        platform: PlatformFields,
        name: str,
        number: int | None = None,
        *,
        is_kept: bool = False,
    ) -> RunOutput:
        """Return the output of the ranks of a platform.

        Args:
            platform: The platform.
            name: The name of the function.
            number: The number of the launch among those of `map`. It stands in front of the output,
                and in the name of the folder.
            is_kept: True to keep the output only: another run shows it, and writes it to files.

        Raises:
            LaunchError: If the folder of the files cannot be made.
        """
        folder = None if is_kept else _new_log_folder(platform, name, number)
        printer = None if is_kept else Printer()
        has_prefix = platform.world_size > 1 or number is not None
        launch = "" if number is None else f"{number}/"
        transcripts = []
        for rank in range(platform.world_size):
            prefix = f"[{launch}rank {rank}] " if has_prefix else ""
            file = None if folder is None else folder / f"rank-{rank}.log"
            shown_by = printer if platform.shows(rank) else None
            transcripts.append(Transcript(shown_by, prefix, file))
        return cls(transcripts, printer, folder)

    def finish(self) -> None:
        """Print the rest of the output, and close the files."""
        for transcript in self.transcripts:
            transcript.finish()
        if self.printer is not None:
            self.printer.finish()


class Run:
    """The ranks of one launch. Any thread may call the public methods.

    A subclass starts and supervises its ranks in `_supervise`. Other methods report their state.

    Attributes:
        job: The call that the ranks make.
        output: What they write.
        how: How the run has ended. None before.
        is_of_this_process: True if the function ran in this process: an error has its traceback.
        finishes_job: True if ``upon_finish`` is called after a success.
    """

    is_of_this_process = False
    finishes_job = True
    thread_name = "parawrap-launch"

    def __init__(self, job: Job, output: RunOutput) -> None:
        self.job = job
        self.output = output
        self.how: How | None = None
        self._has_begun = False
        self._pid = os.getpid()
        self._ended = Latch()
        self._noting = threading.Lock()  # held while `how` is set: only its first value counts
        self._thread: threading.Thread | None = None

    # -- what subclasses give

    def _supervise(self) -> How:
        """Start the ranks, supervise them, and return how they ended. Runs in the run's thread.

        Raises:
            LaunchError: If the ranks cannot be started.
        """
        raise NotImplementedError

    @property
    def has_begun(self) -> bool:
        """True once the ranks have their machines."""
        return self._has_begun

    def cancel(self) -> None:
        """Order the end of the ranks, without waiting for it. May be called again."""

    def preempt(self) -> None:
        """Preempt the ranks, without waiting for it."""

    def stacks(self) -> dict[int, str]:
        """Return the stacks of every rank that runs a call."""
        return {}

    def lines(self) -> dict[int, str]:
        """Return the line of user code that each rank executes, if it can be known in time."""
        return {}

    def state_of(self, rank: int) -> str:
        """Describe the state of a rank, while the ranks run."""
        return "running"

    def log_of(self, rank: int) -> str:
        """Return the output of a rank so far.

        Raises:
            IndexError: If the run does not have this rank.
        """
        transcripts = self.output.transcripts
        if not 0 <= rank < len(transcripts):
            msg = f"rank={rank}: there are the ranks 0 to {len(transcripts) - 1}"
            raise IndexError(msg)
        return transcripts[rank].text()

    def take_notes(self) -> list[str]:
        """Return further notes for the error of this run, which the caller is about to raise."""
        return []

    # -- start and end

    def start(self) -> None:
        """Start the thread of the run.

        Raises:
            LaunchError: If the system does not allow another thread.
        """
        self._thread = threading.Thread(target=self._run, name=self.thread_name, daemon=True)
        # Ctrl-C waits until the thread runs. So a run is either in the registry with its thread,
        # or it does not exist. Its thread is the only one that ends it
        held = HeldSignals(do_nothing)
        try:
            if _is_exiting:
                msg = f"{self.job.name} was launched while the interpreter exits, which ends ranks"
                raise LaunchError(msg)
            _running.add(self)
            try:
                self._thread.start()
            except RuntimeError as error:
                # Python says "can't start new thread" at a limit of the system
                _running.discard(self)
                msg = f"the thread that runs {self.job.name} cannot be started: {error}"
                raise LaunchError(msg) from error
        finally:
            held.end()

    def _run(self) -> None:
        try:
            how = self._supervise()
        except BaseException as error:  # noqa: BLE001 (raised by the handle)
            how = error
        self.end(how)

    def end(self, how: How) -> None:
        """Note how the run has ended, and wake all waiting threads. Only the first call counts."""
        # A call of ranks that stay may be ended by its caller, by the run of the ranks, and by
        # threads that wait for it
        with self._noting:
            if self.how is not None:
                return
            # Before the output is finished, which may wait for a terminal: `how` does not depend on
            # it
            self.how = how
        try:
            self.output.finish()
            if self.finishes_job and isinstance(how, Ending) and how.is_success:
                self.job.finish()
        except BaseException as error:  # noqa: BLE001 (raised by the handle: output is missing)
            self.how = error
        finally:
            _running.discard(self)
            self._ended.set()

    def is_done(self) -> bool:
        """True if the run has ended, including ``upon_finish``."""
        return self._ended.is_set()

    @property
    def is_in_forked_child(self) -> bool:
        """True in a process that code of the user forked: the ranks belong to its parent."""
        return os.getpid() != self._pid

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end, for at most `timeout` seconds. Return False if the run goes on.

        In ``upon_finish``, which the thread of the run calls, the run counts as ended.

        Raises:
            LaunchError: If this process is a forked child of the one that made the run.
        """
        if self.is_in_forked_child:
            msg = (
                f"this launch of {self.job.name} belongs to process {self._pid}: use it there, not "
                "in a forked child"
            )
            raise LaunchError(msg)
        return threading.current_thread() is self._thread or self._ended.wait(timeout)


class FinishedRun(Run):
    """A function that has run in this process, as one of the ranks of another launcher."""

    is_of_this_process = True

    def __init__(self, job: Job, how: RankResults[Any] | BaseException) -> None:
        super().__init__(job, RunOutput.of(job.platform, job.name, is_kept=True))
        self.end(how)


def _new_log_folder(platform: PlatformFields, name: str, number: int | None) -> Path | None:
    """Make the folder of one run under ``console_logs``. Return None if that is not set.

    Its name has the function, the number of the launch among those of `map`, and the time.

    Raises:
        LaunchError: If the folder cannot be made.
    """
    if platform.console_logs is None:
        return None
    readable = "".join(each if each.isalnum() else "-" for each in name).strip("-")
    launch = "" if number is None else f"{number}-"
    folder = Path(platform.console_logs).expanduser().absolute()
    prefix = f"{readable}-{launch}{datetime.now():%Y%m%d-%H%M%S-%f}-"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Two launches may begin in the same microsecond: the random end keeps their files apart
        return Path(tempfile.mkdtemp(prefix=prefix, dir=folder))
    except OSError as error:
        msg = (
            f"console_logs={str(platform.console_logs)!r} cannot be written to: {error}; give "
            "another folder, or None"
        )
        raise LaunchError(msg) from error


# -- all runs of this process


def running(job: Job | None = None) -> list[Run]:
    """Return the runs that have not ended: those of a job, or all."""
    return [run for run in list(_running) if job is None or run.job is job]


def cancel_runs(runs: Iterable[Run]) -> None:
    """Cancel several runs at the same time, and wait until all have ended."""
    left = [run for run in runs if not run.is_done()]
    # All orders first: the ranks of all runs clean up at the same time
    for run in left:
        run.cancel()
    for run in left:
        run.wait()


def report_places(runs: Iterable[Run]) -> None:
    """Log the line of user code that each rank executes: after Ctrl-C, where did it hang?"""
    for run in runs:
        lines = run.lines()
        if lines:
            _log.warning("%s was interrupted: %s", run.job.name, describe_lines(lines))


def _end_with_interpreter() -> None:
    """End all runs, and then the server, which would wait for its ranks."""
    global _is_exiting
    # Before the runs are listed: a thread of `map` that starts one later is refused
    _is_exiting = True
    try:
        cancel_runs(running())
    finally:  # also after Ctrl-C: the server kills ranks that do not end
        stop_server()


atexit.register(_end_with_interpreter)
# The child has copies of the runs, and no thread of them. They belong to its parent
os.register_at_fork(after_in_child=_running.clear)
