"""The attempts of a launch, one after the other.

All ranks restart together, as in torch.distributed.elastic. The ranks of each attempt form a new world, and their
``restart`` is the number of earlier attempts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from parawrap.launch._platform import Platform
from parawrap.launch.coordinator._calls import Calls
from parawrap.launch.coordinator._coordinator import Coordinator
from parawrap.launch.coordinator._ending import Ending
from parawrap.launch.coordinator._event_loop import Loop
from parawrap.launch.coordinator._rank_state import RankState
from parawrap.launch.coordinator._rank_times import RankTimes
from parawrap.launch.coordinator._transcript import Record
from parawrap.launch.guard._guard import Guard
from parawrap.launch.messages._first_rank_failure import Died, Ended, Outcome, Raised, Requeued, first_rank_failure
from parawrap.launch.rank._rank_assignment import Assignment

__all__ = ["Attempts"]

_log = logging.getLogger("parawrap.launch")


class Attempts:
    """Runs the attempts of a launch, one after the other, then closes its guards.

    Any thread may call `cancel`, `preempt`, and `stacks`.

    Args:
        name: The function's name.
        platform: The launch's platform.
        loop: The loop of the guards; closed with the attempts.
        guards: The guards of the machines, each with ``platform.ranks_per_node`` ranks.
        assignments: Returns the assignment for a rank and a restart number.
        transcripts: One per rank; all attempts write to it.
        restart: The number of attempts before this run.
        failures: The number of failed attempts before this run.
        calls: The calls of ranks that stay.
        requeues: True if a cluster restarts the ranks on request. Then a restart request ends the run.

    Attributes:
        restart: The number of attempts before the current one.
        failures: The number of failed attempts.
    """

    def __init__(
        self,
        name: str,
        platform: Platform,
        loop: Loop,
        guards: Sequence[Guard],
        assignments: Callable[[int, int], Assignment],
        transcripts: Sequence[Record],
        *,
        restart: int = 0,
        failures: int = 0,
        requeues: bool = False,
        calls: Calls | None = None,
    ) -> None:
        self._name = name
        self._platform = platform
        self._loop = loop
        self._guards = guards
        self._assignments = assignments
        self._transcripts = transcripts
        self.restart = restart
        self._requeues = requeues
        self.failures = failures
        self._history: list[str] = []
        self._times: list[RankTimes] = []
        self._calls = calls
        limit = platform.timeout_min if calls is None else None  # calls have a limit each
        self._up_at = None if limit is None else time.monotonic() + 60 * limit
        self._cancelled = False
        self._preempted = False
        self._attempt = self._next_attempt()

    # -- called by any thread

    def cancel(self) -> None:
        """End the ranks without a restart."""
        self._loop.call_soon(self._on_cancel)

    def preempt(self, *, ends_late: bool = True) -> None:
        """Order the ranks to save and exit. `ends_late` is False if a cluster ends the late ranks."""
        self._loop.call_soon(lambda: self._on_preempt(ends_late=ends_late))

    def stacks(self) -> dict[int, str]:
        """Return the stacks of every running rank."""
        return self._attempt.collect_stacks()

    def state_of(self, rank: int) -> str:
        """Describe the state of a rank."""
        return self._attempt.state_of(rank)

    # -- called by the running thread

    def begin(self) -> None:
        """Start the ranks.

        Raises:
            LaunchError: If a rank cannot be started. All ranks have ended then, and the run is closed.
        """
        try:
            self._begin_attempt()
        except BaseException:
            self.close()
            raise

    def run(self) -> Ending:
        """Supervise the ranks until the last attempt ends."""
        try:
            while True:
                self._attempt.run()
                self._times += self._attempt.times(self.restart)
                wants_more = self._wants_more()
                is_unfinished = wants_more or self._may_restart()
                if self._cancelled and is_unfinished:
                    return self._make_ending(cancelled=True)
                elsewhere = self._requeues and (wants_more or self._preempted or self._has_lost_a_node())
                if is_unfinished and not wants_more:
                    self.failures += 1
                if not is_unfinished or elsewhere:
                    return self._make_ending(requeued=is_unfinished)
                self._history.append(f"attempt {self.restart} {self._summary()}")
                self.restart += 1
                self._attempt = self._next_attempt()
                self._begin_attempt()
        finally:
            self.close()

    def close(self) -> None:
        """Close the guards and the loop. Running ranks are killed."""
        for guard in self._guards:
            guard.close()
        self._loop.close()

    def _next_attempt(self) -> Coordinator:
        per_node = self._platform.ranks_per_node
        states = [
            RankState(rank, self._guards[rank // per_node], transcript) for rank, transcript in enumerate(self._transcripts)
        ]
        return Coordinator(self._platform, self._loop, states, self._up_at, self._calls)

    def _begin_attempt(self) -> None:
        self._attempt.begin(lambda rank: self._assignments(rank, self.restart))

    # -- between two attempts

    def _may_restart(self) -> bool:
        """True if a rank failed and another attempt is allowed."""
        if self._attempt.given_up or first_rank_failure(self._attempt.outcomes()) is None:
            return False
        has_nodes = self._requeues or not self._has_lost_a_node()
        return has_nodes and self.failures < self._platform.max_restarts

    def _has_lost_a_node(self) -> bool:
        return any(guard.is_lost for guard in self._guards)

    def _wants_more(self) -> bool:
        """True if ranks requested a restart, or were ended because they did not exit in time after a preemption."""
        outcomes = self._attempt.outcomes()
        failed = first_rank_failure(outcomes)
        if self._attempt.given_up or not (failed is None or (self._attempt.preempted and _is_echo(outcomes[failed]))):
            return False
        if any(isinstance(each, Requeued) for each in outcomes.values()):
            return True
        late = [rank for rank, each in outcomes.items() if isinstance(each, Ended)]
        if self._attempt.preempted and late:
            _log.warning(
                "rank(s) %s of %s did not call requeue() within grace_s=%g after the preemption: they were ended, as in a "
                "real preemption, and restart from the beginning",
                ", ".join(map(str, late)),
                self._name,
                self._platform.grace_s,
            )
        return self._attempt.preempted and bool(late)

    def _summary(self) -> str:
        outcomes = self._attempt.outcomes()
        failed = first_rank_failure(outcomes)
        if failed is None:
            return "was preempted" if self._attempt.preempted else "requested a restart"
        outcome = outcomes[failed]
        assert isinstance(outcome, (Raised, Died))
        return f"failed: rank {failed} {'raised ' if isinstance(outcome, Raised) else ''}{outcome.summary}"

    def _on_cancel(self) -> None:
        self._cancelled = True
        self._attempt.cancel()

    def _on_preempt(self, *, ends_late: bool) -> None:
        self._preempted = True
        self._attempt.preempt(ends_late=ends_late)

    def _make_ending(self, *, requeued: bool = False, cancelled: bool = False) -> Ending:
        attempt = self._attempt
        return Ending(
            outcomes=attempt.outcomes(),
            hosts=[guard.host for guard in self._guards],
            history=self._history,
            stacks=attempt.stacks(),
            cancelled=attempt.cancelled or cancelled,
            timed_out=attempt.timed_out,
            stuck=attempt.stuck,
            broken=attempt.broken,
            requeued=requeued,
            times=self._times,
        )


def _is_echo(outcome: Outcome) -> bool:
    return isinstance(outcome, Raised) and outcome.is_echo
