"""A launch that a thread of this process watches to its end: what all launchers' handles have in common."""

from __future__ import annotations

import atexit
import os
import threading
from abc import abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from itertools import count
from typing import Any

from parawrap.errors import LaunchCancelledError
from parawrap.launch._job import Job
from parawrap.launch._platform import Platform
from parawrap.launch._results import Launch, RankResults, State
from parawrap.launch.ranks._assignment import Assignment, Surroundings
from parawrap.launch.ranks._groups import Rendezvous
from parawrap.launch.ranks._setup import Place
from parawrap.launch.watch._ending import Ending, verdict
from parawrap.launch.watch._run import Run
from parawrap.launch.watch._transcript import Transcript, open_log_folder

__all__ = ["RunLaunch", "WatchedLaunch", "assignments_of", "transcripts_of"]

# Seconds that all ranks but those that have returned may wait in torch.distributed, without a move.
STUCK_S = 20.0

_numbers = count(1)
_running: set[WatchedLaunch] = set()


class WatchedLaunch(Launch[Any]):
    """Holds one call's transcripts and the thread that watches it; whatever the launch opened is closed when it is done."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._platform = job.platform
        self._ended = threading.Event()
        self._reading = threading.Lock()
        self._known: Ending | BaseException | None = None
        self._verdict: RankResults[Any] | BaseException | None = None
        self._transcripts = transcripts_of(job.platform)
        self._watch = threading.Thread(target=self._run, name=f"parawrap-launch-{next(_numbers)}", daemon=True)

    @abstractmethod
    def _watched(self) -> Ending:
        """Watch it to its end; the body of the thread."""

    @abstractmethod
    def _request_cancel(self) -> None:
        """Have it end, without waiting."""

    def _begin_watch(self) -> None:
        """Have it watched by the thread; or ended, where that cannot be started or the start is interrupted."""
        _running.add(self)
        try:
            self._watch.start()
        except BaseException:
            if self._watch.ident is None:
                self._request_cancel()
                self._run()
            else:
                self.cancel()
            raise

    def _run(self) -> None:
        try:
            try:
                self._known = self._watched()
            finally:
                self._finish_transcripts()
            if self._known.is_success:
                self._job.finish()
        except BaseException as error:  # noqa: BLE001 (raised where the results are asked for)
            self._known = error
        finally:
            _running.discard(self)
            self._ended.set()

    def _finish_transcripts(self) -> None:
        """Nothing more will come."""
        for transcript in self._transcripts:
            transcript.finish()

    def results(self, timeout: float | None = None) -> RankResults[Any]:
        if not self._has_ended(timeout):
            msg = f"the ranks of {self._job.name} still run after {timeout} seconds; they go on: ask again, or cancel()"
            raise TimeoutError(msg)
        with self._reading:
            if self._verdict is None:
                self._verdict = self._told()
        if isinstance(self._verdict, BaseException):
            raise self._verdict
        return self._verdict

    def _told(self) -> RankResults[Any] | BaseException:
        known = self._known
        assert known is not None
        return known if isinstance(known, BaseException) else verdict(self._job.name, self._platform, known)

    def done(self) -> bool:
        return self._ended.is_set()

    def cancel(self) -> None:
        self._request_cancel()
        self._has_ended(None)

    def _has_ended(self, timeout: float | None) -> bool:
        """Wait for the end. Not in the thread that watches, in which ``upon_finish`` runs: there it has ended already."""
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
            msg = f"there is no rank {rank} in a world of {len(self._transcripts)}"
            raise IndexError(msg)
        return self._transcripts[rank].text()

    def __repr__(self) -> str:
        return f"<launch of {self._job.name} on {self._platform.world_size} ranks: {self.state}>"


class RunLaunch(WatchedLaunch):
    """A launch whose ranks this process watches itself, wherever they run.

    Args:
        job: the call.
        begin: starts the ranks, given the transcripts and a place for what is to be undone at the end.
    """

    def __init__(self, job: Job, begin: Callable[[list[Transcript], ExitStack], Run]) -> None:
        super().__init__(job)
        with ExitStack() as cleanup:
            cleanup.callback(self._finish_transcripts)
            self._run_of_ranks = begin(self._transcripts, cleanup)
            self._cleanup = cleanup.pop_all()
        self._begin_watch()

    def _watched(self) -> Ending:
        with self._cleanup:
            return self._run_of_ranks.run()

    def _request_cancel(self) -> None:
        self._run_of_ranks.cancel()

    def preempt(self) -> None:
        self._run_of_ranks.preempt()

    def stacks(self) -> dict[int, str]:
        return {} if self.done() else self._run_of_ranks.stacks()


def transcripts_of(platform: Platform) -> list[Transcript]:
    """A transcript a rank, each shown, kept and written as the platform says.

    Raises:
        LaunchError: ``console_logs`` cannot be written to.
    """
    folder = open_log_folder(platform)
    several = platform.world_size > 1
    return [
        Transcript(rank, prefix=f"[rank {rank}] " if several else "", shown=platform.verbose, folder=folder)
        for rank in range(platform.world_size)
    ]


def assignments_of(
    platform: Platform, meeting: Rendezvous | None, surroundings: Surroundings, *, interface: str | None = None
) -> Callable[[int, int], Assignment]:
    """A function that gives a rank's orders at a restart."""
    world_size, per_node = platform.world_size, platform.ranks_per_node

    def orders(rank: int, restart: int) -> Assignment:
        node, local_rank = divmod(rank, per_node)
        return Assignment(
            place=Place(rank, local_rank, node, world_size, per_node, restart),
            meeting=meeting,
            surroundings=surroundings,
            grace_s=platform.grace_s,
            tells_of_life=platform.hang_timeout_s is not None,
            stuck_s=STUCK_S,
            on_cluster=surroundings.environ is None,
            interface=interface,
        )

    return orders


def _cancel_all() -> None:
    """At the interpreter's end nobody can ask for results any more."""
    for launch in list(_running):
        launch.cancel()


atexit.register(_cancel_all)
os.register_at_fork(after_in_child=_running.clear)
