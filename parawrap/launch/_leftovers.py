"""What a rank started and left: the members of its process group, once the rank itself is gone.

They are told to end before they are killed. Python's resource tracker is among them, which ignores being told, and frees
the shared memory that the rank has forgotten; killed at once, it could not.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable

__all__ = ["LOOK_S", "Leftovers", "end_groups", "kill_group"]

LOOK_S = 0.02
_PATIENCE_S = 10.0  # more than a Python that has only just been started needs on a crowded machine


class Leftovers:
    """The groups of ranks that are gone, until their last members are. Belongs to one thread."""

    def __init__(self) -> None:
        self._kill_at: dict[int, float] = {}

    def __bool__(self) -> bool:
        return bool(self._kill_at)

    def take(self, pid: int) -> None:
        """Tell whatever is left of this rank's group to end."""
        if _signal_group(pid, signal.SIGTERM):
            self._kill_at[pid] = time.monotonic() + _PATIENCE_S

    def look(self) -> None:
        """Drop the groups that are gone, and kill those whose time is up."""
        for pid, kill_at in list(self._kill_at.items()):
            is_due = time.monotonic() >= kill_at
            if not _signal_group(pid, signal.SIGKILL if is_due else 0) or is_due:
                del self._kill_at[pid]


def end_groups(pids: Iterable[int]) -> None:
    """End what is left of several groups, and return when nothing is."""
    leftovers = Leftovers()
    for pid in pids:
        leftovers.take(pid)
    while leftovers:
        time.sleep(LOOK_S)
        leftovers.look()


def kill_group(pid: int) -> None:
    """Kill a group at once."""
    _signal_group(pid, signal.SIGKILL)


def _signal_group(pid: int, number: int) -> bool:
    """Whether there was anybody to send it to. A group whose members are all dead, and not waited for yet, has nobody."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
        return True
    return False
