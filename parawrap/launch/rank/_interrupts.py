"""Interrupt the calls of a rank that stays."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType

__all__ = ["CallHalted", "Interrupts"]

_SELF_S = 1.0  # for a rank to end its own call after another rank has failed
_BLOCKED_S = 0.1  # in a collective, until it counts as blocked by a rank that failed
_STUCK_S = 0.3  # after an exception was raised in the main thread, until it counts as blocked in C code


class CallHalted(BaseException):
    """Raised in the function of a rank if the call has failed in another rank."""


class Interrupts:
    """Raises exceptions in the main thread while a call runs there. Used by the control thread, except `begin` and `end`.

    Attributes:
        running: The number of the call that runs; None while the rank is idle.
    """

    def __init__(self) -> None:
        self.running: int | None = None
        self._halted: int | None = None
        self._by: type[BaseException] = KeyboardInterrupt
        self._since = 0.0
        self._raised_at: float | None = None
        self._has_reported = False

    def install(self) -> None:
        """Handle SIGINT in this process. Only the control thread sends it."""
        signal.signal(signal.SIGINT, self._on_sigint)
        os.register_at_fork(after_in_child=self._restore)

    def _restore(self) -> None:
        if signal.getsignal(signal.SIGINT) == self._on_sigint:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def begin(self, number: int) -> None:
        """Note the begin of a call."""
        self.running = number

    def end(self) -> None:
        """Note the end of the call: it is interrupted no more."""
        self.running = None

    def halt(self, number: int, reason: str) -> None:
        """End a call: at once if the user interrupts it, and otherwise if it does not end soon on its own."""
        self._halted = number
        self._by = KeyboardInterrupt if reason == "interrupt" else CallHalted
        self._since = time.monotonic()
        self._raised_at = None
        self._has_reported = False

    @property
    def is_halting(self) -> bool:
        """True if the call that runs must end."""
        return self._halted is not None and self._halted == self.running

    def look(self, waits_s: float) -> str | None:
        """Advance a halt. Return what to report, once each.

        It is "interrupted" after an exception was raised in the main thread, and "blocked" if that thread cannot end on its
        own.

        Args:
            waits_s: Seconds that the main thread has waited in a collective.
        """
        if not self.is_halting:
            return None
        now = time.monotonic()
        is_late = self._by is KeyboardInterrupt or now - self._since >= _SELF_S
        if is_late and self._raised_at is None:
            self._raised_at = now
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            return "interrupted"
        has_ignored = self._raised_at is not None and now - self._raised_at >= _STUCK_S
        if self._has_reported or not (has_ignored or min(waits_s, now - self._since) >= _BLOCKED_S):
            return None
        self._has_reported = True
        return "blocked"

    def _on_sigint(self, _number: int, _frame: FrameType | None) -> None:
        if self.is_halting:
            self._halted = None
            raise self._by
