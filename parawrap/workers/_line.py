"""The connection to a worker: tensors travel in shared memory.

A message is a word, a pickled value, and at most one file. The memory of tensors stays out of the pickle: a little of it
follows the pickle, more of it goes into a slab. So messages are small, and the sender rarely waits for the reader.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import socket
import struct
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch

from parawrap.processes.pickling import pickle_apart
from parawrap.tree import flatten, unflatten
from parawrap.workers._plain_values import pickle_plain
from parawrap.workers._slabs import MappedSlabs, OwnSlabs, Slab, layout

__all__ = ["Arrival", "Line", "Message", "pickle_value", "trim_tensors"]

_WORDS = (
    *("model", "build", "tensors_changed", "call", "calls"),  # requests
    *("returned", "raised"),  # answers
)
_INLINE = 32 << 10  # bytes below which a slab costs more than a copy through the socket
_ROOM = 2 * _INLINE  # for messages that arrive with one system call
_WORTH_LENDING = 1 << 20  # bytes; copying fewer takes less time than renewing a slab
_MOST_LENT = 4  # slabs that the reader holds: later values are copied, so that memory stays bounded
_CLOEXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
_FILE_BYTES = array("i").itemsize
_MOST_FILES = 8  # that arrive with one system call
_NO_SLAB = -1  # slabs are numbered from 0


class Message(NamedTuple):
    """A message to send. An answer has the number of its request, and when the worker was busy, as ``perf_counter_ns``."""

    word: str
    value: Any
    number: int
    start: int = 0
    end: int = 0
    file: int | None = None


class Arrival(NamedTuple):
    """A received message. The reader loads the value before it receives again, and closes `file`."""

    word: str
    number: int
    start: int
    end: int
    file: int | None
    pickled: memoryview
    buffers: list[memoryview]

    def load(self) -> Any:
        """Return the value. Raises what its classes raise."""
        return pickle.loads(self.pickled, buffers=self.buffers)


class _Head(NamedTuple):
    """The first bytes of a message. The numbers follow: the buffers' lengths, the slabs retired, and the slabs released.

    If `pickled` is 0, the pickle is the first buffer.
    """

    size: int  # of the whole message
    pickled: int
    number: int
    start: int
    end: int
    slab: int
    lengths: int
    retired: int
    released: int
    word: int
    is_new_slab: bool
    has_file: bool


_HEAD = struct.Struct("=qqqqqiiiiB??5x")
_NUMBER_BYTES = array("q").itemsize


class Line:
    """One end of a connection. One thread sends at a time, and one thread receives.

    With `copies_small`, tensors that arrive own their memory unless they are large and few. Otherwise all tensors that
    arrive in a slab stay there, for a reader that drops them soon.
    """

    def __init__(self, sock: socket.socket, *, copies_small: bool) -> None:
        self._socket = sock
        self._copies_small = copies_small
        self._own = OwnSlabs()
        self._others = MappedSlabs()
        self._arrived = memoryview(bytearray(_ROOM))
        self._first, self._last = 0, 0  # the bytes in it that no message has taken yet
        self._files: deque[int] = deque()

    def send(self, message: Message, address: str) -> None:
        """Send a message. `address` names the value in errors.

        Raises:
            UnsendableError: If the value cannot be pickled. Nothing is sent then.
            SessionError: If memory lacks room for its tensors. Nothing is sent then.
            ConnectionError: If the other end is closed.
        """
        self.send_pickled(message, *pickle_value(message.value, address))

    def send_pickled(self, message: Message, pickled: memoryview, buffers: list[memoryview]) -> None:
        """Send a message whose value is pickled already. Its own value is ignored.

        Raises:
            SessionError: If memory lacks room for its tensors. Nothing is sent then.
            ConnectionError: If the other end is closed.
        """
        if len(pickled) > _INLINE:
            pickled, buffers = pickled[:0], [pickled, *buffers]
        lengths = [each.nbytes for each in buffers]
        offsets, size = layout(lengths)
        slab, retired = (None, []) if size <= _INLINE else self._own.take(size)
        try:
            inline = _pad(buffers, offsets) if slab is None else _copy_into(slab, buffers, offsets)
            released = self._others.released()
            numbers = array("q", (*lengths, *retired, *released))
            head = _HEAD.pack(
                _HEAD.size + len(numbers) * _NUMBER_BYTES + len(pickled) + sum(map(len, inline)),
                len(pickled),
                message.number,
                message.start,
                message.end,
                _NO_SLAB if slab is None else slab.number,
                len(lengths),
                len(retired),
                len(released),
                _WORDS.index(message.word),
                slab is not None and slab.file is not None,
                message.file is not None,
            )
            self._post(b"".join((head, numbers, pickled, *inline)), _files(slab, message.file))
        finally:
            if slab is not None:
                slab.close_file()

    @property
    def has_received_more(self) -> bool:
        """True if bytes of a further message have arrived together with the last one."""
        return self._first < self._last

    def fileno(self) -> int:
        """Return the socket's descriptor for selectors; -1 once closed."""
        return self._socket.fileno()

    def receive(self) -> Arrival | None:
        """Wait for a message; None if the other end is closed."""
        arrived = self._next_bytes()
        if arrived is None:
            return None
        head = _Head(*_HEAD.unpack_from(arrived))
        end = _HEAD.size + (head.lengths + head.retired + head.released) * _NUMBER_BYTES
        numbers = iter(arrived[_HEAD.size : end].cast("q"))
        lengths = [*islice(numbers, head.lengths)]
        self._others.retire([*islice(numbers, head.retired)])
        self._own.release([*numbers])
        if head.is_new_slab:
            new = self._files.popleft()
            self._others.add(head.slab, new)
            os.close(new)
        memory = self._memory_of_tensors(head, lengths, arrived[end + head.pickled : head.size])
        buffers = [memory[offset : offset + length] for offset, length in zip(layout(lengths)[0], lengths, strict=True)]
        pickled = arrived[end : end + head.pickled] if head.pickled else buffers.pop(0)
        file = self._files.popleft() if head.has_file else None
        return Arrival(_WORDS[head.word], head.number, head.start, head.end, file, pickled, buffers)

    def close(self) -> None:
        """Close the connection, which ends a waiting reader at either end."""
        with contextlib.suppress(OSError):  # the other end is gone
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        while self._files:
            os.close(self._files.popleft())

    def _post(self, message: bytes, files: list[int]) -> None:
        try:
            sent = socket.send_fds(self._socket, [message], files) if files else self._socket.send(message)
            if sent < len(message):
                self._socket.sendall(memoryview(message)[sent:])
        except OSError as error:
            msg = "the other end of the connection is closed"
            raise ConnectionError(msg) from error

    def _next_bytes(self) -> memoryview | None:
        """Return one message, which lies in memory that the next one may use; None at the end."""
        missing = _HEAD.size
        while True:
            have = self._last - self._first
            if have >= _HEAD.size:
                missing = _Head(*_HEAD.unpack_from(self._arrived, self._first)).size
            if have >= missing:
                message = self._arrived[self._first : self._first + missing]
                self._first += missing
                return message
            if not self._read(missing):
                return None

    def _read(self, size: int) -> bool:
        """Receive more bytes of a message of that size; False if the other end is closed."""
        if self._first == self._last:
            self._first = self._last = 0
        if self._first + size > len(self._arrived):
            left = bytes(self._arrived[self._first : self._last])
            self._arrived = memoryview(bytearray(max(size, _ROOM)))
            self._arrived[: len(left)] = left
            self._first, self._last = 0, len(left)
        try:
            room = socket.CMSG_SPACE(_MOST_FILES * _FILE_BYTES)
            got, attached, _, _ = self._socket.recvmsg_into([self._arrived[self._last :]], room, _CLOEXEC)
        except OSError:  # reset by the other end, or closed at this end
            return False
        for _, _, data in attached:
            self._files.extend(array("i", data))
        self._last += got
        return got > 0

    def _memory_of_tensors(self, head: _Head, lengths: Sequence[int], inline: memoryview) -> memoryview:
        """Return the memory that a message's tensors are built on. A copy if their owner would hold many slabs."""
        if head.slab == _NO_SLAB:
            return memoryview(bytearray(inline))
        lends_more = self._others.lent < _MOST_LENT
        memory = self._others.lend(head.slab)
        size = layout(lengths)[1]
        if self._copies_small and not (size >= _WORTH_LENDING and lends_more):
            return memoryview(bytearray(memory[:size]))
        return memory


def pickle_value(value: Any, address: str) -> tuple[memoryview, list[memoryview]]:
    """Return the pickle of a value, and the memory of its tensors, which is not copied. Raises UnsendableError."""
    return pickle_plain(value) or pickle_apart(trim_tensors(value), address)


def _pad(buffers: Sequence[memoryview], offsets: Sequence[int]) -> list[memoryview | bytes]:
    """Return buffers and the bytes between them."""
    pieces: list[memoryview | bytes] = []
    end = 0
    for buffer, offset in zip(buffers, offsets, strict=True):
        pieces += bytes(offset - end), buffer
        end = offset + buffer.nbytes
    return pieces


def _copy_into(slab: Slab, buffers: Sequence[memoryview], offsets: Sequence[int]) -> list[memoryview | bytes]:
    """Copy buffers into a slab. Nothing is left for the message itself."""
    memory = memoryview(slab.memory)
    for buffer, offset in zip(buffers, offsets, strict=True):
        _copy(memory, offset, buffer.nbytes, buffer)
    return []


def _files(slab: Slab | None, file: int | None) -> list[int]:
    files = [None if slab is None else slab.file, file]
    return [each for each in files if each is not None]


def _copy(memory: memoryview, offset: int, length: int, buffer: memoryview) -> None:
    """Copy a buffer. torch releases the interpreter lock for it, so that other lanes go on."""
    if length <= _INLINE or buffer.readonly:
        memory[offset : offset + length] = buffer
        return
    target = torch.frombuffer(memory, dtype=torch.uint8, offset=offset, count=length)
    source = (ctypes.c_ubyte * length).from_buffer(buffer)
    target.copy_(torch.frombuffer(source, dtype=torch.uint8))


def trim_tensors(value: Any) -> Any:
    """Return the value with tensors whose storages hold their own elements only: a shard is a view of the whole batch.

    Tensors that share memory share it in the result too.
    """
    leaves, spec = flatten(value)
    by_storage: dict[int, list[torch.Tensor]] = {}
    for leaf in leaves:
        if type(leaf) is torch.Tensor and leaf.device.type == "cpu" and _travels_plainly(leaf):
            by_storage.setdefault(leaf.untyped_storage().data_ptr(), []).append(leaf)
    cut: dict[int, torch.Tensor] = {}
    for tensors in by_storage.values():
        start, end = _extent(tensors)
        if end - start < tensors[0].untyped_storage().nbytes():
            cut.update(_cut_out(tensors, start, end))
    return unflatten(spec, [cut.get(id(leaf), leaf) for leaf in leaves]) if cut else value


def _travels_plainly(tensor: torch.Tensor) -> bool:
    bits = tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.is_nested
    return tensor.layout is torch.strided and not bits and tensor.numel() > 0


def _extent(tensors: Iterable[torch.Tensor]) -> tuple[int, int]:
    """Return the first byte of these tensors in their storage, and the byte behind the last."""
    starts, ends = [], []
    for tensor in tensors:
        size, start = tensor.element_size(), tensor.storage_offset()
        last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
        starts.append(int(start) * size)
        ends.append(int(start + last + 1) * size)
    return min(starts), max(ends)


def _cut_out(tensors: Sequence[torch.Tensor], start: int, end: int) -> dict[int, torch.Tensor]:
    """Return tensors on the bytes of a storage between `start` and `end`, without a copy, by the identity of the originals.

    The caller keeps the originals alive.
    """
    cut = {}
    address = tensors[0].untyped_storage().data_ptr() + start
    memory = torch.frombuffer((ctypes.c_ubyte * (end - start)).from_address(address), dtype=torch.uint8).untyped_storage()
    for tensor in tensors:
        offset = (tensor.storage_offset() * tensor.element_size() - start) // tensor.element_size()
        piece = torch.empty(0, dtype=tensor.dtype).set_(memory, offset, tensor.shape, tensor.stride())
        cut[id(tensor)] = piece.requires_grad_(tensor.requires_grad)
    return cut
