"""Signals that arrive while the main thread changes the state of a pool."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

_HELD = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGHUP),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGVTALRM),
)
"""Signals whose handlers may raise: Ctrl-C, and those that programs use for limits and exits."""

# Of the main thread, the innermost last: code that runs while signals are held may hold them too
_held: list[HeldSignals] = []


def do_nothing() -> None:
    """Stand for the wake-up of a thread that does not wait."""


class HeldSignals:
    """Holds back the handlers of the main thread, which may raise between any two of its steps.

    From its making until `end`, a signal calls `wake` instead. `end` calls its handler. So Ctrl-C
    never finds half a message read. Other threads run no handlers: there, this object does nothing.

    Attributes:
        has_arrived: True once a signal has arrived.
    """

    def __init__(self, wake: Callable[[], object]) -> None:
        self._arrived: list[int] = []
        self._wake = wake
        self._before: dict[int, Callable[..., Any]] = {}
        if threading.get_ident() != threading.main_thread().ident:
            return
        # All are read before the first is replaced, so that `restore` knows them whatever raises.
        # Signals without a handler in Python are ignored, or end the process, and raise nothing
        for number in _HELD:
            if callable(before := signal.getsignal(number)):
                self._before[number] = before
        if not self._before:
            return
        try:
            _held.append(self)
            for each in self._before:
                # A signal that comes after this call finds `_note`: Python looks it up then
                signal.signal(each, self._note)
        except BaseException:  # of a signal that came before
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
        # a handler that raises leaves the others uncalled: one exception is enough
        while self._arrived:
            number = self._arrived.pop(0)
            if callable(handler := signal.getsignal(number)):
                handler(number, None)

    def restore(self) -> None:
        """Restore the handlers.

        A restored one may raise at any step: the rest is restored all the same, and the first
        exception is raised.
        """
        error: BaseException | None = None
        while self._before:
            try:
                for each, handler in self._before.items():
                    signal.signal(each, handler)
                # Within the loop, which goes on after an exception
                if self in _held:
                    _held.remove(self)
                self._before = {}
            except BaseException as reason:  # noqa: BLE001 (raised once all are restored)
                error = error or reason
        if error is not None:
            raise error


def _restore_in_child() -> None:
    """Give a process that another thread forked the handlers of the script."""
    # The innermost first: the handlers that it restores may be those of the next
    for held in _held[::-1]:
        held.restore()


os.register_at_fork(after_in_child=_restore_in_child)
