"""A flag that one thread sets and others wait for, safe from signal handlers that raise."""

from __future__ import annotations

import contextlib
import threading
import time

SIGNAL_POLL_S = 1.0
"""Seconds between two looks for a signal that arrived at the begin of a wait."""


class Latch:
    """Like `threading.Event` without `clear`.

    The lock of an Event is taken by code of Python. Ctrl-C in a thread that waits may come just
    after, and the thread that sets the Event then waits for ever. Here, each step is one call of a
    lock in C.
    """

    def __init__(self) -> None:
        self._is_set = False
        # Held until `set`: a thread that acquires it knows that the flag is set
        self._lock = threading.Lock()
        self._lock.acquire()

    def is_set(self) -> bool:
        """True once `set` was called."""
        return self._is_set

    def set(self) -> None:
        """Let all threads go on that wait."""
        self._is_set = True  # before the release: a thread that goes on reads it
        # Any thread may release the lock now, also one that another thread has acquired: from here
        # on it protects nothing, and only wakes threads, with the interpreter lock and without
        with contextlib.suppress(RuntimeError):  # it was released before
            self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for `set`, for at most `timeout` seconds. Return False if the time is over."""
        until = float("inf") if timeout is None else time.monotonic() + timeout
        while not self._is_set:
            wait_s = min(SIGNAL_POLL_S, until - time.monotonic())
            if wait_s <= 0:
                return False
            if self._lock.acquire(timeout=wait_s):
                # For the next that waits. If Ctrl-C comes between, the others look after a second.
                # Not a bare release: another thread may have called `set` again since
                self.set()
        return True
