"""The agreement of ranks on the turn of their loops at which all of them save.

Each rank counts how often `should_checkpoint` has returned False. When the launch is preempted, every rank reports its
count and holds further answers back. The first call that no rank has answered yet is the one that returns True, in all.
Until then a call increments a counter, and no rank waits for another.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Preemption", "RequeueWanted", "at_signal"]


class RequeueWanted(BaseException):
    """Raised in a rank that leaves for a restart. ``except Exception`` does not catch it, and ``finally`` blocks run."""


class Preemption:
    """One rank's side of the agreement. The function's threads call `is_due`, and the control thread the other methods."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._answered = 0
        self._held_back = False
        self._due_from: int | None = None

    def is_due(self) -> bool:
        """True if it is time to save. Blocks while the ranks agree on the turn."""
        with self._changed:
            self._changed.wait_for(lambda: not self._held_back or self._due_from is not None)
            if self._due_from is not None and self._answered >= self._due_from:
                return True
            self._answered += 1
            return False

    def hold_back(self) -> int:
        """Hold answers back until `decide`. Return how many were given."""
        with self._changed:
            self._held_back = True
            return self._answered

    def decide(self, call: int) -> None:
        """The checkpoint is due from this call on, counted from 0."""
        with self._changed:
            self._due_from = call
            self._changed.notify_all()


@contextmanager
def at_signal(act: Callable[[], object]) -> Iterator[None]:
    """Call `act` at SIGUSR2 inside the block, for ranks without a supervisor. Without effect outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGUSR2, lambda *_: act())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR2, signal.SIG_DFL if before is None else before)
