"""One rank under watch: where it runs, what was said to it, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass

from parawrap.launch.parcels._outcomes import Outcome
from parawrap.launch.watch._local_node import Node
from parawrap.launch.watch._transcript import Record

__all__ = ["RankState"]


@dataclass
class RankState:
    """One rank, from its start to its end. Belongs to the thread that watches.

    Attributes:
        pid: of its process; 0 before it has said hello.
        is_alive: whether its process runs.
        asked: whether it owes an answer on what its threads are doing.
        told_to_end: whether it was told to end before it was done.
        killed: whether it was killed from here.
        stacks: what its threads were doing when it was last asked.
        answered: how often it had been told that no checkpoint is due, when it was asked for that.
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
        """Whether its function has not ended yet, as far as is known."""
        return self.outcome is None

    def ask_for_stacks(self) -> None:
        """Ask what its threads are doing; not twice before it answers, which a stopped process never does."""
        if not self.asked:
            self.asked = True
            self.node.tell(self.rank, "stacks")

    def tell_to_end(self) -> None:
        """Have it end if it still runs; one that has returned and waits for the others may go."""
        self.told_to_end = self.is_running
        self.node.tell(self.rank, "end" if self.is_running else "bye")

    def kill(self) -> None:
        """Kill it and what it started."""
        self.killed = True
        self.node.kill(self.rank)
