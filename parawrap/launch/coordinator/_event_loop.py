"""An event loop for one thread: it waits for readable files and for calls from other threads."""

from __future__ import annotations

import os
import selectors
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

__all__ = ["Loop"]

_LONGEST_WAIT_S = 3600.0  # selectors reject very long timeouts


class Loop:
    """Watches files and runs their callbacks. Used by one thread, except for `call_soon`."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._calls: deque[Callable[[], object]] = deque()
        self._closing = threading.RLock()  # a signal handler may call `call_soon` during `call_soon`
        self._woken, self._waker = os.pipe()
        self.watch(self._woken, self._run_calls)

    def watch(self, file: Any, act: Callable[[], object]) -> None:
        """Call `act` whenever this file is readable or at its end."""
        self._selector.register(file, selectors.EVENT_READ, act)

    def forget(self, file: Any) -> None:
        """Stop watching a file. The caller may then close it."""
        self._selector.unregister(file)

    def turn(self, patience_s: float) -> None:
        """Wait for events, for at most `patience_s` seconds, and run their callbacks."""
        for key, _ in self._selector.select(min(max(0.0, patience_s), _LONGEST_WAIT_S)):
            if self._selector.get_map().get(key.fd) is key:  # not closed by an earlier callback
                key.data()

    def call_soon(self, call: Callable[[], object]) -> None:
        """Run `call` in the loop's thread. Callable from any thread and signal handler. After `close`, do nothing."""
        with self._closing:
            if self._waker >= 0:
                self._calls.append(call)
                os.write(self._waker, b"!")

    def close(self) -> None:
        """Close the loop. It does not close the watched files."""
        with self._closing:
            waker, self._waker = self._waker, -1  # first: a signal handler may call `call_soon` in between
            os.close(self._woken)
            os.close(waker)
        self._selector.close()

    def _run_calls(self) -> None:
        os.read(self._woken, 4096)
        while self._calls:
            self._calls.popleft()()
