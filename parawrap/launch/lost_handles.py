"""Recognize handles that only a traceback or a displayed value keeps alive."""

from __future__ import annotations

import gc
import inspect
import re
import sys
from types import FrameType
from typing import Any
from weakref import ref

_SHOWN = re.compile(
    r"_+|_\d+|_i?h|Out"
)  # names of IPython and of the interactive interpreter for displayed values


def is_lost(reference: ref[Any]) -> bool:
    """True if only frames that have ended, as in the traceback of an error, and displayed values
    refer to an object.

    A reference that the collector does not find, such as one of a function that runs, counts as one
    of the program. So does one of any object other than a frame or a dict.
    """
    handle = reference()
    if handle is None:
        return True
    total, found = sys.getrefcount(handle) - _count_own_references(), 0
    running = _running_frames()
    for holder in gc.get_referrers(handle):
        if isinstance(holder, FrameType) and id(holder) not in running:
            found += _count(handle, gc.get_referents(holder))
        elif isinstance(holder, dict):
            is_local = _has_locals_of_ended_frame(holder, running)
            found += _count(
                handle,
                [value for name, value in list(holder.items()) if is_local or _is_shown(name)],
            )
    return found >= total


def _count_own_references() -> int:
    """Return how many references `is_lost` adds: its variable, and before Python 3.14 the argument
    of getrefcount.
    """
    value = object()
    return sys.getrefcount(value)


def _count(handle: Any, values: list[Any]) -> int:
    """Return how often the object is in a list.

    `is_lost` has no expression for it, which would refer to the object too.
    """
    return sum(each is handle for each in values)


def _is_shown(name: object) -> bool:
    return isinstance(name, int) or (isinstance(name, str) and _SHOWN.fullmatch(name) is not None)


def _has_locals_of_ended_frame(holder: dict[Any, Any], running: set[int]) -> bool:
    """True for the dict that a display of a traceback has made of a function's local variables
    (before Python 3.13).
    """
    return any(
        isinstance(frame, FrameType)
        and id(frame) not in running
        and frame.f_code.co_flags & inspect.CO_OPTIMIZED
        for frame in gc.get_referrers(holder)
        if not (isinstance(frame, FrameType) and frame.f_globals is holder)
    )


def _running_frames() -> set[int]:
    """Return the ids of the frames of all threads.

    Keep no frame: one that refers to itself would stay, and its callers.
    """
    found: set[int] = set()
    todo = list(sys._current_frames().values())
    while todo:
        frame = todo.pop()
        found.add(id(frame))
        if frame.f_back is not None:
            todo.append(frame.f_back)
    return found
