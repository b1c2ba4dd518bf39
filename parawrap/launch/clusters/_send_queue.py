"""What a node has to tell, in order, and no faster than the other end takes it in.

Otherwise a process that is stopped, or whose own output nobody reads, would leave the line to it full, and a full line
looks like a broken one. So only so much of what ranks write and return is under way; the rest waits, here and in their
pipes.
"""

from __future__ import annotations

import os
from collections import deque
from typing import Any, NamedTuple

from parawrap.launch.parcels._wire import Wire

__all__ = ["SendQueue"]

_WINDOW = 1 << 17  # bytes under way, which fit into the buffers of a line
_PIECE = 1 << 16


class _Letter(NamedTuple):
    """A message; `size` counts towards what is under way."""

    word: str
    body: Any
    size: int = 0
    file: int | None = None


class SendQueue:
    """Belongs to the thread that keeps the node.

    Args:
        wire: the line.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._waiting: deque[_Letter] = deque()
        self._under_way = 0
        self.is_broken = False

    @property
    def is_full(self) -> bool:
        """Whether what is put in now has to wait."""
        return bool(self._waiting)

    def put(self, word: str, body: Any, size: int = 0) -> None:
        """Send a message, when it is its turn; one with a size only when there is room for it on the line."""
        if not self.is_broken:
            self._waiting.append(_Letter(word, body, size))
            self._send_waiting()

    def put_file(self, rank: int, file: int) -> None:
        """Send a file in pieces, and close it."""
        if self.is_broken:
            os.close(file)
        else:
            self._waiting.append(_Letter("piece", rank, os.fstat(file).st_size, file))
            self._send_waiting()

    def taken_in(self, size: int) -> None:
        """The other end has read so much."""
        self._under_way -= size
        self._send_waiting()

    def close(self) -> None:
        """Send nothing more."""
        self.is_broken = True
        for letter in self._waiting:
            if letter.file is not None:
                os.close(letter.file)
        self._waiting.clear()

    def _send_waiting(self) -> None:
        while self._waiting and not self.is_broken and (self._waiting[0].size == 0 or self._under_way < _WINDOW):
            letter = self._waiting.popleft()
            if letter.file is not None:
                letter = self._next_piece(letter, letter.file)
            self._under_way += letter.size
            if not self._wire.send(letter.word, letter.body):
                self.close()  # what came through of a message that broke off would spoil the next one

    def _next_piece(self, letter: _Letter, file: int) -> _Letter:
        """The next piece of a file; what is left of it goes to the front again."""
        start = os.fstat(file).st_size - letter.size
        data = os.pread(file, _PIECE, start)
        if len(data) < letter.size:
            self._waiting.appendleft(letter._replace(size=letter.size - len(data)))
        else:
            os.close(file)
        return _Letter("piece", (letter.body, data), len(data))
