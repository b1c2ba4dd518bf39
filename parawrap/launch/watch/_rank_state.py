"""The state of one rank, as its supervisor knows it."""

from __future__ import annotations

from dataclasses import dataclass

from parawrap.launch.parcels._outcomes import Outcome
from parawrap.launch.watch._local_node import Node
from parawrap.launch.watch._transcript import Record

__all__ = ["RankState"]


@dataclass
class RankState:
    """One rank, from its start to its end. Belongs to the supervising thread.

    Attributes:
        pid: of its process; 0 before its first message.
        is_alive: True while its process runs.
        asked: True while it owes its stacks.
        told_to_end: True if it was ordered to end before its function had ended.
        killed: True if the supervisor killed it.
        stacks: of its threads, when it was asked last.
        answered: how often its `should_checkpoint` had returned False when it was asked.
    """

    rank: int
    node: Node
    transcript: Record
    pid: int = 0
    is_alive: bool = True
    outcome: Outcome | None = None
    stacks: str | None = None
    answered: int | None = None
    told_to_end: bool = False
    asked: bool = False
    killed: bool = False

    @property
    def is_running(self) -> bool:
        """True until an end of its function is reported."""
        return self.outcome is None

    def ask_for_stacks(self) -> None:
        """Ask for its stacks, unless it still owes them: a stopped process never answers."""
        if not self.asked:
            self.asked = True
            self.node.tell(self.rank, "stacks")

    def tell_to_end(self) -> None:
        """Order it to end if its function runs; dismiss it if it has returned and waits for the others."""
        self.told_to_end = self.is_running
        self.node.tell(self.rank, "end" if self.is_running else "bye")

    def kill(self) -> None:
        """Kill it and its process group."""
        self.killed = True
        self.node.kill(self.rank)
