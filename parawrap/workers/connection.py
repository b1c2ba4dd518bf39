"""One end of the connection between this process and a worker.

A message is a head, the block of its tensors, and a pickled body. Up to 32 KiB travel in the socket. A larger message lies
in a slab: shared memory without a name, which its writer reuses once the reader has freed the tensors on it. One thread
sends at a time, and one receives.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import pickle
import socket
import struct
import weakref
from array import array
from collections import deque
from typing import Any, NamedTuple

from parawrap.errors import SessionError
from parawrap.processes.pickling import memory_file
from parawrap.processes.wire import close_in_forked_children
from parawrap.workers.packing import NOWHERE, Block, Packer, aligned

_INLINE = 32 << 10  # bytes below which a slab costs more than a copy through the socket
_ROOM = 4 * _INLINE  # for messages that arrive with one system call
_WORTH_LENDING = 1 << 20  # bytes; copying fewer takes less time than renewing a slab
_MOST_LENT = 4  # slabs that tensors of the caller lie on: later values are copied, so that memory stays bounded
_NO_SLAB = -1
_NO_ROOM = (errno.ENOSPC, errno.ENOMEM)
_FILE_BYTES = array("i").itemsize
_CLOEXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
_byte = ctypes.c_ubyte


class _Head(NamedTuple):
    start: int  # of the work, as perf_counter_ns
    end: int
    size: int  # of the block
    pickled: int  # bytes of the body
    slab: int
    given: int  # the slab of the answered message that the body refers to
    released: int  # slabs that the sender has released; their numbers follow
    retired: int  # slabs that the sender has replaced; their numbers follow
    is_new: bool  # the slab's file comes with the message
    has_file: bool  # another file comes with it


_HEAD = struct.Struct("=qqqqiiii??2x")
_NUMBER = struct.Struct("=i")


class Message(NamedTuple):
    """A received message. `start` and `end` are when its sender worked on it. The receiver closes `file`."""

    body: Any
    block: Block
    given: Block
    start: int
    end: int
    size: int
    slab: int
    file: int | None

    @property
    def addresses(self) -> tuple[int, int]:
        """The range of addresses of its block, if it lies in a slab: the answer may refer to it."""
        if self.slab == _NO_SLAB:
            return 0, 0
        start = ctypes.addressof(_byte.from_buffer(self.block.memory))
        return start, start + self.size


class _Slab:
    """One piece of shared memory of this end. `holders` are the reader, and tensors of this process."""

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.size = size
        self.holders = 1
        self.file: int | None = memory_file()
        try:
            _reserve(self.file, size)
            self.memory = mmap.mmap(self.file, size)
        except BaseException:
            os.close(self.file)
            raise

    def close_file(self) -> None:
        if self.file is not None:
            os.close(self.file)
            self.file = None


class Connection:
    """One end of a connection. With `lends`, all tensors that arrive in a slab stay there: its reader drops them soon."""

    def __init__(self, sock: socket.socket, *, lends: bool) -> None:
        sock.settimeout(None)  # whatever socket.setdefaulttimeout says
        self._socket = sock
        self._lends = lends
        self._free: list[_Slab] = []
        self._used: dict[int, _Slab] = {}
        self._made = 0
        self._maps: dict[int, mmap.mmap] = {}
        self._lent: dict[int, weakref.ref[Any]] = {}
        self._released: deque[int] = deque()
        self._own_lent = 0
        self._returned: deque[int] = deque()
        self._room = bytearray(_ROOM)
        self._first = self._last = 0  # the bytes in it that no message has taken yet
        self._files: deque[int] = deque()
        close_in_forked_children(sock)  # not this object: a shutdown would end the connection of this process too

    def fileno(self) -> int:
        """Return the socket's descriptor for selectors; -1 once closed."""
        return self._socket.fileno()

    @property
    def has_more(self) -> bool:
        """True if a further message may have arrived together with the last one."""
        return self._first < self._last

    def send(
        self,
        body: Any,
        packer: Packer,
        *,
        start: int = 0,
        end: int = 0,
        given: int = _NO_SLAB,
        file: int | None = None,
    ) -> None:
        """Send a message.

        Raises:
            SessionError: If memory lacks room for its tensors. Nothing is sent then.
            ConnectionError: If the other end is closed.
        """
        pickled = pickle.dumps(body, 5)
        size, slab, retired, parts = packer.size, None, list[int](), list[Any]()
        if size + len(pickled) > _INLINE:
            slab, retired = self._take(size + len(pickled))
            _fill(slab.memory, packer.pieces, pickled)
        else:
            parts = [*packer.pieces, pickled]
        released = [self._released.popleft() for _ in range(len(self._released))]
        is_new = slab is not None and slab.file is not None
        numbers = b"".join(map(_NUMBER.pack, (*released, *retired)))
        head = _HEAD.pack(
            start,
            end,
            size,
            len(pickled),
            _NO_SLAB if slab is None else slab.number,
            given if packer.names_given else _NO_SLAB,
            len(released),
            len(retired),
            is_new,
            file is not None,
        )
        files = [each for each in (slab.file if slab is not None else None, file) if each is not None]
        try:
            self._post(b"".join((head, numbers, *parts)), files)
        finally:
            if slab is not None:
                slab.close_file()

    def receive(self) -> Message | None:
        """Wait for a message; None if the other end is closed.

        Raises:
            Exception: What the body's classes raise.
        """
        while (found := self._next()) is None:
            if not self._read():
                return None
        head, at = found
        numbers = [_NUMBER.unpack_from(self._room, at + 4 * i)[0] for i in range(head.released + head.retired)]
        at += 4 * len(numbers)
        given = NOWHERE if head.given == _NO_SLAB else self._lend_own(head.given)
        for each in numbers[: head.released]:
            self._release(each)
        for each in numbers[head.released :]:
            del self._maps[each]
        if head.is_new:
            new = self._files.popleft()
            self._maps[head.slab] = mmap.mmap(new, os.fstat(new).st_size)
            os.close(new)
        file = self._files.popleft() if head.has_file else None
        if head.slab == _NO_SLAB:
            pickled: Any = memoryview(self._room)[at + head.size : at + head.size + head.pickled]
            block = aligned(memoryview(self._room)[at : at + head.size])
            self._first = at + head.size + head.pickled
        else:
            self._first = at
            memory = self._lend(head.slab)
            pickled = memoryview(memory)[head.size : head.size + head.pickled]
            is_lent = self._lends or (head.size >= _WORTH_LENDING and len(self._lent) <= _MOST_LENT)
            block = Block(memory) if is_lent else aligned(memoryview(memory)[: head.size])
        body = pickle.loads(pickled)
        return Message(body, block, given, head.start, head.end, head.size, head.slab, file)

    def close(self) -> None:
        """Close the connection, which ends a waiting reader at either end."""
        with contextlib.suppress(OSError):  # the other end is gone
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        while self._files:
            os.close(self._files.popleft())

    # -- bytes

    def _post(self, message: bytes, files: list[int]) -> None:
        try:
            sent = socket.send_fds(self._socket, [message], files) if files else self._socket.send(message)
            if sent < len(message):
                self._socket.sendall(memoryview(message)[sent:])
        except OSError as error:
            msg = "the other end of the connection is closed"
            raise ConnectionError(msg) from error

    def _next(self) -> tuple[_Head, int] | None:
        """Return the head of a message that has arrived, and where its numbers begin."""
        have = self._last - self._first
        if have < _HEAD.size:
            return None
        head = _Head(*_HEAD.unpack_from(self._room, self._first))
        inline = head.size + head.pickled if head.slab == _NO_SLAB else 0
        if have < _HEAD.size + 4 * (head.released + head.retired) + inline:
            return None
        return head, self._first + _HEAD.size

    def _read(self) -> bool:
        """Receive more bytes; False if the other end is closed."""
        if self._first == self._last:
            self._first = self._last = 0
        elif self._last > len(self._room) // 2:
            left = self._room[self._first : self._last]
            if len(left) > len(self._room) // 2:  # very many numbers of slabs
                self._room = bytearray(2 * len(self._room))
            self._room[: len(left)] = left
            self._first, self._last = 0, len(left)
        try:
            room = socket.CMSG_SPACE(2 * _FILE_BYTES)
            got, attached, _, _ = self._socket.recvmsg_into([memoryview(self._room)[self._last :]], room, _CLOEXEC)
        except OSError:  # reset by the other end, or closed at this end
            return False
        for _, _, data in attached:
            self._files.extend(array("i", data))
        self._last += got
        return got > 0

    # -- slabs of this end

    def _take(self, size: int) -> tuple[_Slab, list[int]]:
        """Return a slab with room for that many bytes, and the numbers of free slabs that it replaces."""
        self._take_back()
        fitting = [slab for slab in self._free if slab.size >= size]
        retired: list[int] = []
        if fitting:
            slab = min(fitting, key=_size_of)
            self._free.remove(slab)
            slab.holders = 1
        else:
            step = max(_WORTH_LENDING, 1 << (size.bit_length() - 3))  # so that similar sizes fit too
            slab = _Slab(self._made, -(-size // step) * step)
            self._made += 1
            retired = [each.number for each in self._free]  # too small, so the larger slab takes their place
            self._free.clear()
        self._used[slab.number] = slab
        return slab, retired

    def _release(self, number: int) -> None:
        slab = self._used[number]
        slab.holders -= 1
        if slab.holders == 0:
            del self._used[number]
            self._free.append(slab)

    def _lend_own(self, number: int) -> Block:
        """Return the memory of an own slab. It is not used again while something refers to this memory."""
        self._take_back()
        slab = self._used[number]
        if self._own_lent >= _MOST_LENT:
            return aligned(memoryview(slab.memory))
        self._own_lent += 1
        slab.holders += 1
        owner = (_byte * slab.size).from_buffer(slab.memory)
        weakref.finalize(owner, self._returned.append, number).atexit = False
        return Block(owner)

    def _take_back(self) -> None:
        """Release own slabs without tensors in this process."""
        while self._returned:
            self._own_lent -= 1
            self._release(self._returned.popleft())

    # -- slabs of the other end

    def _lend(self, number: int) -> Any:
        """Return a slab's memory. The slab is released when nothing refers to this memory any more."""
        memory = self._maps[number]
        owner = (_byte * len(memory)).from_buffer(memory)
        lent, released = self._lent, self._released

        def release(_: object) -> None:
            lent.pop(number, None)
            released.append(number)

        lent[number] = weakref.ref(owner, release)
        return owner


def _size_of(slab: _Slab) -> int:
    return slab.size


def _fill(memory: mmap.mmap, pieces: list[Any], pickled: bytes) -> None:
    """Copy the pieces of a block, and the body. memmove releases the interpreter lock, so that other threads go on."""
    address, at = ctypes.addressof(_byte.from_buffer(memory)), 0
    for piece in pieces:
        length = len(piece)
        if type(piece) is bytes:
            memory[at : at + length] = piece
        else:
            ctypes.memmove(address + at, piece, length)
        at += length
    memory[at : at + len(pickled)] = pickled


def _reserve(file: int, size: int) -> None:
    """Give a file its size, and reserve the memory: without it, a later write would end the process by SIGBUS."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, size)
        else:
            os.ftruncate(file, size)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        msg = (
            f"no room for {size:,} bytes of shared memory for another process: {error.strerror}. Use smaller batches, "
            "fewer processes, or a container with more memory"
        )
        raise SessionError(msg) from error
