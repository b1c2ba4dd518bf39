"""The agreement of ranks on a common loop iteration to save in.

Each rank counts how often `should_checkpoint` has returned False. When the launch is preempted,
each rank reports its count and blocks further calls. If the calls are numbered from 0, the highest
count is the number of the first call that no rank has answered yet: this call returns True in all
ranks. Before a preemption, a call only increments a counter and waits for no other rank.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class RequeueRequested(BaseException):
    """Raised by `requeue` to end a rank.

    ``except Exception`` does not catch it, and ``finally`` blocks run.
    """


class Preemption:
    """One rank's part in the agreement.

    The function's threads call `is_due`; the control thread calls the rest.
    """

    def __init__(self) -> None:
        # Its lock guards the three attributes below. `hold_back` reads the count and blocks calls
        # under the lock, so that no call returns False in between. A signal handler that raises may
        # leave the lock taken: then the launch kills the rank after `grace_s`
        self._changed = threading.Condition()
        self._answered = 0  # how often `is_due` has returned False
        self._held_back = False
        # the first call that returns True; None until the ranks have agreed
        self._due_from: int | None = None

    def is_due(self) -> bool:
        """Count a call. Return True if the rank should save now. Block until the ranks agree."""
        with self._changed:
            # Without a time limit: the launching process ends the ranks if they do not agree
            self._changed.wait_for(lambda: not self._held_back or self._due_from is not None)
            if self._due_from is not None and self._answered >= self._due_from:
                return True
            self._answered += 1
            return False

    def hold_back(self) -> int:
        """Block `is_due` until `decide`. Return how often `is_due` has returned False."""
        with self._changed:
            self._held_back = True
            return self._answered

    def decide(self, call: int) -> None:
        """Make `is_due` return True from this call on, counted from 0."""
        with self._changed:
            self._due_from = call
            self._changed.notify_all()


@contextmanager
def at_signal(act: Callable[[], object]) -> Iterator[None]:
    """Call `act` on SIGUSR2 inside the block, for ranks without a coordinator.

    `act` takes the place of a handler of the script, which returns at the end of the block. Has no
    effect outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(_number: int, _frame: FrameType | None) -> None:
        act()

    before = signal.signal(signal.SIGUSR2, handle)
    try:
        yield
    finally:
        # A handler that the function has set is the user's, and stays
        if signal.getsignal(signal.SIGUSR2) is handle:
            signal.signal(signal.SIGUSR2, signal.SIG_DFL if before is None else before)
