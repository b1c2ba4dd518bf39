"""Messages between a launching process and its workers."""

from __future__ import annotations

import gc
import socket
from contextlib import closing

import psutil
import pytest
import torch

from parawrap.workers.connection import Connection
from parawrap.workers.packing import Packer, restore

MIB = 1 << 20


@pytest.fixture
def ends():
    """The ends of a wire: this process's, and that of a worker."""
    here, there = socket.socketpair()
    with closing(Connection(here, lends=False)) as here, closing(Connection(there, lends=True)) as there:
        yield here, there


def pass_on(value, sender, receiver, *, copied=0):
    packer = Packer(copied=copied)
    sender.send(packer.add(value, "value"), packer)
    return receiver.receive()


def value_of(message):
    return restore(message.body, message.block, message.given)


@pytest.mark.parametrize("copied", [0, MIB])
@pytest.mark.parametrize("size", [10, 100_000, MIB])
def test_values_arrive(ends, size, copied):
    for value in (torch.rand(size), (torch.rand(size), torch.ones(3)), {"x": [torch.rand(2, size).T, torch.ones(2)]}):
        found = value_of(pass_on(value, *ends, copied=copied))
        torch.testing.assert_close(found, value)


def test_large_pickle_never_blocks(ends):
    assert value_of(pass_on("x" * (4 * MIB), *ends)) == "x" * (4 * MIB)


def test_outgrown_memory_is_freed(ends):
    """Each end holds one mapping, and thus one descriptor, for tensors that grow."""
    held = set()
    for size in range(18, 24):
        assert value_of(pass_on(torch.ones(1 << size), *ends)).sum() == 1 << size
        pass_on("read", *reversed(ends))
        held.add(psutil.Process().num_fds())
    assert len(held) == 1


def test_output_that_lies_in_an_argument(ends):
    """It is named, not copied: the caller's tensor lies in the memory of its own message, which stays until it is freed."""
    here, there = ends
    x = torch.rand(MIB)
    request = pass_on(x, here, there)
    packer = Packer(request.addresses)
    there.send(packer.add(value_of(request)[10:].view(2, -1), "output"), packer, given=request.slab)
    assert packer.size == 0
    output = value_of(here.receive())
    torch.testing.assert_close(output, x[10:].view(2, -1))
    del request
    gc.collect()
    for _ in range(3):  # other messages do not use its memory
        pass_on(torch.zeros(MIB), here, there)
        pass_on("released", there, here)
    torch.testing.assert_close(output, x[10:].view(2, -1))
