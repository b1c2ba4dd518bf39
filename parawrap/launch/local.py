"""The local launcher: ranks are processes on this machine."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from parawrap.launch._job import Job, Preview, preview
from parawrap.launch._platform import Platform
from parawrap.launch.launch import Launch, await_ranks, start
from parawrap.launch.set_up import Place, RankSetUp
from parawrap.processes.groups import LOOPBACK, StoreAddress, free_port, open_file_store, open_tcp_store
from parawrap.processes.outcomes import Died, Ended, Ending, Raised, Requeued, counts_as_echo, first_failure
from parawrap.processes.output import Transcript
from parawrap.processes.pool import Call, Limits, Pool, stacks_of
from parawrap.processes.process import Assignment
from parawrap.processes.server import PRELOADABLE
from parawrap.processes.settings import Settings

_log = logging.getLogger("parawrap.launch")


class _Local:
    """Launches on this machine."""

    def launch(self, job: Job) -> Launch[Any]:
        """Start the ranks, and return once they are started."""
        launch: Launch[Any] = Launch(job, LocalRun(job))
        start(launch)
        await_ranks(launch)
        return launch

    def preview(self, job: Job) -> Preview:
        platform = job.platform
        meeting = "file (in a new private folder)"
        if uses_port(platform):
            meeting = f"tcp {platform.master_addr or LOOPBACK}:{platform.master_port or '(any free port)'}"
        how = f"{platform.world_size} processes on this machine, forked from a warm process"
        return preview(job, "local", how, meeting=meeting if platform.requires_ipc else None)


launcher = _Local()


def uses_port(platform: Platform) -> bool:
    """True if the ranks of this machine meet at a port. By default they do only if the platform names an address."""
    if platform.ipc_protocol is not None:
        return platform.ipc_protocol == "tcp"
    return platform.master_addr is not None or platform.master_port != 0


def open_store(platform: Platform) -> contextlib.AbstractContextManager[StoreAddress]:
    """Keep a store for ranks of this machine. Without process groups, only find an address for user code."""
    if not platform.requires_ipc:
        address = StoreAddress(platform.master_addr or LOOPBACK, platform.master_port or free_port())
        return contextlib.nullcontext(address)
    if uses_port(platform):
        return open_tcp_store(platform.master_addr or LOOPBACK, platform.master_port, everywhere=False)
    return open_file_store()


def open_pool(
    platform: Platform,
    sent: Platform,
    settings: Settings,
    store: StoreAddress,
    transcripts: Sequence[Transcript],
    limits: Limits,
    *,
    restart: int = 0,
    stays: bool = False,
    may_idle: bool = False,
) -> Pool:
    """Return a pool for the ranks of a platform. Ranks that `may_idle` are not watched.

    `sent` is the platform as the ranks see it.
    """
    assignments = [
        Assignment(
            settings=settings,
            set_up=RankSetUp(sent, Place.of(rank, platform, restart), store),
            grace_s=platform.grace_s,
            stays=stays,
            modules=PRELOADABLE,
        )
        for rank in range(platform.world_size)
    ]
    host = socket.gethostname()
    return Pool(
        assignments, transcripts, limits, host, stays=stays, wants_groups=platform.requires_ipc, watches=not may_idle
    )


class LocalRun:
    """The attempts of one launch on this machine, one after the other.

    All ranks restart together, as in torch.distributed.elastic. The ranks of each attempt form a new world, and their
    ``restart`` is the number of earlier attempts.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._platform = job.platform
        self._packed = job.pack()
        self._settings = Settings.here()
        self._line = None if job.line is None else os.dup(job.line)  # the caller closes its own
        self._pool: Pool | None = None
        self._history: list[str] = []
        self._is_cancelled = False
        self.has_begun = False

    # -- any thread

    def cancel(self) -> None:
        self._is_cancelled = True
        if (pool := self._pool) is not None:
            pool.post(pool.cancel)

    def preempt(self) -> None:
        if (pool := self._pool) is not None:
            pool.post(pool.preempt)

    def stacks(self) -> dict[int, str]:
        pool = self._pool
        return {} if pool is None else stacks_of(pool)

    def state_of(self, rank: int) -> str:
        pool = self._pool
        return "starting" if pool is None else pool.state_of(rank)

    # -- the thread of the launch

    def supervise(self, transcripts: Sequence[Transcript], on_begin: Callable[[], None]) -> Ending:
        platform = self._platform
        up_at = None if platform.timeout_min is None else time.monotonic() + 60 * platform.timeout_min
        limits = Limits(platform.grace_s, platform.timeout_min, platform.hang_timeout_s, up_at)
        restart = failures = 0
        while True:
            ending, is_preempted = self._make_attempt(transcripts, limits, restart, on_begin)
            wants_more = self._wants_more(ending, is_preempted)
            if not wants_more and not self._may_restart(ending, failures):
                return replace(ending, history=self._history)
            if self._is_cancelled:
                return replace(ending, cancelled=True)
            failures += not wants_more
            self._history.append(f"attempt {restart} {_summary_of(ending, is_preempted)}")
            restart += 1
            _log.warning("%s: %s; the ranks start again (restart %d)", self._job.name, self._history[-1], restart)

    def _make_attempt(
        self, transcripts: Sequence[Transcript], limits: Limits, restart: int, on_begin: Callable[[], None]
    ) -> tuple[Ending, bool]:
        """Start the ranks, make the call, and end them. Return how they ended, and True if they were preempted."""
        job, platform = self._job, self._platform
        with open_store(platform) as store:
            pool = open_pool(
                platform,
                job.sent_platform,
                self._settings,
                store,
                transcripts,
                limits,
                restart=restart,
                may_idle=job.line is not None,
            )
            self._pool = pool
            try:
                if self._is_cancelled:
                    pool.cancel()
                pool.fork()
                self.has_begun = True
                on_begin()
                ending = pool.set_up()
                if ending.is_success:
                    files = () if self._line is None else (self._line,)
                    ending = pool.call(Call(job.name, range(platform.world_size), self._packed, files))
                return ending, pool.preempted
            finally:
                self._pool = None
                pool.close()
                if self._line is not None:
                    os.close(self._line)
                    self._line = None

    # -- between two attempts

    def _may_restart(self, ending: Ending, failures: int) -> bool:
        """True if a rank failed and another attempt is allowed."""
        has_given_up = ending.cancelled or ending.timed_out or ending.deadlocked or ending.lost
        has_failed = not has_given_up and first_failure(ending.outcomes) is not None
        return has_failed and failures < self._platform.max_restarts

    def _wants_more(self, ending: Ending, is_preempted: bool) -> bool:
        """True if ranks requested a restart, or were ended because they did not exit in time after a preemption."""
        if ending.cancelled or ending.timed_out or ending.deadlocked or ending.lost:
            return False
        failed = first_failure(ending.outcomes)
        if failed is not None and not (is_preempted and counts_as_echo(ending.outcomes[failed])):
            return False
        if any(isinstance(each, Requeued) for each in ending.outcomes.values()):
            return True
        late = [rank for rank, each in ending.outcomes.items() if isinstance(each, Ended)]
        if is_preempted and late:
            _log.warning(
                "rank(s) %s of %s did not call requeue() within grace_s=%g after the preemption: they were ended, as in a "
                "real preemption, and restart from the beginning",
                ", ".join(map(str, late)),
                self._job.name,
                self._platform.grace_s,
            )
        return is_preempted and bool(late)


def _summary_of(ending: Ending, is_preempted: bool) -> str:
    failed = first_failure(ending.outcomes)
    if failed is None:
        return "was preempted" if is_preempted else "requested a restart"
    outcome = ending.outcomes[failed]
    assert isinstance(outcome, (Raised, Died))
    return f"failed: rank {failed} {'raised ' if isinstance(outcome, Raised) else ''}{outcome.summary}"
