"""The attempts of a launch, one after the other, on any `Machines`.

All ranks restart together, as in torch.distributed.elastic. The ranks of each attempt form a new
world, and their ``restart`` is the number of earlier attempts.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import replace

from parawrap.errors import LaunchError
from parawrap.launch._job import Job
from parawrap.launch._platform_fields import PlatformFields
from parawrap.launch._world import RankPlace
from parawrap.launch.machines import Hosts, Machines
from parawrap.launch.run import Run, RunOutput
from parawrap.launch.set_up import RankSetUp
from parawrap.processes.calls import Call
from parawrap.processes.outcomes import (
    Died,
    Ended,
    Ending,
    Raised,
    Requeued,
    counts_as_echo,
    first_failure,
)
from parawrap.processes.pool import Pool
from parawrap.processes.rank_process import Assignment

_log = logging.getLogger("parawrap.launch")


class PoolRun(Run):
    """A run that has a pool per attempt. Its thread owns the pool. Others only post to it."""

    def __init__(self, job: Job, machines: Machines, output: RunOutput) -> None:
        super().__init__(job, output)
        self._machines = machines
        self._settings = machines.settings()
        self._pool: Pool | None = None
        self._is_cancelled = False
        self._queued_s = 0.0  # how long the attempts have waited for machines

    def cancel(self) -> None:
        # The flag first: the thread of the run reads it after it has set `_pool`
        self._is_cancelled = True
        pool = self._pool
        if pool is not None:
            pool.post(pool.cancel)

    def stacks(self) -> dict[int, str]:
        pool = self._pool
        return {} if pool is None else pool.stacks()

    def lines(self) -> dict[int, str]:
        pool = self._pool
        return {} if pool is None else pool.lines()

    def state_of(self, rank: int) -> str:
        pool = self._pool
        return "starting" if pool is None else pool.state_of(rank)

    @contextlib.contextmanager
    def _open_pool(
        self, *, restart: int = 0, deadline: float | None = None, stays: bool = False
    ) -> Iterator[Pool | None]:
        """Wait for machines, start the ranks, and yield their pool. All ranks end with the block.

        Yield None if the run is cancelled while it waits.

        Args:
            restart: The number of earlier attempts.
            deadline: When the time limit of the whole launch is over, by the monotonic clock, if no
                attempt waits for machines. None limits each call instead.
            stays: True if the ranks make more than one call.
        """
        platform = self.job.platform
        opened_at = time.monotonic()
        with self._machines.open(lambda: self._is_cancelled) as hosts:
            self._queued_s += time.monotonic() - opened_at
            if hosts is None:
                yield None
                return
            # From here on, other threads post to the pool. After `close`, a post does nothing
            self._pool = pool = Pool(
                hosts.starter,
                self._assignments(hosts, restart, stays=stays),
                self.output.transcripts,
                timeout_min=platform.timeout_min,
                deadline=None if deadline is None else deadline + self._queued_s,
                hang_s=platform.hang_timeout_s,
            )
            try:
                # `cancel` sets the flag, and then reads `_pool`: it may have read None
                if self._is_cancelled:
                    pool.cancel()
                pool.start()
                yield pool
            finally:
                self._pool = None
                pool.close()

    def _assignments(self, hosts: Hosts, restart: int, *, stays: bool) -> list[Assignment]:
        """Return the first message of each rank."""
        platform = self.job.platform
        sent = platform.as_sent()
        variables = platform.device_variables
        assignments = []
        for rank in range(platform.world_size):
            place = RankPlace.of(rank, platform.ranks_per_node, platform.n_nodes, restart)
            set_up = RankSetUp(sent, place, hosts.store, variables, self.job.cores)
            assignment = Assignment(
                settings=self._settings,
                set_up=set_up.enter,
                regroup=set_up.regroup,
                grace_s=platform.grace_s,
                stays=stays,
            )
            assignments.append(assignment)
        return assignments


class Attempts(PoolRun):
    """The attempts of one launch."""

    def __init__(self, job: Job, machines: Machines) -> None:
        self._packed = job.pack()  # first: a call that cannot be sent leaves no log folder behind
        # The ranks start later, and the caller may change its tensors meanwhile
        self._packed.block.copy_bytes()
        super().__init__(job, machines, RunOutput.of(job.platform, job.name, job.number))
        self._history: list[str] = []
        # True from `preempt`, in any thread, until an attempt has told its ranks
        self._is_preempted = False

    def preempt(self) -> None:
        # The flag first: an attempt that opens its pool after the next line reads the flag then
        self._is_preempted = True
        pool = self._pool
        if pool is not None:
            pool.post(pool.preempt)

    def _supervise(self) -> Ending:
        platform = self.job.platform
        limit_min = platform.timeout_min
        deadline = None if limit_min is None else time.monotonic() + 60 * limit_min
        restart = 0  # the number of earlier attempts
        failures = 0  # the number of those that failed, which `max_restarts` limits
        try:
            while True:
                ending, is_preempted = self._make_attempt(restart, deadline)
                is_requested = requests_restart(ending, is_preempted=is_preempted)
                if not is_requested and not may_restart(ending, platform, failures):
                    return replace(ending, history=self._history)
                if self._is_cancelled:
                    return replace(ending, cancelled=True)
                if not is_requested:
                    failures += 1
                summary = summary_of_attempt(ending, is_preempted=is_preempted)
                note_attempt(self.job, self._history, restart, summary)
                restart += 1
        except LaunchError:
            # A cancel that comes while ranks start may make the start fail
            if self._is_cancelled:
                return Ending.of_cancelled()
            raise
        finally:
            self._machines.close()

    def _make_attempt(self, restart: int, deadline: float | None) -> tuple[Ending, bool]:
        """Start the ranks, make the call, and end the ranks.

        Return how they ended, and True if they were preempted.
        """
        with self._open_pool(restart=restart, deadline=deadline) as pool:
            if pool is None:
                return Ending.of_cancelled(), False
            self._has_begun = True  # from here on, `Launch.state` is "running"
            if self._is_preempted:
                pool.preempt()
            ending = pool.set_up()
            if ending.is_success:
                ranks = range(self.job.platform.world_size)
                ending = pool.call(Call(self.job.name, ranks, self._packed))
            # Otherwise an order to preempt came too late for this attempt. The next one obeys it
            if pool.preempted:
                self._is_preempted = False
            return ending, pool.preempted


# -- between two attempts


def may_restart(ending: Ending, platform: PlatformFields, failures: int) -> bool:
    """True if a rank failed and another attempt is allowed."""
    has_failed = not ending.was_aborted and first_failure(ending.outcomes) is not None
    return has_failed and failures < platform.max_restarts


def requests_restart(ending: Ending, *, is_preempted: bool) -> bool:
    """True if a rank called `requeue`, or was ended ``grace_s`` after a preemption."""
    if ending.was_aborted:
        return False
    if _find_cause(ending, is_preempted=is_preempted) is not None:
        return False
    # `Ended` alone means little: without a preemption, a rank is ended because another one failed
    requests = (Requeued, Ended) if is_preempted else (Requeued,)
    return any(isinstance(each, requests) for each in ending.outcomes.values())


def _find_cause(ending: Ending, *, is_preempted: bool) -> int | None:
    """Return the rank whose failure ended an attempt. None if no failure did."""
    failed = first_failure(ending.outcomes)
    # A rank that is ended late after a preemption breaks its connections to others, which then fail
    if failed is not None and is_preempted and counts_as_echo(ending.outcomes[failed]):
        return None
    return failed


def note_attempt(job: Job, history: list[str], restart: int, summary: str) -> None:
    """Add an attempt to the history of a launch, and log that its ranks start again."""
    history.append(f"attempt {restart} {summary}")
    _log.warning("%s: %s; its ranks start again (restart %d)", job.name, history[-1], restart + 1)


def summary_of_attempt(ending: Ending, *, is_preempted: bool) -> str:
    """Describe how an attempt ended."""
    failed = _find_cause(ending, is_preempted=is_preempted)
    if failed is not None:
        outcome = ending.outcomes[failed]
        assert isinstance(outcome, (Raised, Died))
        verb = "raised " if isinstance(outcome, Raised) else ""  # other summaries have a verb
        return f"failed: rank {failed} {verb}{outcome.summary}"
    if not is_preempted:
        return "requested a restart"
    late = [str(rank) for rank, each in ending.outcomes.items() if isinstance(each, Ended)]
    if not late:
        return "was preempted"
    ranks = "rank" if len(late) == 1 else "ranks"
    return (
        f"was preempted, and {ranks} {', '.join(late)} did not call requeue() within grace_s: what "
        "the function should save then may be missing"
    )
