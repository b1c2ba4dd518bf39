"""Messages arrive whole, however they are cut, and limits of a process are
errors in that process.
"""

from __future__ import annotations

import errno
import gc
import os
import socket
import threading
import time
from contextlib import suppress

import pytest
import torch

from parawrap import SessionError
from parawrap.processes.packing import Packer, restore
from parawrap.processes.pickling import pack, unpack
from parawrap.processes.shared_memory import MOST_KEPT, Block
from parawrap.processes.wire import LOST, SLABS_ONLY, Wire
from tests.helpers.limits import files_left

MIB = 1 << 20
TENSORS = {"small": 100, "inline": 8_000, "slab": 20_000, "large": 3 * MIB}
TEXTS = {"short": "text", "long": "é" * 200_000}


class Cutting(socket.socket):
    """A socket that takes at most `most` bytes at a time."""

    most = 1 << 30

    def send(self, data, *flags):
        return super().send(memoryview(data).cast("B")[: self.most], *flags)

    def sendmsg(self, buffers, *rest):
        return super().sendmsg([memoryview(b"".join(buffers))[: self.most]], *rest)


def connect(kind):
    if kind == "pair":
        ours, its = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ours, its = socket.create_connection(listener.getsockname()), listener.accept()[0]
    return Cutting(fileno=ours.detach()), its


@pytest.fixture(params=["pair", "tcp"])
def sockets(request):
    ours, its = connect(request.param)
    with ours, its:
        yield ours, its


@pytest.fixture
def pair():
    """Makes two connected wires, as often as it is called."""
    made = []

    def make(**options):
        wires = [Wire(each, **options) for each in socket.socketpair()]
        made.extend(wires)
        return wires

    yield make
    for wire in made:
        wire.close()


def packed(value):
    packer = Packer()
    return packer.add(value, "value"), packer


def one_message(wire, sender=None):
    """Read until a message is there. `sender` has more to send."""
    found = []
    while not found:
        if sender is not None:
            sender.flush()
        found = wire.read()
    (message,) = found
    return message


@pytest.mark.parametrize("most", [1, 7, 20_000])
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("size", TENSORS)
def test_message_in_pieces(sockets, size, text, most):
    """Wherever it is cut, the reader returns what is complete, and goes on."""
    if most < 100 and (size == "large" or text == "long") and sockets[0].family != socket.AF_UNIX:
        most = 5_000  # a byte at a time would take minutes
    ours, its = sockets
    sender, reader = Wire(ours), Wire(its)
    tensor = torch.randn(TENSORS[size])
    for _ in range(2):
        ours.most = most
        item, block = packed(tensor)
        assert sender.send("word", (TEXTS[text], item), block)
        message = one_message(reader, sender)
        assert (message.word, message.body[0]) == ("word", TEXTS[text])
        assert torch.equal(restore(message.body[1], message.block), tensor)
        assert not sender.has_unsent
    assert reader.read() == []


def test_messages_keep_their_order(sockets):
    """Messages keep their order while the reader takes nothing: the sender does not wait for it."""
    sender, reader = map(Wire, sockets)
    sent = [(number, os.urandom(number * 500)) for number in range(200)]
    for body in sent:
        assert sender.send("word", body)
    found = []
    while len(found) < len(sent):
        sender.flush()
        found += [message.body for message in reader.read()]
    assert found == sent


def test_block_for_several_receivers(pair):
    """Several receivers of a block map one file. The sender keeps it as long as a message is not
    sent.
    """
    pairs = [pair() for _ in range(3)]
    block = pack(torch.arange(2 * MIB))
    block.copy_bytes()
    for sender, _ in pairs:
        sender.send("word", None, block)
    del block
    for _, reader in pairs:
        value = unpack(one_message(reader).block)
        assert value.sum() == MIB * (2 * MIB - 1)
        value.zero_()  # of this receiver alone


@pytest.mark.parametrize("waits", [False, True])
def test_closed_end_takes_nothing(sockets, waits):
    sender, reader = Wire(sockets[0]), Wire(sockets[1], waits=waits)
    reader.close()
    sent = 0
    while sender.send("word", bytes(100_000)) and sent < 1_000:
        sent += 1
    assert sent < 1_000
    assert not sender.has_unsent
    with suppress(EOFError):
        while True:
            sender.read()


def test_rank_waits_for_room(pair):
    """A rank returns from `send` once the message has left."""
    sender, reader = pair(waits=True)
    body = [os.urandom(1_000) for _ in range(30)]
    thread = threading.Thread(target=lambda: [sender.send("word", body) for _ in range(50)])
    thread.start()
    found = [reader.receive() for _ in range(50)]
    thread.join()
    assert [message.body for message in found] == [body] * 50


# -- limits


@pytest.mark.parametrize("text", TEXTS)
def test_limit_on_files_is_an_error(text, pair):
    """The sender raises, or the reader gets the message with an error. The connection works on."""
    sender, reader = pair()
    tensor = torch.randn(TENSORS["slab"])
    item, block = packed(tensor)
    with files_left(), pytest.raises(OSError, match="Too many open files"):
        sender.send("word", (TEXTS[text], item), block)
    assert sender.send("word", (TEXTS[text], item), block)
    with files_left():
        message = one_message(reader)
    assert message.word == ("word" if text == "short" else LOST)
    assert message.error is not None
    assert message.error.errno == errno.EMFILE
    assert "this process cannot take a message" in str(message.error)
    reader.send("answer", None)
    assert one_message(sender).word == "answer"
    assert sender.send("word", (TEXTS[text], item), block)
    message = one_message(reader)
    assert torch.equal(restore(message.body[1], message.block), tensor)


def test_limit_on_memory(monkeypatch, pair):
    """A message beyond the limit on memory is not sent, and a smaller one is."""

    def refuse(_file, _start, _size):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    sender, reader = pair()
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(
        SessionError, match=r"no room for .* bytes of shared memory.*smaller batches"
    ):
        sender.send("word", None, packed(torch.zeros(MIB))[1])
    assert sender.send("word", "small")
    assert one_message(reader).body == "small"


def test_dropped_letters_cost_nothing(pair):
    """The slabs of dropped letters are free again, and their numbers go with the next message."""
    sender, reader = pair()
    item, block = packed(torch.randn(TENSORS["slab"]))
    for _ in range(5):
        sender.drop(sender.encode(b"", block))
    for _ in range(5):
        assert sender.send("word", item, block)
        sender.drop(sender.encode(b"", block))
        assert one_message(reader).word == "word"
        reader.send("answer")
        sender.read()
    assert len(sender._slabs._own) <= 2


# -- slabs


def memory_of(*wires):
    """Return the bytes of slabs, of both directions."""
    return sum(len(slab) for wire in wires for slab in wire._slabs._own.values())


def exchange(one, other, value):
    item, block = packed(value)
    one.send("word", item, block)
    message = one_message(other)
    restored = restore(message.body, message.block)
    del message
    return restored


def test_slabs_are_used_again(pair):
    """Messages of similar sizes share two slabs at most, and what is kept is bounded."""
    one, other = pair()
    for size in [*range(20_000, 2 * MIB, 200_000)] * 3:
        assert len(exchange(one, other, torch.zeros(size))) == size
        assert len(exchange(other, one, torch.zeros(size))) == size
    assert memory_of(one, other) <= 2 * MOST_KEPT
    assert max(len(each._slabs._mapped) for each in (one, other)) <= 3


def test_large_slabs_are_returned(pair):
    """An idle end gives a slab beyond 64 MiB back to the system, and the other end unmaps it."""
    one, other = pair()
    exchange(one, other, torch.zeros(MOST_KEPT))
    gc.collect()
    other.trim()
    assert one_message(one).word == SLABS_ONLY
    assert memory_of(one) > MOST_KEPT
    one.trim()
    assert one_message(other).word == SLABS_ONLY
    assert memory_of(one) == len(other._slabs._mapped) == 0


def test_kept_values_are_not_overwritten(pair):
    """The first few stay in their slabs, and later ones are copied, so that memory is bounded."""
    one, other = pair()
    kept = []
    for number in range(12):
        kept.append(exchange(one, other, torch.full((MIB,), float(number))))
        exchange(other, one, torch.zeros(1))
    assert [float(each.mean()) for each in kept] == [*range(12)]
    assert len(one._slabs._own) <= 7
    assert memory_of(one) <= 40 * MIB


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of os.fork in a process with threads
def test_fork_while_values_are_there(pair):
    """Parent and child do not see each other's writes, and the memory is not used again."""
    one, other = pair()
    value = exchange(one, other, torch.ones(MIB))
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            value[:100] = 5  # few elements: torch's threads do not exist in a child
            os.write(writing, b"!")
            time.sleep(0.3)  # the parent writes, and uses again what it may
            os._exit(0 if float(value[:200].sum()) == 600 else 3)
        finally:
            os._exit(4)
    os.read(reading, 1)
    assert float(value.sum()) == MIB
    value.add_(1)
    assert float(value.sum()) == 2 * MIB
    del value
    for _ in range(3):
        exchange(other, one, torch.zeros(1))
        exchange(one, other, torch.zeros(MIB))
    assert os.waitpid(child, 0)[1] == 0
    os.close(reading)
    os.close(writing)


# -- blocks


def test_bytes_are_sent_without_a_copy():
    """Large texts and bytes are parts of the block themselves."""
    data = bytes(8 * MIB)
    for block in (packed({"data": data, "number": 1})[1], pack([data, "text"])):
        assert any(part is data for part in block.parts)
    item, block = packed({"data": data, "text": "é" * MIB})
    assert restore(item, memoryview(bytearray(block.to_bytes()))) == {
        "data": data,
        "text": "é" * MIB,
    }


def test_detached_block_keeps_its_bytes():
    for size in (10, MIB):
        tensor = torch.ones(size)
        item, block = packed(tensor)
        assert isinstance(block, Block)
        block.copy_bytes()
        tensor.zero_()
        restored = restore(item, memoryview(bytearray(block.to_bytes())))
        assert float(restored.sum()) == size
