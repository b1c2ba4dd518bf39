"""Memory that processes share: files without a path, and slabs, which are used again and again.

A slab belongs to the end of a wire that writes it. The other end maps it once::

    owner: free ──► filled ──► lent to the reader ──► released ──► free
                                       │
                                       └── retired: unmapped at both ends

The owner writes a slab only while it is free. The reader releases it once no tensor refers to its
memory. Each end numbers its own slabs. The numbers of released and of retired slabs travel with the
next message.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
import weakref
from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import Any, NamedTuple

from parawrap.errors import SessionError

MOST_KEPT = 64 << 20
"""Bytes of free slabs that an idle end of a wire keeps. A larger slab is retired soon."""

ALIGNMENT = 64
"""Bytes, as torch aligns CPU tensors."""

# Bytes. Below these, a read takes less time than a map, and a copy less than a new slab
_WORTH_MAPPING = 1 << 20
_WORTH_LENDING = 1 << 20
# Slabs with tensors of a reader: later blocks are copied, which bounds memory. A guess
_MOST_LENT = 4
_MOST_FREE = 2  # slabs: a lane sends one message ahead of the one that its worker computes
_NO_ROOM = (errno.ENOSPC, errno.ENOMEM)
_MAP_FIXED = 0x10  # from <sys/mman.h> of Linux and macOS
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
# address, length, protection, flags, file, and offset
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_byte = ctypes.c_ubyte


def aligned_room(size: int) -> memoryview:
    """Return memory of that many bytes, aligned for tensors."""
    made = bytearray(size + ALIGNMENT)
    start = -ctypes.addressof(_byte.from_buffer(made)) % ALIGNMENT
    return memoryview(made)[start : start + size]


def aligned_copy(memory: memoryview) -> memoryview:
    """Return a copy of a block, aligned for tensors."""
    room = aligned_room(len(memory))
    room[:] = memory
    return room


# -- files


def memory_file() -> int:
    """Make a file without a path, in memory if the system supports that. Closing frees it."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("parawrap")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def map_file(file: int) -> memoryview:
    """Return the bytes of a file, writable and private.

    The caller may close the file afterwards.
    """
    size = os.fstat(file).st_size
    if size >= _WORTH_MAPPING:
        writable = mmap.PROT_READ | mmap.PROT_WRITE
        return memoryview(mmap.mmap(file, size, flags=mmap.MAP_PRIVATE, prot=writable))
    # Not `read`: all receivers share the position of the file
    return memoryview(bytearray(os.pread(file, size, 0)))


def fill_file(parts: Sequence[Any]) -> int:
    """Return a new memory file with these bytes."""
    file = memory_file()
    try:
        with open(file, "wb", closefd=False) as out:  # its writes are complete, or raise
            out.writelines(parts)
    except BaseException:
        os.close(file)
        raise
    return file


class _OwnFile:
    """A file that is closed with this object."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


class Block:
    """The memory of one message, in parts. It borrows the memory of tensors until `copy_bytes`.

    Attributes:
        parts: The bytes, in pieces.
        size: The number of bytes.
    """

    def __init__(self) -> None:
        self.parts: list[Any] = []
        self.size: int = 0
        # An object of its own, so that most blocks have no `__del__`, in which Ctrl-C would be lost
        self._file: _OwnFile | None = None

    @property
    def file(self) -> int | None:
        """A memory file with the same bytes, which any number of receivers may map, or None.

        The block owns it.
        """
        return None if self._file is None else self._file.number

    def to_bytes(self) -> bytes:
        """Return the bytes."""
        return b"".join(self.parts)

    def copy_bytes(self) -> None:
        """Copy the bytes, so that the caller may change its tensors from here on."""
        if self.size < _WORTH_MAPPING:
            self.parts = [self.to_bytes()]
        elif self._file is None:
            self._file = _OwnFile(fill_file(self.parts))
            self.parts = [map_file(self._file.number)]


# -- slabs


class _Mapped(NamedTuple):
    """A slab of the other end. Its file stays open for `_make_private`."""

    memory: mmap.mmap
    file: int


class Slabs:
    """The slabs of one end of a wire, and those of the other end that it reads.

    One thread at a time uses it. But the collector may free lent memory in any thread, and within
    any method of this object.

    Attributes:
        lends_all: True to copy no block out of its slab: the reader drops its tensors soon.
        retired: Numbers of slabs of this end that are gone. The next message has them, so that the
            other end unmaps the slabs.
    """

    def __init__(self) -> None:
        self.lends_all = False
        self.retired: list[int] = []
        # Slabs of this end
        self._own: dict[int, mmap.mmap] = {}  # by number
        self._free: list[int] = []  # numbers of slabs, the smallest slab first
        self._numbers = count()
        # Slabs of the other end
        self._mapped: dict[int, _Mapped] = {}  # by number
        # A reference to lent memory, and the number of its slab, by the id of the reference
        self._lent: dict[int, tuple[weakref.ref[Any], int]] = {}
        # References whose memory was freed. Any thread may append: this is one step in C
        self._freed: deque[weakref.ref[Any]] = deque()
        # What `take_released` returns first: refused slabs, and numbers that were not sent
        self._refused: deque[int] = deque()
        # Lent while this process forked: the child may read them, so they are not filled again
        self._inherited: set[int] = set()
        _all.add(self)

    # The owner

    @property
    def has_large(self) -> bool:
        """True if a free slab is larger than an idle end keeps."""
        return bool(self._free) and len(self._own[self._free[-1]]) > MOST_KEPT

    def fill(self, parts: Sequence[Any], size: int) -> tuple[int, int | None]:
        """Copy parts into a free slab. Return its number, and its file if the slab is new.

        Raises:
            SessionError: If memory lacks room.
            OSError: If this process has reached a limit.
        """
        number, file = self._take(size)
        memory, at = self._own[number], 0
        address = ctypes.addressof(_byte.from_buffer(memory))
        for part in parts:
            length = len(part)
            if isinstance(part, ctypes.Array):
                ctypes.memmove(address + at, part, length)  # releases the interpreter lock
            else:
                memory[at : at + length] = part
            at += length
        return number, file

    def take_back(self, released: Sequence[int], retired: Sequence[int]) -> None:
        """Take back slabs that the other end has released, and unmap those that it has retired."""
        for number in retired:
            if (gone := self._mapped.pop(number, None)) is not None:
                os.close(gone.file)
        for number in released:
            if number < 0:  # `take_released` sends ``~number`` for a slab that is not filled again
                self._retire(~number)
            else:
                self.free(number)

    def free(self, number: int) -> None:
        """Keep a slab for a later message. Retire the smallest free slabs if there are too many."""
        self._free = sorted((*self._free, number), key=lambda each: len(self._own[each]))
        while len(self._free) > 1:  # the largest stays until `trim`
            n_bytes = sum(len(self._own[each]) for each in self._free)
            if len(self._free) <= _MOST_FREE and n_bytes <= MOST_KEPT:
                break
            self._retire(self._free.pop(0))

    def forget(self, number: int) -> None:
        """Forget a new slab that the other end has not received."""
        del self._own[number]

    def trim(self) -> None:
        """Retire free slabs that are larger than an idle end keeps."""
        for number in [each for each in self._free if len(self._own[each]) > MOST_KEPT]:
            self._free.remove(number)
            self._retire(number)

    def _retire(self, number: int) -> None:
        del self._own[number]
        self.retired.append(number)

    def _take(self, size: int) -> tuple[int, int | None]:
        """Take the smallest free slab with this room, or make one. Return as `fill` does."""
        for number in self._free:
            if len(self._own[number]) >= size:
                self._free.remove(number)
                return number, None
        # At most a quarter larger than needed, so that blocks of similar sizes fit too
        step = max(_WORTH_MAPPING, 1 << (size.bit_length() - 3))
        n_steps = -(-size // step)  # rounded up
        number, file = next(self._numbers), memory_file()
        try:
            _reserve(file, n_steps * step)
            self._own[number] = mmap.mmap(file, n_steps * step)
        except BaseException:
            os.close(file)
            raise
        return number, file

    # The reader

    def read(self, number: int, size: int, file: int | None) -> memoryview:
        """Return a block in a slab of the other end. A new slab comes with its file.

        This object owns the file from here on.

        Raises:
            OSError: If this process has reached a limit. The owner is told to retire the slab.
        """
        if file is not None:
            try:
                self._mapped[number] = _Mapped(mmap.mmap(file, os.fstat(file).st_size), file)
            except OSError:
                os.close(file)
                self.refuse(number)
                raise
        # Lent in any case: after the copy below, nothing refers to `block`, which is released then
        block = self._lend(number)[:size]
        n_lent = len(self._lent) - len(self._freed)
        if self.lends_all or (size >= _WORTH_LENDING and n_lent <= _MOST_LENT):
            return block
        return aligned_copy(block)

    def refuse(self, number: int) -> None:
        """Have the owner retire a slab that this process could not map."""
        self._refused.append(~number)

    @property
    def has_released(self) -> bool:
        """True if `take_released` has numbers."""
        return bool(self._freed or self._refused)

    def take_released(self, most: int) -> list[int]:
        """Return numbers of the other end's slabs to which nothing refers here.

        ``~number`` says that the owner must not use the slab again. It is negative, also for 0.
        """
        found: list[int] = []
        while len(found) < most and self._refused:
            found.append(self._refused.popleft())
        while len(found) < most and self._freed:
            _, number = self._lent.pop(id(self._freed.popleft()))
            if number in self._inherited:
                self._inherited.remove(number)
                number = ~number
            found.append(number)
        return found

    def return_released(self, numbers: Sequence[int]) -> None:
        """Keep numbers for the next message. The message for which they were taken was not sent."""
        self._refused.extendleft(reversed(numbers))

    def _lend(self, number: int) -> memoryview:
        """Return the memory of a slab, which is released once nothing refers to the result."""
        memory = self._mapped[number].memory
        owner = (_byte * len(memory)).from_buffer(memory)
        # The callback is a method in C: one step, within which no signal handler can raise
        reference = weakref.ref(owner, self._freed.append)
        self._lent[id(reference)] = reference, number
        return memoryview(owner).cast("B")

    # The end, and forks

    def close(self) -> None:
        """Close the files of the other end's slabs. Tensors on them still work."""
        for each in self._mapped.values():
            os.close(each.file)
        self._mapped.clear()

    def make_private(self) -> None:
        """Make lent memory private, just before this process forks.

        A slab is a shared mapping. After a fork, parent and child must not see each other's writes.
        So the same file is mapped privately at the same address. The owner does not fill the slab
        again: its number returns as ``~number``.
        """
        for _, number in list(self._lent.values()):
            mapped = self._mapped.get(number)
            if mapped is None or number in self._inherited:  # retired, or private since a fork
                continue
            self._inherited.add(number)
            address = ctypes.addressof(_byte.from_buffer(mapped.memory))
            flags = mmap.MAP_PRIVATE | _MAP_FIXED  # replaces the pages in one step
            writable = mmap.PROT_READ | mmap.PROT_WRITE
            _libc.mmap(address, len(mapped.memory), writable, flags, mapped.file, 0)


_all: weakref.WeakSet[Slabs] = weakref.WeakSet()


def _reserve(file: int, size: int) -> None:
    """Give a file its size and memory. Without memory, a later write would raise SIGBUS."""
    try:
        os.posix_fallocate(file, 0, size)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        msg = (
            f"no room for {size:,} bytes of shared memory for another process: {error.strerror}. "
            "Use smaller batches, fewer processes, or a container with more memory"
        )
        raise SessionError(msg) from error


def _make_private() -> None:
    # A copy: the collector may remove an entry meanwhile
    for slabs in list(_all):
        slabs.make_private()


os.register_at_fork(before=_make_private)
