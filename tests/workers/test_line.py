"""Lines between a launching process and its workers."""

from __future__ import annotations

import socket
from contextlib import closing

import psutil
import pytest
import torch

from parawrap.workers._line import Line, Message


@pytest.fixture
def ends():
    """The ends of a line, which raise where they would wait."""
    sockets = socket.socketpair()
    for each in sockets:
        each.setblocking(False)
    here, there = (Line(each, copies_small=False) for each in sockets)
    with closing(here), closing(there):
        yield here, there


def pass_on(value, here, there):
    here.send(Message("call", value, 1), "value")
    return there.receive().load()


def test_large_pickle_never_blocks(ends):
    assert pass_on("x" * (4 << 20), *ends) == "x" * (4 << 20)


def test_outgrown_memory_is_freed(ends):
    """Each end holds one mapping, and thus one descriptor, for tensors that grow."""
    held = set()
    for size in range(18, 24):
        assert pass_on(torch.ones(1 << size), *ends).sum() == 1 << size
        pass_on("read", *reversed(ends))
        held.add(psutil.Process().num_fds())
    assert len(held) == 1
