"""The connection between the launching process and a worker: messages whose tensors travel in shared memory.

A message is a word, a pickled value, and at most one file. The memory of tensors stays out of the pickle: a little of it
follows the pickle, more of it goes into a slab.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import socket
import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from parawrap.launch import pickled_apart
from parawrap.tree import flatten, unflatten
from parawrap.workers._shared_memory import MappedSlabs, OwnSlabs, Slab, layout

__all__ = ["Line", "Message"]

_HEAD = struct.Struct("<II")  # the lengths of the envelope, and of the body
_INLINE = 32 << 10  # bytes of tensors below which a slab costs more than a copy through the socket
_WORTH_LENDING = 1 << 20
_MOST_LENT = 4
_CLOEXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
_MOST_FILES = 2


class Message(NamedTuple):
    """A received message. The reader closes `file`."""

    word: str
    value: Any
    file: int | None


class _Envelope(NamedTuple):
    """The part of a message that the line itself needs. `spans` are the places of the buffers in the slab or the body."""

    word: str
    pickled: int
    spans: list[tuple[int, int]]
    slab: int | None
    is_new_slab: bool
    retired: list[int]
    released: list[int]
    has_file: bool


class Line:
    """One end of a connection; used by one thread at a time.

    With `copies_small`, tensors that arrive own their memory unless they are large and few. Otherwise all tensors that
    arrive in a slab stay there, for a reader that drops them soon.
    """

    def __init__(self, sock: socket.socket, *, copies_small: bool) -> None:
        self._socket = sock
        self._copies_small = copies_small
        self._own = OwnSlabs()
        self._others = MappedSlabs()

    def send(self, word: str, value: Any, address: str, file: int | None = None) -> None:
        """Send a message. `address` names the value in errors.

        Raises:
            UnsendableError: If the value cannot be pickled. Nothing is sent then.
            SessionError: If there is no room for its tensors. Nothing is sent then.
            OSError: If the other end is closed.
        """
        pickled, buffers = pickled_apart(_trimmed(value), address)
        spans, size = layout([each.nbytes for each in buffers])
        slab, retired = (None, []) if size <= _INLINE else self._own.take(size)
        body = bytearray(pickled)
        if slab is None:
            start = len(body)
            body += bytes(size)
            memory = memoryview(body)[start:]
        else:
            memory = memoryview(slab.memory)
        for (offset, length), buffer in zip(spans, buffers, strict=True):
            _copy(memory, offset, length, buffer)
        del memory
        is_new = slab is not None and slab.file is not None
        number = None if slab is None else slab.number
        envelope = _Envelope(word, len(pickled), spans, number, is_new, retired, self._others.released(), file is not None)
        try:
            self._post(pickle.dumps(tuple(envelope)), body, _files(slab, file))
        finally:
            if slab is not None:
                slab.close_file()

    def receive(self) -> Message | None:
        """Wait for a message; None if the other end is closed."""
        head, files = self._receive_head()
        if len(head) < _HEAD.size:
            return None
        lengths = _HEAD.unpack(head)
        sealed, body = (self._receive_bytes(length) for length in lengths)
        if sealed is None or body is None:
            return None
        envelope = _Envelope(*pickle.loads(sealed))
        self._own.release(envelope.released)
        self._others.retire(envelope.retired)
        if envelope.is_new_slab:
            assert envelope.slab is not None
            self._others.add(envelope.slab, files[0])
            os.close(files.pop(0))
        memory = memoryview(body)
        pickled, rest = memory[: envelope.pickled], memory[envelope.pickled :]
        if envelope.slab is not None:
            rest = self._lent(envelope)
        value = pickle.loads(pickled, buffers=[rest[offset : offset + size] for offset, size in envelope.spans])
        return Message(envelope.word, value, files[0] if envelope.has_file else None)

    def close(self) -> None:
        """Close the connection, which ends a waiting reader at either end."""
        with contextlib.suppress(OSError):  # the other end is gone
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _post(self, sealed: bytes, body: bytearray, files: list[int]) -> None:
        first = _HEAD.pack(len(sealed), len(body)) + sealed
        if files:
            sent = socket.send_fds(self._socket, [first], files)
            first = first[sent:]
        self._socket.sendall(first + body)

    def _receive_head(self) -> tuple[bytes, list[int]]:
        head, files, _, _ = socket.recv_fds(self._socket, _HEAD.size, _MOST_FILES, _CLOEXEC)
        if 0 < len(head) < _HEAD.size:
            head += bytes(self._receive_bytes(_HEAD.size - len(head)) or b"")
        return head, list(files)

    def _receive_bytes(self, size: int) -> bytearray | None:
        memory = bytearray(size)
        view, got = memoryview(memory), 0
        while got < size:
            count = self._socket.recv_into(view[got:], size - got, socket.MSG_WAITALL)
            if count == 0:
                return None
            got += count
        return memory

    def _lent(self, envelope: _Envelope) -> memoryview:
        """Return the memory of a message's slab; a copy if tensors of the caller would hold many slabs."""
        assert envelope.slab is not None
        lends_more = self._others.lent < _MOST_LENT
        memory = self._others.lend(envelope.slab)
        size = sum(envelope.spans[-1])
        if self._copies_small and not (size >= _WORTH_LENDING and lends_more):
            return memoryview(bytearray(memory[:size]))
        return memory


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


def _trimmed(value: Any) -> Any:
    """Return the value with tensors whose storages hold their own elements only: a shard is a view of the whole batch.

    Tensors that share memory share it in the result too.
    """
    leaves, spec = flatten(value)
    by_storage: dict[int, list[torch.Tensor]] = {}
    for leaf in leaves:
        if type(leaf) is torch.Tensor and leaf.device.type == "cpu" and _is_plain(leaf):
            by_storage.setdefault(leaf.untyped_storage().data_ptr(), []).append(leaf)
    cut: dict[int, torch.Tensor] = {}
    for tensors in by_storage.values():
        start, end = _extent(tensors)
        if end - start < tensors[0].untyped_storage().nbytes():
            cut.update(_cut_out(tensors, start, end))
    return unflatten(spec, [cut.get(id(leaf), leaf) for leaf in leaves]) if cut else value


def _is_plain(tensor: torch.Tensor) -> bool:
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
