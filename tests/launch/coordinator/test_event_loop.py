"""The event loop that watches ranks."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import closing, contextmanager

import psutil
import pytest

from parawrap.launch.coordinator._event_loop import Loop


@contextmanager
def pipe():
    """Open a pipe and yield its two ends as files."""
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb", buffering=0) as reading, os.fdopen(writer, "wb", buffering=0) as writing:
        yield reading, writing


@pytest.fixture
def loop():
    with closing(Loop()) as made:
        yield made


def test_calls_of_other_threads_wake_the_loop(loop):
    """They run in the loop's thread, in order, with the calls that they add at the end."""
    called = []

    def call():
        loop.call_soon(lambda: (called.append(threading.get_ident()), loop.call_soon(lambda: called.append(2))))
        loop.call_soon(lambda: called.append(1))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    loop.turn(float("inf"))
    assert called == [threading.get_ident(), 1, 2]


def test_a_signal_handler_can_interrupt_call_soon(loop):
    """A handler that interrupts `call_soon` can itself use `call_soon` without a deadlock."""
    called = []

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


def test_forgotten_files_are_not_handled(loop):
    """A watched file is handled while it has data, unless it is forgotten, also in the same turn."""
    seen = []

    def act(mine, other):
        seen.append(mine.read(1))
        if other in watched:
            watched.remove(other)
            loop.forget(other)

    with pipe() as first, pipe() as second:
        watched = [first[0], second[0]]
        loop.watch(first[0], lambda: act(first[0], second[0]))
        loop.watch(second[0], lambda: act(second[0], first[0]))
        loop.turn(0)
        assert seen == []
        for _, writing in (first, second):
            writing.write(b"ab")
        for _ in range(3):
            loop.turn(0)
        assert seen == [b"a", b"b"]
        loop.forget(*watched)


def test_a_closed_loop_leaves_no_file_open():
    """`close` closes the loop's own files, and later calls do nothing."""
    before = psutil.Process().num_fds()
    loop = Loop()
    with pipe() as (reading, _):
        loop.watch(reading, lambda: None)
        loop.close()
    assert psutil.Process().num_fds() <= before  # less, if files of earlier tests were collected
    loop.call_soon(lambda: pytest.fail("called"))
