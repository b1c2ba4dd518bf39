"""One end of the connection between this process and a worker.

A message is one packet: a head, the block of its tensors, and a pickled body. Up to 32 KiB travel in the packet. A larger
message lies in a slab: shared memory without a name, which its writer reuses once the reader has freed the tensors on it.
One thread sends at a time, and one receives.
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
from itertools import count
from typing import Any

from parawrap.errors import SessionError
from parawrap.processes.pickling import memory_file
from parawrap.processes.wire import close_in_forked_children
from parawrap.workers.packing import Packer, aligned

_INLINE = 32 << 10  # bytes below which a slab costs more than a copy through the socket
_WORTH_LENDING = 1 << 20  # bytes; copying fewer takes less time than renewing a slab
_MOST_LENT = 4  # slabs that tensors of the caller lie on: later values are copied, so that memory stays bounded
_NO_SLAB = -1
_NO_ROOM = (errno.ENOSPC, errno.ENOMEM)
_HEAD = struct.Struct("=qqi?3x")  # bytes of the block and of the body, the slab, True if its file comes with the message
_FILES_ROOM = socket.CMSG_SPACE(2 * array("i").itemsize)
_byte = ctypes.c_ubyte


class Connection:
    """One end of a connection. With `lends`, all tensors that arrive in a slab stay there: its reader drops them soon."""

    def __init__(self, sock: socket.socket, *, lends: bool) -> None:
        sock.settimeout(None)  # whatever socket.setdefaulttimeout says
        self._socket = sock
        self._lends = lends
        self._room = memoryview(bytearray(_HEAD.size + _INLINE))
        self._slabs: dict[int, mmap.mmap] = {}  # of this end
        self._free: list[int] = []
        self._numbers = count()
        self._retired: list[int] = []  # of this end; the other end does not know it yet
        self._maps: dict[int, mmap.mmap] = {}  # slabs of the other end
        self._lent: dict[int, weakref.ref[Any]] = {}
        self._released: deque[int] = deque()  # of the other end, which does not know it yet
        close_in_forked_children(sock)  # not this object: a shutdown would end the connection of this process too

    def fileno(self) -> int:
        """Return the socket's descriptor for selectors; -1 once closed."""
        return self._socket.fileno()

    def send(self, body: Any, packer: Packer, file: int | None = None) -> None:
        """Send a message.

        Raises:
            SessionError: If memory lacks room for its tensors. Nothing is sent then.
            ConnectionError: If the other end is closed.
        """
        released, retired = list(self._released), list(self._retired)
        pickled = pickle.dumps((body, released, retired), 5)
        slab, parts, new = _NO_SLAB, [*packer.pieces, pickled], None
        if packer.size + len(pickled) > _INLINE:
            slab, new = self._take(packer.size + len(pickled))
            _fill(self._slabs[slab], parts)
            parts = []
        head = _HEAD.pack(packer.size, len(pickled), slab, new is not None)
        files = [each for each in (new, file) if each is not None]
        message = b"".join((head, *parts))
        try:
            if files:
                socket.send_fds(self._socket, [message], files)
            else:
                self._socket.send(message)
        except OSError as error:
            msg = "the other end of the connection is closed"
            raise ConnectionError(msg) from error
        finally:
            if new is not None:
                os.close(new)
        del self._retired[: len(retired)]
        for _ in released:
            self._released.popleft()

    def receive(self) -> tuple[Any, memoryview, int | None] | None:
        """Wait for a message, and return its body, its block, and its file, which the caller closes.

        None if the other end is closed.

        Raises:
            Exception: What the body's classes raise.
        """
        try:
            length, attached, _, _ = self._socket.recvmsg_into([self._room], _FILES_ROOM, socket.MSG_CMSG_CLOEXEC)
        except OSError:  # reset by the other end, or closed at this end
            return None
        if not length:
            return None
        files = [file for _, _, data in attached for file in array("i", data)]
        size, pickled_size, slab, is_new = _HEAD.unpack_from(self._room)
        if is_new:
            new = files.pop(0)
            self._maps[slab] = mmap.mmap(new, os.fstat(new).st_size)
            os.close(new)
        memory = self._room[_HEAD.size :] if slab == _NO_SLAB else self._lend(slab)
        is_lent = slab != _NO_SLAB and (self._lends or (size >= _WORTH_LENDING and len(self._lent) <= _MOST_LENT))
        block = memory if is_lent else aligned(memory[:size])
        body, released, retired = pickle.loads(memory[size : size + pickled_size])
        self._free += released
        for each in retired:
            del self._maps[each]
        return body, block, files[0] if files else None

    def close(self) -> None:
        """Close the connection, which ends a waiting reader at either end."""
        with contextlib.suppress(OSError):  # the other end is gone
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _take(self, size: int) -> tuple[int, int | None]:
        """Return the number of a free slab with room for that many bytes, and the file of a new one."""
        fitting = [each for each in self._free if len(self._slabs[each]) >= size]
        if fitting:
            number = min(fitting, key=lambda each: len(self._slabs[each]))
            self._free.remove(number)
            return number, None
        for each in self._free:  # too small, so the larger slab takes their place
            del self._slabs[each]
        self._retired += self._free
        self._free.clear()
        step = max(_WORTH_LENDING, 1 << (size.bit_length() - 3))  # so that similar sizes fit too
        number, size, file = next(self._numbers), -(-size // step) * step, memory_file()
        try:
            _reserve(file, size)
            self._slabs[number] = mmap.mmap(file, size)
        except BaseException:
            os.close(file)
            raise
        return number, file

    def _lend(self, number: int) -> memoryview:
        """Return the memory of the other end's slab. The slab is released when nothing refers to this memory any more."""
        memory = self._maps[number]
        owner = (_byte * len(memory)).from_buffer(memory)
        lent, released = self._lent, self._released

        def release(_: object) -> None:
            lent.pop(number, None)
            released.append(number)

        lent[number] = weakref.ref(owner, release)
        return memoryview(owner).cast("B")


def _fill(memory: mmap.mmap, parts: list[Any]) -> None:
    """Copy the parts of a message. memmove releases the interpreter lock, so that other threads go on."""
    address, at = ctypes.addressof(_byte.from_buffer(memory)), 0
    for part in parts:
        length = len(part)
        if isinstance(part, ctypes.Array):
            ctypes.memmove(address + at, part, length)
        else:
            memory[at : at + length] = part
        at += length


def _reserve(file: int, size: int) -> None:
    """Give a file its size, and reserve the memory: without it, a later write would end the process by SIGBUS."""
    try:
        os.posix_fallocate(file, 0, size)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        msg = (
            f"no room for {size:,} bytes of shared memory for another process: {error.strerror}. Use smaller batches, "
            "fewer processes, or a container with more memory"
        )
        raise SessionError(msg) from error
