"""Events and loops that stay usable if a signal handler runs during any of their calls."""

import os
import threading

from parawrap.launch.coordinator import _event_loop
from parawrap.launch.coordinator._event_loop import Loop
from parawrap.launch.coordinator._interruptible_event import Latch
from tests.helpers.waiting import PATIENCE_S


def test_latch_wakes_all_threads():
    latch = Latch()
    assert not latch.wait(0.01)
    waiting = [threading.Thread(target=latch.wait) for _ in range(5)]
    for thread in waiting:
        thread.start()
    latch.set()
    for thread in waiting:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_signal_may_call_closing_loop(monkeypatch):
    """A call from a signal handler does nothing, wherever it interrupts `Loop.close`."""
    loop, calls = Loop(), []
    close = os.close

    def close_and_interrupt(file):
        close(file)
        loop.call_soon(lambda: calls.append(1))

    monkeypatch.setattr(_event_loop.os, "close", close_and_interrupt)
    loop.close()
    assert not calls
