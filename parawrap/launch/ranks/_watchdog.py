"""A rank's shadow: kills the rank and all that it started, some time after the parent is gone.

Where ranks come from the warm process, that one does it. A rank that the parent starts itself has only its own threads to
look for the parent, and none of them runs while C code keeps Python's lock.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time

from parawrap.launch._leftovers import end_groups

__all__ = ["start_watchdog"]

_LOOK_S = 0.25
_MOST_FILES = 1 << 16


def start_watchdog(parent: int, grace_s: float) -> None:
    """Fork the shadow of this process, which must not have threads of Python's yet.

    It is no child of this process: for those, the user's function may wait.

    Args:
        parent: the process without which the rank is not to live.
        grace_s: seconds that the rank then has to end by itself.
    """
    rank = os.getpid()
    between = os.fork()
    if between:
        os.waitpid(between, 0)
        return
    try:
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.closerange(0, _MOST_FILES)  # it holds nothing open that others wait for the end of
            _watch(rank, parent, grace_s)
    finally:
        os._exit(0)


def _watch(rank: int, parent: int, grace_s: float) -> None:
    """While both live, nothing is to be done; what a rank leaves behind, the parent sees to as long as it lives."""
    while _lives(rank) and _lives(parent):
        time.sleep(_LOOK_S)
    if _lives(parent):
        return
    until = time.monotonic() + grace_s
    while _lives(rank) and time.monotonic() < until:
        time.sleep(_LOOK_S)
    os.setpgid(0, 0)  # out of the group that now ends
    with contextlib.suppress(ProcessLookupError):
        os.kill(rank, signal.SIGKILL)
    end_groups([rank])


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another one by now
        return False
    return True
