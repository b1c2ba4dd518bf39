"""Recognize handles that only a traceback or a displayed value keeps alive."""

from __future__ import annotations

import gc
import re
import sys
from types import FrameType
from typing import Any

_SHOWN = re.compile(r"_+|_\d+|_i?h|Out")  # names of IPython and of the interactive interpreter for displayed values


def is_lost(handle: Any) -> bool:
    """True if only frames that have ended, as in the traceback of an error, and displayed values refer to an object.

    The frames of functions that run are no objects for the collector, so each reference that it does not find counts as one
    of the program.
    """
    gc_count, found = sys.getrefcount(handle) - 2, 0  # without the argument of getrefcount, and `handle`
    for holder in gc.get_referrers(handle):
        if isinstance(holder, FrameType):
            found += _count_in_ended_frame(holder, handle)
        elif isinstance(holder, dict):
            found += sum(value is handle and _is_shown(name) for name, value in list(holder.items()))
    return found >= gc_count


def _is_shown(name: object) -> bool:
    return isinstance(name, int) or (isinstance(name, str) and _SHOWN.fullmatch(name) is not None)


def _count_in_ended_frame(frame: FrameType, handle: Any) -> int:
    is_running = any(frame is each for each in _running_frames())
    return 0 if is_running else sum(value is handle for value in frame.f_locals.values())


def _running_frames() -> list[FrameType]:
    found = []
    for innermost in sys._current_frames().values():
        frame: FrameType | None = innermost
        while frame is not None:
            found.append(frame)
            frame = frame.f_back
    return found
