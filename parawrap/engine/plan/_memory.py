"""Keeping the memory that the process frees, for as long as somebody wants that.

glibc gives a large buffer back to the kernel when it is freed, and the kernel hands out pages one fault at a time when the
next one is taken: a convolution on the CPU spends half of its time so. Two thresholds of mallopt(3) say from which size on
that happens. They are the process's, so all who hold them up share one count; the last to let go sets them to what glibc's
own adjustment reaches at most (DEFAULT_MMAP_THRESHOLD_MAX, 32 MiB, and twice that, in glibc's malloc.c) and gives back what
is free. glibc does not adjust them by itself any more then.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import sys
import threading
from typing import Any

if sys.platform != "win32":
    import resource

__all__ = ["HeldMemory", "can_hold_memory", "page_faults"]

_log = logging.getLogger("parawrap.plan")

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
_HELD = (1 << 30, 1 << 30)
_MOST_OF_OLD = 32 << 20  # glibc before 2.35 refuses a larger M_MMAP_THRESHOLD: HEAP_MAX_SIZE / 2
_USUAL = (64 << 20, 32 << 20)
_SAID_BY_THE_USER = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
_TUNABLES = ("glibc.malloc.mmap_threshold", "glibc.malloc.trim_threshold")

_access = threading.RLock()  # a holder that is collected meanwhile lets go in the same thread
_holders = 0


@functools.cache
def _glibc() -> Any:
    """The C library, where it is glibc; else None."""
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "gnu_get_libc_version") and hasattr(library, "mallopt") else None


def can_hold_memory() -> bool:
    """Whether there is a threshold to be set, and the user has not set it by the environment."""
    tuned = os.environ.get("GLIBC_TUNABLES", "")
    said = any(name in tuned for name in _TUNABLES) or any(name in os.environ for name in _SAID_BY_THE_USER)
    return _glibc() is not None and not said


def page_faults() -> int:
    """How many pages the kernel has handed to this process so far; 0 where that is not told."""
    if sys.platform == "win32":
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


class HeldMemory:
    """One holder. `hold` and `release` may be called any number of times, from any thread."""

    def __init__(self) -> None:
        self._holds = self._is_over = False

    @property
    def held(self) -> bool:
        return self._holds

    def hold(self) -> None:
        """From now on the process keeps what it frees."""
        global _holders
        with _access:
            if self._holds or self._is_over:
                return
            self._holds = True
            _holders += 1
            is_first = _holders == 1
            if is_first:
                _set(*_HELD)
        if is_first:
            _log.info("this process keeps the memory that it frees, until the parallel block ends that measured a gain")

    def release(self) -> None:
        """No more, as far as this holder is concerned."""
        global _holders
        with _access:
            if not self._holds:
                return
            self._holds = False
            _holders -= 1
            was_last = _holders == 0
            if was_last:
                _set(*_USUAL)
                _glibc().malloc_trim(0)
        if was_last:
            _log.info("this process gives large buffers back to the kernel again")

    def end(self) -> None:
        """Release, and hold no more: whoever is about to, in another thread, comes too late."""
        with _access:
            self._is_over = True
            self.release()


def _set(trim: int, mmap: int) -> None:
    _glibc().mallopt(_TRIM_THRESHOLD, trim)
    if not _glibc().mallopt(_MMAP_THRESHOLD, mmap):
        _glibc().mallopt(_MMAP_THRESHOLD, min(mmap, _MOST_OF_OLD))
