"""Signals that arrive while the main thread changes the state of a pool."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

_NUMBERS = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGHUP),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGVTALRM),
)
"""Signals whose handlers may raise: Ctrl-C, and those that programs use for limits and exits."""

# Those of the main thread that hold signals now, the innermost last: code that runs meanwhile may
# make another one
_active: list[HeldSignals] = []


def do_nothing() -> None:
    """Serve as `wake` for a thread that does not wait."""


class HeldSignals:
    """Holds back the signal handlers of the script, which may raise between any two steps.

    From the making of this object until `end`, a signal calls `wake` instead of its handler. `end`
    then calls the handler. So Ctrl-C never interrupts this thread within a message. Only the main
    thread runs handlers: in others, this object does nothing.

    Attributes:
        has_arrived: True once a signal has arrived.
    """

    def __init__(self, wake: Callable[[], object]) -> None:
        self._arrived: list[int] = []
        self._wake = wake
        self._handlers: dict[int, Callable[..., Any]] = {}  # of the script, by signal
        if threading.get_ident() != threading.main_thread().ident:
            return
        # All are read before the first is replaced, so that `restore` knows them whatever raises
        for number in _NUMBERS:
            handler = signal.getsignal(number)
            # Signals without a handler in Python are ignored, or end the process: they never raise
            if callable(handler):
                self._handlers[number] = handler
        if not self._handlers:
            return
        try:
            _active.append(self)
            for each in self._handlers:
                # After this call `_note` runs: Python looks the handler up when it runs it
                signal.signal(each, self._note)
        except BaseException:  # by the handler of a signal that was not replaced yet
            self.restore()
            raise

    @property
    def has_arrived(self) -> bool:
        return bool(self._arrived)

    def _note(self, number: int, _: object) -> None:
        self._arrived.append(number)
        self._wake()

    def end(self) -> None:
        """Restore the handlers, and call those of the signals that have arrived."""
        self.restore()
        while self._arrived:
            number = self._arrived.pop(0)
            handler = signal.getsignal(number)
            if not callable(handler):  # an earlier handler may have changed it
                continue
            try:
                handler(number, None)
            except BaseException:
                # As in Python, handlers of other signals run all the same. For several signals of
                # one number, such as Ctrl-C, one exception is enough
                self._arrived = [each for each in self._arrived if each != number]
                self.end()
                raise

    def restore(self) -> None:
        """Restore the handlers of the script.

        A handler that is restored may raise at any later step. Then all are restored once more, and
        the first exception is raised at the end.
        """
        error: BaseException | None = None
        while self._handlers:
            try:
                for each, handler in self._handlers.items():
                    signal.signal(each, handler)
                if self in _active:
                    _active.remove(self)
                self._handlers = {}  # last: this ends the loop
            except BaseException as reason:  # noqa: BLE001 (raised once all are restored)
                error = error or reason
        if error is not None:
            raise error


def _restore_in_child() -> None:
    """Give a process that another thread forked the handlers of the script."""
    # The innermost first: it restores the handlers of the one around it
    for held in _active[::-1]:
        held.restore()


os.register_at_fork(after_in_child=_restore_in_child)
