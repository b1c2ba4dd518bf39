"""The coordinator's view of one rank."""

from __future__ import annotations

from dataclasses import dataclass, field

from parawrap.launch.coordinator._transcript import Record
from parawrap.launch.guard._guard import Guard
from parawrap.launch.messages._first_rank_failure import Outcome
from parawrap.launch.rank._control_thread import Status

__all__ = ["RankState"]


@dataclass
class RankState:
    """One rank, from its start to its end. Used by the supervising thread.

    Attributes:
        pid: The process id; 0 until the process has started.
        is_alive: True while the process runs.
        owes_stacks: True if a request for stacks is unanswered.
        ordered_to_end: True if the rank was ordered to end before its function had ended.
        killed: True if the coordinator killed the rank.
        stacks: The stacks of the rank's threads at the last request.
        status: The last report on the main thread.
        status_at: When it arrived, by the monotonic clock.
        began: When each phase of the rank began, as in `RankTimes`.
        answered: How often `should_checkpoint` had returned False when the rank was preempted.
    """

    rank: int
    guard: Guard
    transcript: Record
    pid: int = 0
    is_alive: bool = True
    outcome: Outcome | None = None
    stacks: str | None = None
    answered: int | None = None
    ordered_to_end: bool = False
    owes_stacks: bool = False
    killed: bool = False
    status: Status | None = None
    status_at: float = 0.0
    began: dict[str, float] = field(default_factory=dict)

    @property
    def is_running(self) -> bool:
        """True until the end of the rank's function is reported."""
        return self.outcome is None

    def request_stacks(self) -> None:
        """Request the rank's stacks, unless a request is pending: a stopped process never answers."""
        if not self.owes_stacks:
            self.owes_stacks = True
            self.guard.send(self.rank, "stacks")

    def order_to_end(self) -> None:
        """Order a running rank to end. Dismiss a rank that has returned and waits for the others."""
        self.ordered_to_end = self.is_running
        self.guard.send(self.rank, "end" if self.is_running else "bye")

    def kill(self) -> None:
        """Kill the rank and its process group."""
        self.killed = True
        self.guard.kill(self.rank)
