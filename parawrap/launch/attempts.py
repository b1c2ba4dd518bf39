"""The attempts of a launch, one after the other, on any machines that give ranks.

All ranks restart together, as in torch.distributed.elastic. The ranks of each attempt form a new
world, and their ``restart`` is the number of earlier attempts.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from parawrap.launch._job import Job
from parawrap.launch._platform import Platform
from parawrap.launch._world import Place
from parawrap.launch.machines import Machines
from parawrap.launch.set_up import RankSetUp
from parawrap.processes.outcomes import (
    Died,
    Ended,
    Ending,
    Raised,
    Requeued,
    counts_as_echo,
    first_failure,
)
from parawrap.processes.output import Transcript
from parawrap.processes.pool import Call, Pool
from parawrap.processes.rank_process import Assignment

_log = logging.getLogger("parawrap.launch")


class PoolOwner:
    """Owns pools of ranks for one job, one after the other.

    One thread runs them. Any thread may call public methods.
    """

    def __init__(self, job: Job, machines: Machines) -> None:
        self._job = job
        self._machines = machines
        self._settings = machines.settings()
        self._pool: Pool | None = None
        self._is_cancelled = False

    def cancel(self) -> None:
        """End the ranks, without waiting for it."""
        self._is_cancelled = True
        if (pool := self._pool) is not None:
            pool.post(pool.cancel)

    def stacks(self) -> dict[int, str]:
        """Return the stacks of every rank that runs a call."""
        pool = self._pool
        return {} if pool is None else pool.stacks()

    def state_of(self, rank: int) -> str:
        """Describe the state of a rank."""
        pool = self._pool
        return "starting" if pool is None else pool.state_of(rank)

    @contextlib.contextmanager
    def _open_pool(
        self,
        transcripts: Sequence[Transcript],
        *,
        restart: int = 0,
        up_at: float | None = None,
        stays: bool = False,
    ) -> Iterator[Pool | None]:
        """Wait for machines, and start the ranks.

        No process is left after the block. Yield None if cancelled before.
        """
        job, platform = self._job, self._job.platform
        with self._machines.open(lambda: self._is_cancelled) as hosts:
            if hosts is None:
                yield None
                return
            sent, assignments = job.sent_platform, []
            for rank in range(platform.world_size):
                place = Place.of(rank, platform.ranks_per_node, platform.n_nodes, restart)
                set_up = RankSetUp(sent, place, hosts.store, job.beside)
                assignments.append(
                    Assignment(
                        self._settings, set_up.enter, set_up.regroup, platform.grace_s, stays
                    )
                )
            self._pool = pool = Pool(
                hosts.starter,
                assignments,
                transcripts,
                timeout_min=platform.timeout_min,
                up_at=up_at,
                hang_s=platform.hang_timeout_s,
            )
            try:
                if self._is_cancelled:
                    pool.cancel()
                pool.start()
                yield pool
            finally:
                self._pool = None
                pool.close()


class Attempts(PoolOwner):
    """The attempts of one launch. Implements `Run`.

    Attributes:
        has_begun: True once the ranks have their machines.
    """

    def __init__(self, job: Job, machines: Machines) -> None:
        super().__init__(job, machines)
        self._packed = job.pack()
        self._packed.block.detach()  # the ranks start later
        self._history: list[str] = []
        self._is_preempted = False  # between two pools, or before the first
        self.has_begun = False

    def preempt(self) -> None:
        if (pool := self._pool) is None:
            self._is_preempted = True
        else:
            pool.post(pool.preempt)

    def supervise(self, transcripts: Sequence[Transcript]) -> Ending:
        platform = self._job.platform
        up_at = (
            None if platform.timeout_min is None else time.monotonic() + 60 * platform.timeout_min
        )
        failures = restart = 0
        try:
            while True:
                ending, is_preempted = self._make_attempt(transcripts, restart, up_at)
                goes_on = wants_more(ending, is_preempted=is_preempted)
                if not goes_on and not may_restart(ending, platform, failures):
                    return replace(ending, history=self._history)
                if self._is_cancelled:
                    return replace(ending, cancelled=True)
                failures += not goes_on
                self._history.append(
                    f"attempt {restart} {summary_of_attempt(ending, is_preempted=is_preempted)}"
                )
                restart += 1
                _log.warning(
                    "%s: %s; its ranks start again (restart %d)",
                    self._job.name,
                    self._history[-1],
                    restart,
                )
        finally:
            self._machines.close()

    def _make_attempt(
        self, transcripts: Sequence[Transcript], restart: int, up_at: float | None
    ) -> tuple[Ending, bool]:
        """Start the ranks, make the call, and end them.

        Return how they ended, and True if they were preempted.
        """
        with self._open_pool(transcripts, restart=restart, up_at=up_at) as pool:
            if pool is None:
                return Ending({}, cancelled=True), False
            self.has_begun = True
            if self._is_preempted:
                self._is_preempted = False
                pool.preempt()
            ending = pool.set_up()
            if ending.is_success:
                ending = pool.call(
                    Call(self._job.name, range(self._job.platform.world_size), self._packed)
                )
            return ending, pool.preempted


# -- between two attempts


def may_restart(ending: Ending, platform: Platform, failures: int) -> bool:
    """True if a rank failed and another attempt is allowed."""
    has_failed = not ending.has_given_up and first_failure(ending.outcomes) is not None
    return has_failed and failures < platform.max_restarts


def wants_more(ending: Ending, *, is_preempted: bool) -> bool:
    """True if ranks requested a restart, or were ended because they did not exit in time after a
    preemption.
    """
    failed = first_failure(ending.outcomes)
    if ending.has_given_up or (
        failed is not None and not (is_preempted and counts_as_echo(ending.outcomes[failed]))
    ):
        return False
    outcomes = ending.outcomes.values()
    return any(
        isinstance(each, Requeued) or (is_preempted and isinstance(each, Ended))
        for each in outcomes
    )


def summary_of_attempt(ending: Ending, *, is_preempted: bool) -> str:
    """Describe how an attempt ended."""
    failed = first_failure(ending.outcomes)
    if failed is None:
        return "was preempted" if is_preempted else "requested a restart"
    outcome = ending.outcomes[failed]
    assert isinstance(outcome, (Raised, Died))
    return (
        f"failed: rank {failed} {'raised ' if isinstance(outcome, Raised) else ''}{outcome.summary}"
    )
