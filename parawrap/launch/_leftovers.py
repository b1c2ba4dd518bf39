"""Processes that ended ranks left running, and how they end.

There are two kinds: members of the rank's process group, and processes that had left the group. The kernel makes the second
kind children of the nearest subreaper among their ancestors, which is the process that forked the rank.

Each gets SIGTERM first and SIGKILL later. Python's resource tracker ignores SIGTERM: it frees the shared memory that the
rank left behind, and then ends by itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["LOOK_S", "Leftovers", "kill_group"]

LOOK_S = 0.02
_PATIENCE_S = 10.0  # more than a Python process that has only just started needs on a busy machine


class Leftovers:
    """The leftovers of ended ranks, until the last of them is gone. Used by the process that forked the ranks."""

    def __init__(self) -> None:
        self._kill_at: dict[int, float] = {}
        self._told: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._kill_at)

    def end(self, rank: int) -> None:
        """End all that the rank with this process id left running."""
        signal_group(rank, signal.SIGTERM)
        self._kill_at[rank] = time.monotonic() + _PATIENCE_S

    def gone(self, running: Collection[int]) -> list[int]:
        """Return the ended ranks of which nothing runs any more, once each.

        Args:
            running: the process ids of ranks that have not ended.
        """
        groups = {rank for rank in self._kill_at if signal_group(rank, 0)}
        alive, orphans = groups, list[_Process]()
        # Usually nothing is left, which needs no look at every process. On macOS orphans cannot be found.
        if sys.platform == "linux" and (groups or running or _has_children()):
            found = [each for each in _processes() if each.group in groups or _is_orphan(each, running)]
            alive = {each.group for each in found}
            orphans = [each for each in found if each.group not in groups]
        self._end_orphans(orphans)
        done = [rank for rank in self._kill_at if rank not in alive and not orphans]
        for rank in list(self._kill_at):
            if rank in done:
                del self._kill_at[rank]
            elif time.monotonic() >= self._kill_at[rank]:
                signal_group(rank, signal.SIGKILL)
        return done

    def _end_orphans(self, orphans: list[_Process]) -> None:
        """Tell new orphans to end; kill all of them when the time of the first ended rank is up."""
        is_due = time.monotonic() >= min(self._kill_at.values(), default=0.0)
        for each in orphans:
            if is_due or each.pid not in self._told:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(each.pid, signal.SIGKILL if is_due else signal.SIGTERM)
        self._told = {each.pid for each in orphans}


def kill_group(pid: int) -> None:
    """Kill a process group at once."""
    signal_group(pid, signal.SIGKILL)


def signal_group(pid: int, number: int) -> bool:
    """Send a signal to a process group; True if the group exists. Dead members that nobody waited for count."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
        return True
    return False


class _Process(NamedTuple):
    pid: int
    parent: int
    group: int


def _is_orphan(process: _Process, running: Collection[int]) -> bool:
    return process.parent == os.getpid() and process.pid not in running


def _has_children() -> bool:
    """True if this process has a child, dead or alive."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _processes() -> Iterator[_Process]:
    """Yield all processes that are not dead."""
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                stat = Path(entry.path, "stat").read_text()
                state, parent, group = stat.rpartition(")")[2].split()[:3]
                if state not in "ZX":
                    yield _Process(int(entry.name), int(parent), int(group))
