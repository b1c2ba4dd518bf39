"""The event loop that watches ranks."""

from __future__ import annotations

import os
import signal
from contextlib import closing

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


def test_a_closed_file_is_not_handled():
    """If the handler of one readable file forgets and closes another, the other's handler does not run."""
    seen, pipes = [], [os.pipe() for _ in range(2)]

    def act(mine, other):
        seen.append(mine)
        loop.forget(other)
        os.close(other)

    with closing(Loop()) as loop:
        (first, _), (second, _) = pipes
        loop.watch(first, lambda: act(first, second))
        loop.watch(second, lambda: act(second, first))
        for _, writer in pipes:
            os.write(writer, b"!")
        loop.turn(0)
        loop.forget(seen[0])
    assert len(seen) == 1
    for file in seen[0], *(writer for _, writer in pipes):
        os.close(file)
