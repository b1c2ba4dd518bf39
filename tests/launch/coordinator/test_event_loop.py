"""The event loop that watches ranks."""

from __future__ import annotations

import signal
from contextlib import closing

from parawrap.launch.coordinator._event_loop import Loop


def test_a_handler_during_call_soon():
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
