"""Shared memory between a process that writes messages and a process that reads them.

The writer owns slabs: anonymous memory files without a name, so they disappear with their last user, however it ends. Each
message uses one slab. The reader builds tensors on it, and releases it when the last of them is freed.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence

from parawrap.errors import SessionError
from parawrap.processes.pickling import memory_file

__all__ = ["MappedSlabs", "OwnSlabs", "Slab", "layout"]

_ALIGNMENT = 64  # bytes, as torch aligns CPU tensors
_SMALLEST = 1 << 20  # bytes; smaller slabs would be replaced often
_NO_ROOM = (errno.ENOSPC, errno.ENOMEM)


class Slab:
    """One piece of shared memory, mapped by its writer. The file stays open until the reader has it."""

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.size = size
        self.file: int | None = memory_file()
        try:
            _reserve(self.file, size)
            self.memory = mmap.mmap(self.file, size)
        except BaseException:
            self.close_file()
            raise

    def close_file(self) -> None:
        """Close the file; the memory stays mapped."""
        if self.file is not None:
            os.close(self.file)
            self.file = None


class OwnSlabs:
    """The slabs of one writer. A slab is reused, or made if every free slab is too small. Thread-safe."""

    def __init__(self) -> None:
        self._free: dict[int, Slab] = {}
        self._in_use: dict[int, Slab] = {}
        self._made = 0
        self._changing = threading.Lock()

    def take(self, size: int) -> tuple[Slab, list[int]]:
        """Return a slab with room for that many bytes, and the numbers of free slabs that it replaces.

        Raises:
            SessionError: If the system has too little memory.
        """
        with self._changing:
            fitting = [slab for slab in self._free.values() if slab.size >= size]
            if fitting:
                slab, retired = min(fitting, key=lambda each: each.size), []
                del self._free[slab.number]
            else:
                retired = list(self._free)  # too small, so the larger slab takes their place
                self._free.clear()
                step = max(_SMALLEST, 1 << (size.bit_length() - 3))  # so that similar sizes fit too
                slab = Slab(self._made, -(-size // step) * step)
                self._made += 1
            self._in_use[slab.number] = slab
        return slab, retired

    def release(self, numbers: Sequence[int]) -> None:
        """Take back slabs that the reader has released."""
        if numbers:
            with self._changing:
                self._free.update((number, self._in_use.pop(number)) for number in numbers)


class MappedSlabs:
    """The slabs of the other process, as their reader maps them. Tensors on a slab may be freed by any thread."""

    def __init__(self) -> None:
        self._maps: dict[int, mmap.mmap] = {}
        self._lent: dict[int, weakref.ref[ctypes.Array[ctypes.c_ubyte]]] = {}
        self._released: deque[int] = deque()

    @property
    def lent(self) -> int:
        """The number of slabs that tensors of this process lie on."""
        return len(self._lent)

    def add(self, number: int, file: int) -> None:
        """Map a new slab. The caller may close the file afterwards."""
        self._maps[number] = mmap.mmap(file, os.fstat(file).st_size)

    def retire(self, numbers: Sequence[int]) -> None:
        """Unmap slabs that the writer replaced."""
        for number in numbers:
            del self._maps[number]

    def lend(self, number: int) -> memoryview:
        """Return a slab's memory. The slab is released when nothing refers to this memory any more."""
        memory = self._maps[number]
        owner = (ctypes.c_ubyte * len(memory)).from_buffer(memory)
        self._lent[number] = weakref.ref(owner, lambda _: self._release(number))
        return memoryview(owner).cast("B")

    def released(self) -> list[int]:
        """Return the slabs released since the last call."""
        return [self._released.popleft() for _ in range(len(self._released))]

    def _release(self, number: int) -> None:
        self._lent.pop(number, None)
        self._released.append(number)


def layout(lengths: Sequence[int]) -> tuple[list[int], int]:
    """Return the aligned offset of each buffer, and the size of all."""
    offsets, end = [], 0
    for length in lengths:
        offset = -(-end // _ALIGNMENT) * _ALIGNMENT
        offsets.append(offset)
        end = offset + length
    return offsets, end


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
