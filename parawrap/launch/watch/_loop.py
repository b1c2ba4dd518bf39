"""One thread's wait for whatever comes first: files that can be read, and wishes of other threads."""

from __future__ import annotations

import os
import selectors
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

__all__ = ["Loop"]

_LONGEST_WAIT_S = 3600.0  # a selector cannot wait for very long


class Loop:
    """Files under watch, and what to do when one can be read. Belongs to one thread, but for `call_soon`."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wishes: deque[Callable[[], object]] = deque()
        self._closing = threading.RLock()  # a signal's handler may call `call_soon` within itself
        self._woken, self._waker = os.pipe()
        self.watch(self._woken, self._grant)

    def watch(self, file: Any, act: Callable[[], object]) -> None:
        """Call `act` whenever this file can be read, or has ended."""
        self._selector.register(file, selectors.EVENT_READ, act)

    def forget(self, file: Any) -> None:
        """Watch it no more; the caller may close it then."""
        self._selector.unregister(file)

    def turn(self, patience_s: float) -> None:
        """Wait for something to happen, but not longer than this, and see to all that has."""
        for key, _ in self._selector.select(min(max(0.0, patience_s), _LONGEST_WAIT_S)):
            if self._selector.get_map().get(key.fd) is key:  # not closed by one that came before it
                key.data()

    def call_soon(self, wish: Callable[[], object]) -> None:
        """Have this called by the loop's thread; from any thread or signal's handler. After `close` it does nothing."""
        with self._closing:
            if self._waker >= 0:
                self._wishes.append(wish)
                os.write(self._waker, b"!")

    def close(self) -> None:
        """Let go of everything that is left."""
        with self._closing:
            os.close(self._woken)
            os.close(self._waker)
            self._waker = -1
        self._selector.close()

    def _grant(self) -> None:
        os.read(self._woken, 4096)
        while self._wishes:
            self._wishes.popleft()()
