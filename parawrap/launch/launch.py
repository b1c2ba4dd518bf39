"""`Launch`: the handle of a launch, a view on its run."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Generic, Literal, NoReturn, TypeVar

from parawrap._public import public
from parawrap.displays import Table, shorten, spell_count
from parawrap.errors import LaunchCancelledError, add_note
from parawrap.launch._rank_results import RankResults
from parawrap.launch.run import How, Run, cancel_runs, report_places
from parawrap.processes.outcomes import Ending, values_of

R = TypeVar("R", covariant=True)
State = Literal["pending", "running", "finished", "failed", "cancelled"]

_LONGEST = 100  # characters of a line of output in a table; longer lines would hide the rest


@public
class Launch(Generic[R]):
    r"""The handle of running or ended ranks. ``.submit`` of a decorated function returns one.

    Thread-safe. A thread of this process acquires and releases all resources of the launch. So a
    Ctrl-C in the main thread never leaves anything half done. A handle that is dropped changes
    nothing: the launch goes on.

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

    def __init__(self, run: Run) -> None:
        self._run = run
        # Held while one thread unpickles the results: all threads get the same objects, which
        # belong to the callers
        self._unpickling = threading.Lock()
        self._results: RankResults[R] | BaseException | None = None

    @property
    def log_folder(self) -> Path | None:
        """The folder of this launch under ``Platform.console_logs``; None without one."""
        return self._run.output.folder

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
        if not self._run.wait(timeout):
            msg = (
                f"the ranks of {self._run.job.name} still run after {timeout} seconds, and they "
                "continue: call results() again, or cancel()"
            )
            raise TimeoutError(msg)
        with self._unpickling:
            # Ctrl-C below leaves it None: the next call unpickles them again
            if self._results is None:
                assert self._run.how is not None
                self._results = self._unpickle(self._run.how)
            results = self._results
        if isinstance(results, BaseException):
            if not self._run.is_of_this_process:
                # Without this, each call would add its frames to the same exception
                results.with_traceback(None)
            raise results
        return results

    def _unpickle(self, how: How) -> RankResults[Any] | BaseException:
        """Return the results of the ranks, or the error that `results` raises."""
        if not isinstance(how, Ending):
            return how
        size = self._run.job.platform.world_size
        try:
            return RankResults(values_of(self._run.job.name, how, range(size), size))
        except BaseException as error:
            # A KeyboardInterrupt of a rank has notes. One without is a Ctrl-C in this thread
            is_of_rank = bool(getattr(error, "__notes__", ()))
            if isinstance(error, KeyboardInterrupt) and not is_of_rank:
                raise
            for note in self._run.take_notes():
                add_note(error, note)
            return error

    def done(self) -> bool:
        """True if the launch has ended, including ``upon_finish``."""
        return self._run.is_done()

    def cancel(self) -> None:
        """End the ranks and wait until they have ended.

        Ranks that do not end within ``grace_s`` are killed.
        """
        if not self._run.is_done():
            self._run.cancel()
        self._run.wait()

    def preempt(self) -> None:
        """Simulate a preemption, without waiting for it.

        Has no effect on a Slurm job that is still pending. ``current_rank().should_checkpoint()``
        becomes True in every rank. Ranks that still run after the platform's ``grace_s`` are ended.
        The launch then restarts, unless all ranks returned. On Slurm, the job is requeued.
        """
        if not self._run.is_done():
            self._run.preempt()

    @property
    def state(self) -> State:
        """The state of the launch.

        ``"pending"`` (waiting for machines), ``"running"``, ``"finished"``, ``"failed"``, or
        ``"cancelled"``.
        """
        if not self.done():
            return "running" if self._run.has_begun else "pending"
        how = self._run.how  # after `done`: the run may end at any time
        if isinstance(how, Ending):
            if how.cancelled:
                return "cancelled"
            return "finished" if how.is_success else "failed"
        if isinstance(how, LaunchCancelledError):
            return "cancelled"
        return "failed" if isinstance(how, BaseException) else "finished"

    def logs(self, rank: int) -> str:
        """Return a rank's output so far: standard output and standard error in order of arrival.

        Raises:
            IndexError: If `rank` is not a rank of this launch.
        """
        return self._run.log_of(rank)

    def stacks(self) -> dict[int, str]:
        """Return the stacks of all threads of each running rank, by global rank.

        If a rank does not answer in time, its text says so.
        """
        return {} if self.done() else self._run.stacks()

    def __repr__(self) -> str:
        job = self._run.job
        ranks = spell_count(job.platform.world_size, "rank")
        return f"<launch of {job.name} on {ranks}: {self.state}>"

    def _repr_html_(self) -> str:
        """Return the state now: one row per rank with its state and its last line of output."""
        rows = [
            (f"{rank}", self._state_of(rank), shorten(transcript.last_line(), _LONGEST))
            for rank, transcript in enumerate(self._run.output.transcripts)
        ]
        columns = ("rank", "state", "last line")
        title = f"{self!r}".strip("<>")
        return Table(title, columns, rows, texts=("state", "last line")).html()

    def _state_of(self, rank: int) -> str:
        state = self.state
        how = self._run.how  # after `state`, as there
        if isinstance(how, Ending) and rank in how.outcomes:
            return how.outcomes[rank].summary
        return self._run.state_of(rank) if state == "running" else state

    def __reduce__(self) -> NoReturn:
        msg = "a launch belongs to the process that started it: send its results instead"
        raise TypeError(msg)


def report_launches(launches: Iterable[Launch[Any]]) -> None:
    """Log the line of user code that each rank of these launches executes."""
    report_places([launch._run for launch in launches])


def cancel_launches(launches: Iterable[Launch[Any]]) -> None:
    """Cancel several launches at the same time, and wait until all have ended."""
    cancel_runs([launch._run for launch in launches])
