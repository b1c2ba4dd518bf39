"""An event that stays usable if Ctrl-C interrupts a wait at any moment."""

from __future__ import annotations

import time
from queue import Empty, SimpleQueue

_LOOK_S = 1.0  # a wait without limit would not notice signals on all systems


class Latch:
    """Like threading.Event, but safe if a signal handler raises during `wait`: threading.Event can then stay locked."""

    def __init__(self) -> None:
        self._is_set = False
        self._wake: SimpleQueue[None] = SimpleQueue()

    def is_set(self) -> bool:
        """True once `set` was called."""
        return self._is_set

    def set(self) -> None:
        """Set the flag and wake all waiting threads."""
        self._is_set = True
        self._wake.put(None)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the flag is set, for at most `timeout` seconds. Return the flag."""
        until = float("inf") if timeout is None else time.monotonic() + timeout
        while not self._is_set and (left_s := until - time.monotonic()) > 0:
            try:
                self._wake.get(timeout=min(left_s, _LOOK_S))
            except Empty:
                continue
            self._wake.put(None)  # for the next waiting thread
        return self._is_set
