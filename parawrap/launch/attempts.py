"""The attempts of a launch, one after the other, on any machines that give ranks.

All ranks restart together, as in torch.distributed.elastic. The ranks of each attempt form a new world, and their
``restart`` is the number of earlier attempts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

from parawrap.launch._job import Job
from parawrap.launch._platform import Platform
from parawrap.launch._world import Place
from parawrap.launch.machines import Hosts, Machines
from parawrap.launch.set_up import RankSetUp
from parawrap.processes.outcomes import Died, Ended, Ending, Raised, Requeued, counts_as_echo, first_failure
from parawrap.processes.output import Transcript
from parawrap.processes.pool import Call, Limits, Pool, stacks_of
from parawrap.processes.process import Assignment
from parawrap.processes.settings import Settings

_log = logging.getLogger("parawrap.launch")


def make_pool(
    job: Job,
    hosts: Hosts,
    settings: Settings,
    transcripts: Sequence[Transcript],
    limits: Limits,
    *,
    restart: int = 0,
    stays: bool = False,
) -> Pool:
    """Return a pool for the ranks of a job's platform."""
    platform, sent = job.platform, job.sent_platform
    assignments = [
        Assignment(
            settings=settings,
            set_up=RankSetUp(
                sent,
                Place.of(rank, platform.ranks_per_node, platform.n_nodes, restart),
                hosts.store,
                job.beside,
            ),
            grace_s=platform.grace_s,
            stays=stays,
        )
        for rank in range(platform.world_size)
    ]
    return Pool(hosts.starter, assignments, transcripts, limits, stays=stays, wants_groups=platform.requires_ipc)


class Attempts:
    """The attempts of one launch. Implements `Run`.

    Attributes:
        has_begun: True once the ranks have their machines.
        restart: The number of attempts before the current one.
    """

    def __init__(self, job: Job, machines: Machines) -> None:
        self._job = job
        self._machines = machines
        self._platform = job.platform
        self._packed = job.pack()
        self._packed.detach()  # the ranks start later
        self._settings = machines.settings()
        self._pool: Pool | None = None
        self._history: list[str] = []
        self._is_cancelled = False
        self._is_preempted = False  # between two pools, or before the first
        self.has_begun = False
        self.restart = 0

    # -- any thread

    def cancel(self) -> None:
        self._is_cancelled = True
        if (pool := self._pool) is not None:
            pool.post(pool.cancel)

    def preempt(self) -> None:
        if (pool := self._pool) is None:
            self._is_preempted = True
        else:
            pool.post(pool.preempt)

    def stacks(self) -> dict[int, str]:
        pool = self._pool
        return {} if pool is None else stacks_of(pool)

    def state_of(self, rank: int) -> str:
        pool = self._pool
        return "starting" if pool is None else pool.state_of(rank)

    # -- the thread of the launch

    def supervise(self, transcripts: Sequence[Transcript]) -> Ending:
        platform = self._platform
        up_at = None if platform.timeout_min is None else time.monotonic() + 60 * platform.timeout_min
        failures = 0
        try:
            while True:
                ending, is_preempted = self._make_attempt(transcripts, up_at)
                goes_on = wants_more(ending, is_preempted=is_preempted)
                if not goes_on and not may_restart(ending, platform, failures):
                    return replace(ending, history=self._history)
                if self._is_cancelled:
                    return replace(ending, cancelled=True)
                failures += not goes_on
                summary = summary_of_attempt(ending, is_preempted=is_preempted)
                self._history.append(f"attempt {self.restart} {summary}")
                self.restart += 1
                _log.warning("%s: %s; its ranks start again (restart %d)", self._job.name, self._history[-1], self.restart)
        finally:
            self._machines.close()

    def _make_attempt(self, transcripts: Sequence[Transcript], up_at: float | None) -> tuple[Ending, bool]:
        """Start the ranks, make the call, and end them. Return how they ended, and True if they were preempted."""
        job, platform = self._job, self._platform
        with self._machines.open(lambda: self._is_cancelled) as hosts:
            if hosts is None:
                return Ending({}, cancelled=True), False
            limits = Limits(platform.grace_s, platform.timeout_min, platform.hang_timeout_s, up_at)
            self._pool = pool = make_pool(job, hosts, self._settings, transcripts, limits, restart=self.restart)
            try:
                if self._is_cancelled:
                    pool.cancel()
                if self._is_preempted:
                    self._is_preempted = False
                    pool.preempt()
                pool.fork()
                self.has_begun = True
                ending = pool.set_up()
                if ending.is_success:
                    ending = pool.call(Call(job.name, range(platform.world_size), self._packed))
                return ending, pool.preempted
            finally:
                self._pool = None
                pool.close()


# -- between two attempts


def may_restart(ending: Ending, platform: Platform, failures: int) -> bool:
    """True if a rank failed and another attempt is allowed."""
    has_failed = not ending.has_given_up and first_failure(ending.outcomes) is not None
    return has_failed and failures < platform.max_restarts


def wants_more(ending: Ending, *, is_preempted: bool) -> bool:
    """True if ranks requested a restart, or were ended because they did not exit in time after a preemption."""
    failed = first_failure(ending.outcomes)
    if ending.has_given_up or (failed is not None and not (is_preempted and counts_as_echo(ending.outcomes[failed]))):
        return False
    if any(isinstance(each, Requeued) for each in ending.outcomes.values()):
        return True
    return is_preempted and any(isinstance(each, Ended) for each in ending.outcomes.values())


def summary_of_attempt(ending: Ending, *, is_preempted: bool) -> str:
    """Describe how an attempt ended."""
    failed = first_failure(ending.outcomes)
    if failed is None:
        return "was preempted" if is_preempted else "requested a restart"
    outcome = ending.outcomes[failed]
    assert isinstance(outcome, (Raised, Died))
    return f"failed: rank {failed} {'raised ' if isinstance(outcome, Raised) else ''}{outcome.summary}"
