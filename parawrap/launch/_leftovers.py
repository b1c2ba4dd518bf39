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
from pathlib import Path

__all__ = ["LOOK_S", "Leftovers", "end_groups", "kill_group"]

LOOK_S = 0.02
_HAS_PROC = Path("/proc/self/stat").exists()
_PATIENCE_S = 10.0  # more than a Python that has only just been started needs on a crowded machine


class Leftovers:
    """The groups of ranks that are gone, until their last members are. Belongs to one thread."""

    def __init__(self) -> None:
        self._kill_at: dict[int, float] = {}
        self._living: dict[int, set[int]] = {}

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
            if not _signal_group(pid, signal.SIGKILL if is_due else 0) or is_due or not self._lives(pid):
                del self._kill_at[pid]
                self._living.pop(pid, None)

    def _lives(self, group: int) -> bool:
        """Whether a member still runs. All processes are looked through only when those known to be members have ended."""
        known = {pid for pid in self._living.get(group, ()) if _runs_in(group, pid)}
        self._living[group] = known or _members(group)
        return bool(self._living[group])


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
    """Whether there was anybody to send it to; on Linux also one who is dead and not waited for yet."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
        return True
    return False


def _members(group: int) -> set[int]:
    """The members of a group that are not dead; without ``/proc``, the group itself stands for them."""
    if not _HAS_PROC:
        return {group}
    processes = [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdecimal()]
    return {pid for pid in processes if _runs_in(group, pid)}


def _runs_in(group: int, pid: int) -> bool:
    """Whether that process is in the group and is not dead: init may take its time to wait for orphans."""
    if not _HAS_PROC:
        return False
    with contextlib.suppress(OSError):
        state, _, its_group = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:3]
        return int(its_group) == group and state not in "ZX"
    return False
