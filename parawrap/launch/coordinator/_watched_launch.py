"""The base classes of launch handles. A thread of this process watches each launch until it ends."""

from __future__ import annotations

import atexit
import math
import os
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

from parawrap.errors import LaunchCancelledError, LaunchError
from parawrap.launch._launch_handle import Launch, RankResults, State
from parawrap.launch._packed_call import Job
from parawrap.launch._platform import Platform
from parawrap.launch._system_limits import explained
from parawrap.launch.coordinator._attempts import Attempts
from parawrap.launch.coordinator._ending import Ending, results_or_error
from parawrap.launch.coordinator._interruptible_event import Latch
from parawrap.launch.coordinator._launch_timeline import trace_path, write_trace
from parawrap.launch.coordinator._printer import Printer
from parawrap.launch.coordinator._standstill import report_interval_s
from parawrap.launch.coordinator._transcript import Transcript, new_log_folder
from parawrap.launch.rank._process_groups import StoreAddress
from parawrap.launch.rank._rank_assignment import Assignment, Surroundings
from parawrap.launch.rank._set_up_rank import Place

__all__ = ["RunLaunch", "WatchedLaunch", "assignments_of", "cancel_all", "cancel_launches"]

_numbers = count(1)
_running: set[WatchedLaunch] = set()


class WatchedLaunch(Launch[Any]):
    """One call, its transcripts, and the thread that watches it.

    The thread acquires and releases all resources. So a Ctrl-C in the main thread never leaves anything half done.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._platform = job.platform
        self._pid = os.getpid()
        self._claim = threading.Lock()
        self._ended = Latch()
        self._cancelled = Latch()
        self._reading = threading.Lock()
        self._known: Ending | BaseException | None = None
        self._verdict: RankResults[Any] | BaseException | None = None
        self._submitted = time.time()
        self._trace = trace_path(job)
        self.log_folder = new_log_folder(job.platform, job.name)
        self._printer = Printer()
        self._transcripts = _transcripts(job, self.log_folder, self._printer)
        self._watch = threading.Thread(target=self._run, name=f"parawrap-launch-{next(_numbers)}", daemon=True)

    @abstractmethod
    def _watched(self) -> Ending:
        """Watch the launch until it ends. Called by the watching thread."""

    def _request_cancel(self) -> None:
        """Request the end of the launch without waiting for it."""
        self._cancelled.set()

    def _begin_watch(self) -> None:
        """Start the watching thread.

        Raises:
            LaunchError: If the system does not allow another thread.
        """
        _running.add(self)
        try:
            self._watch.start()
        except RuntimeError as error:
            _running.discard(self)
            self._finish_transcripts()
            msg = f"the thread that watches {self._job.name} cannot be started: {explained(error)}"
            raise LaunchError(msg) from error
        except BaseException:  # Ctrl-C
            self._request_cancel()
            self._end_unclaimed()
            raise

    def _end_unclaimed(self) -> None:
        """End the launch if its thread has not started. A thread that starts later does nothing."""
        if self._claim.acquire(blocking=False):
            self._end()

    def _run(self) -> None:
        if not self._claim.acquire(blocking=False):
            return
        try:
            try:
                self._known = self._watched()
            finally:
                self._finish_transcripts()
            if self._trace is not None:
                write_trace(self._trace, self._job.name, self._submitted, self._known.times)
            if self._known.is_success:
                self._job.finish()
        except BaseException as error:  # noqa: BLE001 (raised by `results`)
            self._known = error
        finally:
            self._end()

    def _end(self) -> None:
        _running.discard(self)
        self._ended.set()

    def _finish_transcripts(self) -> None:
        for transcript in self._transcripts:
            transcript.finish()
        self._printer.finish()

    def results(self, timeout: float | None = None) -> RankResults[Any]:
        if not self._has_ended(timeout):
            msg = (
                f"the ranks of {self._job.name} still run after {timeout} seconds, and they continue: call results() "
                "again, or cancel()"
            )
            raise TimeoutError(msg)
        with self._reading:
            if self._verdict is None:
                self._verdict = self._results()
                if isinstance(self._known, Ending):
                    self._known.close()
        if isinstance(self._verdict, BaseException):
            raise self._verdict.with_traceback(None)  # otherwise each call would add its frames
        return self._verdict

    def _results(self) -> RankResults[Any] | BaseException:
        known = self._known
        assert known is not None
        return known if isinstance(known, BaseException) else results_or_error(self._job.name, self._platform, known)

    def done(self) -> bool:
        return self._ended.is_set()

    def cancel(self) -> None:
        self._request_cancel()
        self._end_unclaimed()
        self._has_ended(None)

    def _has_ended(self, timeout: float | None) -> bool:
        """Wait for the end. In ``upon_finish``, which the watching thread calls, the launch counts as ended."""
        if os.getpid() != self._pid:
            msg = f"this launch of {self._job.name} belongs to process {self._pid}: use it there, not in a forked child"
            raise LaunchError(msg)
        return threading.current_thread() is self._watch or self._ended.wait(timeout)

    @property
    def state(self) -> State:
        if not self.done():
            return "running"
        if isinstance(self._known, LaunchCancelledError) or (isinstance(self._known, Ending) and self._known.cancelled):
            return "cancelled"
        succeeded = isinstance(self._known, Ending) and self._known.is_success
        return "finished" if succeeded and not isinstance(self._verdict, BaseException) else "failed"

    def logs(self, rank: int) -> str:
        if not 0 <= rank < len(self._transcripts):
            msg = f"rank={rank}: this launch has the ranks 0 to {len(self._transcripts) - 1}"
            raise IndexError(msg)
        return self._transcripts[rank].text()

    def __repr__(self) -> str:
        return f"<launch of {self._job.name} on {self._platform.world_size} ranks: {self.state}>"

    def _states(self) -> list[tuple[str, str]]:
        known, ranks = self._known, range(self._platform.world_size)
        outcomes = known.outcomes if isinstance(known, Ending) else {}
        states = [outcomes[rank].summary if rank in outcomes else self._state_of(rank) for rank in ranks]
        return list(zip(states, (transcript.last_line() for transcript in self._transcripts), strict=True))

    def _state_of(self, rank: int) -> str:
        """Return the state of a rank without a known outcome."""
        return self.state


class RunLaunch(WatchedLaunch):
    """A launch with ranks that this process supervises, on any machine. Subclasses implement `_begun`."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._run_of_ranks: Attempts | None = None
        self._has_begun = Latch()

    def _await_begin(self) -> None:
        """Wait until the ranks are started.

        Raises:
            LaunchError: If the ranks cannot be started.
        """
        try:
            self._has_begun.wait()
        except BaseException:  # Ctrl-C
            self.cancel()
            raise
        if self._run_of_ranks is None and isinstance(self._known, BaseException):
            raise self._known

    def _run(self) -> None:
        super()._run()
        self._has_begun.set()

    @abstractmethod
    def _begun(self, cleanup: ExitStack) -> Attempts:
        """Start the ranks. `cleanup` takes callbacks for the end of the launch."""

    def _watched(self) -> Ending:
        with ExitStack() as cleanup:
            self._run_of_ranks = run = self._begun(cleanup)
            self._has_begun.set()
            if self._cancelled.is_set():
                run.cancel()
            return run.run()

    def _request_cancel(self) -> None:
        super()._request_cancel()
        if self._run_of_ranks is not None:
            self._run_of_ranks.cancel()

    def preempt(self) -> None:
        if self._run_of_ranks is not None:
            self._run_of_ranks.preempt()

    def _state_of(self, rank: int) -> str:
        return super()._state_of(rank) if self.done() or self._run_of_ranks is None else self._run_of_ranks.state_of(rank)

    def stacks(self) -> dict[int, str]:
        return {} if self.done() or self._run_of_ranks is None else self._run_of_ranks.stacks()


def _transcripts(job: Job, folder: Path | None, printer: Printer) -> list[Transcript]:
    platform = job.platform
    has_prefix = platform.world_size > 1 or job.number is not None
    launch = "" if job.number is None else f"{job.number}/"
    return [
        Transcript(
            rank,
            printer=printer if platform.shows(rank) else None,
            prefix=f"[{launch}rank {rank}] " if has_prefix else "",
            folder=folder,
        )
        for rank in range(platform.world_size)
    ]


def assignments_of(
    platform: Platform,
    meeting: StoreAddress | None,
    surroundings: Surroundings,
    *,
    interface: str | None = None,
    may_idle: bool = False,
) -> Callable[[int, int], Assignment]:
    """Return a function that makes the assignment for a rank and a restart number.

    Ranks that `may_idle` do not report the state of their main thread.
    """
    world_size, per_node = platform.world_size, platform.ranks_per_node

    def assignment(rank: int, restart: int) -> Assignment:
        node, local_rank = divmod(rank, per_node)
        return Assignment(
            place=Place(rank, local_rank, node, world_size, per_node, restart),
            meeting=meeting,
            surroundings=surroundings,
            grace_s=platform.grace_s,
            report_s=math.inf if may_idle else report_interval_s(platform),
            on_cluster=surroundings.environ is None,
            interface=interface,
        )

    return assignment


def cancel_launches(job: Job | None = None) -> None:
    """End the running launches of a job, or of all jobs, and wait until they have ended."""
    cancel_all([launch for launch in list(_running) if job is None or launch._job is job])


def cancel_all(launches: Iterable[Launch[Any]]) -> None:
    """Cancel several launches concurrently and wait until all have ended."""
    running = [launch for launch in launches if not launch.done()]
    for launch in running:
        if isinstance(launch, WatchedLaunch):
            launch._request_cancel()
    for launch in running:
        launch.cancel()


atexit.register(cancel_launches)
os.register_at_fork(after_in_child=_running.clear)
