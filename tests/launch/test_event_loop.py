"""The event loop that watches ranks."""

import os

from parawrap.launch.coordinator import _event_loop
from parawrap.launch.coordinator._event_loop import Loop


def test_a_signal_handler_may_call_a_loop_that_is_closing(monkeypatch):
    """A call from a signal handler during `close` does nothing, wherever it interrupts `close`."""
    loop, calls = Loop(), []
    close = os.close

    def close_and_interrupt(file):
        close(file)
        loop.call_soon(lambda: calls.append(1))

    monkeypatch.setattr(_event_loop.os, "close", close_and_interrupt)
    loop.close()
    assert not calls
