"""One rank under watch, as the parent sees it: its line, its output, its process, and how it ended."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass, field

from parawrap.launch._leftovers import kill_group
from parawrap.launch._outcomes import Outcome
from parawrap.launch._output import Transcript
from parawrap.launch._wire import Wire

__all__ = ["Charge"]


@dataclass
class Charge:
    """One rank, from its start to its end. Belongs to the thread that watches.

    Attributes:
        pid: of its process, whose process group is its own.
        status: the pipe that tells how the process ended; None where another process waits for it.
        streams: what it writes to: 1 is standard output, 2 standard error.
        greeted: whether it has said hello.
        asked: whether it owes an answer on what its threads are doing.
        told_of_others: whether it knows that another rank has returned.
        killed: whether it was killed from here.
        is_stuck: whether it waits in torch.distributed, after others have returned, for very long.
        stacks: what its threads were doing when it was last asked.
    """

    rank: int
    wire: Wire
    transcript: Transcript
    pid: int
    status: int | None = None
    outcome: Outcome | None = None
    streams: dict[int, int] = field(default_factory=dict)
    stacks: str | None = None
    told_to_end: bool = False
    is_stuck: bool = False
    greeted: bool = False
    asked: bool = False
    told_of_others: bool = False
    killed: bool = False

    @property
    def is_running(self) -> bool:
        """Whether its function has not ended yet, as far as is known."""
        return self.outcome is None

    def ask_for_stacks(self) -> None:
        """Ask what its threads are doing; not twice before it answers, which a stopped process never does."""
        if not self.asked:
            self.asked = True
            self.wire.send("stacks")

    def tell_of_others(self) -> None:
        """Tell it that another rank has returned."""
        if not self.told_of_others:
            self.told_of_others = True
            self.wire.send("left")

    def tell_to_end(self) -> None:
        """Have it end if it still runs; one that has returned and waits for the others may go."""
        self.told_to_end = self.is_running
        self.wire.send("end" if self.is_running else "bye")

    def kill(self) -> None:
        """Kill it and what it started. The group is its own from its first moment, but for an instant before."""
        self.killed = True
        kill_group(self.pid)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.pid, signal.SIGKILL)
