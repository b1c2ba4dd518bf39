"""The event loop that watches ranks stays usable if a signal handler runs during any of its calls."""

from __future__ import annotations

import os
import signal
from contextlib import closing

from parawrap.launch.coordinator import _event_loop
from parawrap.launch.coordinator._event_loop import Loop


def test_a_signal_handler_can_interrupt_call_soon():
    """A handler that interrupts `call_soon` can itself use `call_soon` without a deadlock."""
    called = []
    with closing(Loop()) as loop:

        class SignallingQueue(type(loop._calls)):
            def append(self, call):
                if not called:
                    called.append("signalled")
                    signal.raise_signal(signal.SIGUSR1)
                super().append(call)

        loop._calls = SignallingQueue()
        before = signal.signal(signal.SIGUSR1, lambda *_: loop.call_soon(lambda: called.append("handler")))
        try:
            loop.call_soon(lambda: called.append("main"))
        finally:
            signal.signal(signal.SIGUSR1, before)
        loop.turn(0)
    assert sorted(called) == ["handler", "main", "signalled"]


def test_a_signal_may_call_a_closing_loop(monkeypatch):
    """A call from a signal handler does nothing, wherever it interrupts `Loop.close`."""
    loop, calls = Loop(), []
    close = os.close

    def close_and_interrupt(file):
        close(file)
        loop.call_soon(lambda: calls.append(1))

    monkeypatch.setattr(_event_loop.os, "close", close_and_interrupt)
    loop.close()
    assert not calls
