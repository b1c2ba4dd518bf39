"""Recognize handles that only a traceback or a displayed value keeps alive."""

from __future__ import annotations

import gc
import inspect
import re
import sys
from types import FrameType
from typing import Any
from weakref import ref

_SHOWN = re.compile(r"_+|_\d+|_i?h|Out")  # names of IPython and of the interactive interpreter for displayed values


def is_lost(reference: ref[Any]) -> bool:
    """True if only frames that have ended, as in the traceback of an error, and displayed values refer to an object.

    A reference that the collector does not find, such as one of a function that runs, counts as one of the program. So does
    one of any object other than a frame or a dict.
    """
    handle = reference()
    if handle is None:
        return True
    total, found = sys.getrefcount(handle) - 2, 0  # without the argument of getrefcount, and `handle`
    running = _running_frames()
    for holder in gc.get_referrers(handle):
        if isinstance(holder, FrameType):
            found += 0 if id(holder) in running else sum(each is handle for each in gc.get_referents(holder))
        elif isinstance(holder, dict):
            is_local = _has_locals_of_ended_frame(holder, running)
            found += sum(value is handle and (is_local or _is_shown(name)) for name, value in list(holder.items()))
    return found >= total


def _is_shown(name: object) -> bool:
    return isinstance(name, int) or (isinstance(name, str) and _SHOWN.fullmatch(name) is not None)


def _has_locals_of_ended_frame(holder: dict[Any, Any], running: set[int]) -> bool:
    """True for the dict that a display of a traceback has made of a function's local variables (before Python 3.13)."""
    return any(
        isinstance(frame, FrameType) and id(frame) not in running and frame.f_code.co_flags & inspect.CO_OPTIMIZED
        for frame in gc.get_referrers(holder)
        if not (isinstance(frame, FrameType) and frame.f_globals is holder)
    )


def _running_frames() -> set[int]:
    found = set()
    for innermost in sys._current_frames().values():
        frame: FrameType | None = innermost
        while frame is not None:
            found.add(id(frame))
            frame = frame.f_back
    return found
