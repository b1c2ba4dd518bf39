"""End the processes that ended ranks left running.

There are two kinds: members of the rank's process group, and orphans that had left the group. The kernel makes an orphan a
child of its nearest subreaper ancestor, which is the process that forked the rank.

Each process gets SIGTERM first and SIGKILL later. Python's resource tracker ignores SIGTERM: it frees the rank's shared
memory and then exits.
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

__all__ = ["LOOK_S", "Orphans", "kill_group"]

LOOK_S = 0.02  # a leftover process ends soon after its signal
_PATIENCE_S = 10.0  # enough for a Python process that is still starting on a busy machine
_PF_EXITING = 0x4  # of include/linux/sched.h


class Orphans:
    """Tracks the leftover processes of ended ranks until all are gone. Runs in the process that forked the ranks.

    Running ranks adopt their own orphans. So an orphan that becomes a child of this process belongs to an ended rank.
    """

    def __init__(self) -> None:
        self._kill_at: dict[int, float] = {}
        self._orphans: dict[int, set[int]] = {}  # the ended ranks that each orphan may belong to

    def __bool__(self) -> bool:
        return bool(self._kill_at)

    def end(self, rank: int) -> None:
        """End all processes that the rank with this process id left running."""
        signal_group(rank, signal.SIGTERM)
        self._kill_at[rank] = time.monotonic() + _PATIENCE_S

    def gone(self, running: Collection[int]) -> list[int]:
        """Return the ended ranks without any remaining process. Each rank is returned once.

        Args:
            running: The process ids of ranks that have not ended.
        """
        groups = {rank for rank in self._kill_at if signal_group(rank, 0)}
        alive = groups
        # Usually nothing is left, so skip the scan of all processes. macOS offers no way to find orphans.
        if sys.platform == "linux" and (groups or running or _has_children()):
            found = list(_processes())
            alive = {each.group for each in found} & groups
            ending = set(filter(_is_ending, running))  # after the scan, which may have met orphans of these ranks
            orphans = {each.pid for each in found if _is_orphan(each, running) and each.group not in groups}
            self._note_orphans(orphans, ending)
        else:
            self._orphans.clear()
        alive = alive.union(*self._orphans.values())
        now = time.monotonic()
        for rank in alive & {each for each, kill_at in self._kill_at.items() if now >= kill_at}:
            self._kill(rank)
        done = [rank for rank in self._kill_at if rank not in alive]
        for rank in done:
            del self._kill_at[rank]
        return done

    def _note_orphans(self, found: set[int], ending: set[int]) -> None:
        """Forget orphans that are gone, and send SIGTERM to new ones, which may also belong to the `ending` ranks."""
        seen = set(self._kill_at).difference(*self._orphans.values()) or set(self._kill_at)
        for pid in found - set(self._orphans):
            _signal(pid, signal.SIGTERM)
        self._orphans = {pid: self._orphans.get(pid, seen | ending) for pid in found}

    def _kill(self, rank: int) -> None:
        signal_group(rank, signal.SIGKILL)
        for pid, ranks in self._orphans.items():
            if rank in ranks:
                _signal(pid, signal.SIGKILL)


def kill_group(pid: int) -> None:
    """Kill a process group."""
    signal_group(pid, signal.SIGKILL)


def signal_group(pid: int, number: int) -> bool:
    """Send a signal to a process group. Return True if the group exists, even if all its members are zombies."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
        return True
    return False


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


class _Process(NamedTuple):
    pid: int
    parent: int
    group: int


def _is_orphan(process: _Process, running: Collection[int]) -> bool:
    return process.parent == os.getpid() and process.pid not in running


def _is_ending(pid: int) -> bool:
    """True if a process is exiting, is a zombie, or is gone. The kernel gives away its children after it sets this flag."""
    try:
        return bool(int(_stat(pid)[6]) & _PF_EXITING)
    except OSError:
        return True


def _stat(pid: int | str) -> list[str]:
    """Return the fields of ``/proc/[pid]/stat`` from the third one on, the state (see proc_pid_stat(5))."""
    return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()


def _has_children() -> bool:
    """True if this process has a child, including zombies."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _processes() -> Iterator[_Process]:
    """Yield all processes except dead ones and zombies."""
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                state, parent, group = _stat(entry.name)[:3]
                if state not in "ZX":
                    yield _Process(int(entry.name), int(parent), int(group))
