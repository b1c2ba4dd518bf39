"""A flag that one thread sets and others wait for. Ctrl-C in any of them leaves no lock taken."""

from __future__ import annotations

import contextlib
import threading
import time

SIGNAL_POLL_S = 1.0
"""Seconds after which a wait in C returns to Python, which then runs the handlers of signals.

A signal ends such a wait early, unless it arrives just before the wait begins.
"""


class Latch:
    """Like `threading.Event` without `clear`, for threads in which a signal handler may raise.

    `Event.wait` takes a lock in code of Python. If Ctrl-C raises before the block that releases
    this lock, the lock stays taken, and `Event.set` in another thread blocks for ever.

    A latch uses its lock only to wake threads: the lock is taken when the latch is made, and `set`
    releases it. A thread that waits acquires the lock, and releases it for the next one::

        made ──► lock taken ── set ──► flag True, lock free ◄──► a waiting thread takes and frees it

    Each step is one call in C. Ctrl-C after any of them leaves nothing that must be undone.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def is_set(self) -> bool:
        """True once `set` was called."""
        return self._is_set

    def set(self) -> None:
        """Let all waiting threads go on. A second call has no effect."""
        self._is_set = True  # before the release: the thread that wakes reads the flag
        # This may release a lock that another thread has just acquired in `wait`. That is safe: the
        # lock protects no data, and both threads leave it free
        with contextlib.suppress(RuntimeError):  # the lock is free already
            self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for `set`, for at most `timeout` seconds. Return False if `set` was not called."""
        until = float("inf") if timeout is None else time.monotonic() + timeout
        while not self._is_set:
            wait_s = min(SIGNAL_POLL_S, until - time.monotonic())
            if wait_s <= 0:
                return False
            if self._lock.acquire(timeout=wait_s):
                # Wake the next waiting thread. If Ctrl-C raises before this line, the lock stays
                # taken, and the others read the flag within `SIGNAL_POLL_S`. Not a bare release,
                # which raises if another thread has called `set` since
                self.set()
        return True
