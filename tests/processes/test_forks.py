"""Processes that the user forks hold no end of a connection: its other end is seen to close."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
from contextlib import contextmanager

import pytest

from parawrap.processes.forks import close_in_forked_children, handover
from tests.helpers.waiting import PATIENCE_S

# of os.fork in a process with threads
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def fork_child():
    """Return the process id of a child that stays until it is killed."""
    pid = os.fork()
    if pid == 0:
        try:
            signal.pause()
        finally:
            os._exit(0)
    return pid


@contextmanager
def ending(children):
    try:
        yield
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def is_at_end(file):
    """True if no process holds the other end of a pipe or a socket."""
    return bool(select.select([file], [], [], PATIENCE_S)[0]) and os.read(file, 1) == b""


def test_fork_in_another_thread_waits_for_a_handover():
    """The child inherits neither the descriptors that are closed here, nor others of the block."""
    children = []
    thread = threading.Thread(target=lambda: children.append(fork_child()))
    with ending(children):
        with handover as in_transit:
            noted, noted_end = os.pipe()
            in_transit.append(noted_end)
            other, other_end = os.pipe()
            thread.start()
            thread.join(0.1)
            assert children == []
            os.close(noted_end)
            os.close(other_end)
        thread.join()
        assert len(children) == 1
        assert is_at_end(noted)
        assert is_at_end(other)
        os.close(noted)
        os.close(other)


def test_fork_within_a_handover_closes_its_descriptors():
    """A signal handler may fork while its own thread hands descriptors over."""
    children = []
    with ending(children):
        with handover as in_transit:
            reading, writing = os.pipe()
            in_transit.append(writing)
            children.append(fork_child())
            os.close(writing)
        assert is_at_end(reading)
        children.append(fork_child())  # the lock is free again, here and in the child
        os.close(reading)


def test_handover_within_a_handover():
    """A signal handler may hand descriptors over, too. The block around it keeps its own."""
    children = []
    with ending(children):
        with handover as outer:
            reading, writing = os.pipe()
            outer.append(writing)
            with handover as inner:
                inner_reading, inner_writing = os.pipe()
                inner.append(inner_writing)
                children.append(fork_child())
                os.close(inner_writing)
            children.append(fork_child())
            os.close(writing)
        assert is_at_end(inner_reading)
        assert is_at_end(reading)
        os.close(inner_reading)
        os.close(reading)


def test_child_may_hand_over_itself():
    """A forked child has the lock to itself, also if it was forked within a block."""
    with handover:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                with handover as in_transit:
                    code = len(in_transit)
            finally:
                os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0


def test_connections_are_closed_in_children():
    """The other end of a connection sees its end once this process has closed it."""
    one, other = socket.socketpair()
    close_in_forked_children(one)
    with ending([fork_child()]), other:
        one.close()
        assert is_at_end(other.fileno())
