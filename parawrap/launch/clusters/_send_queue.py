"""A node agent's queue of outgoing messages. It sends in order and no faster than the other end reads.

If the other end is stopped, a full connection would look like a broken one. So at most `_WINDOW` bytes of output and
results are sent without an acknowledgement. Further data waits in the queue and in the ranks' pipes.
"""

from __future__ import annotations

import os
from collections import deque
from typing import Any, NamedTuple

from parawrap.launch.messages._channel import Channel

__all__ = ["SendQueue"]

_WINDOW = 1 << 17  # unacknowledged bytes; small enough for the connection's buffers
_PIECE = 1 << 16


class _Item(NamedTuple):
    """A message, or the last `size` bytes of a file, sent in pieces. `size` counts against the window."""

    word: str
    body: Any
    size: int = 0
    file: int | None = None


class SendQueue:
    """The outgoing messages of one connection. Used by one thread."""

    def __init__(self, wire: Channel) -> None:
        self._wire = wire
        self._items: deque[_Item] = deque()
        self._unacknowledged = 0
        self.is_broken = False

    @property
    def is_full(self) -> bool:
        """True if messages are queued, so the next one would wait."""
        return bool(self._items)

    def send(self, word: str, body: Any, size: int = 0) -> None:
        """Send a message after the queued ones. A message with a size waits until the window has room."""
        if not self.is_broken:
            self._items.append(_Item(word, body, size))
            self._flush()

    def send_file(self, rank: int, file: int) -> None:
        """Send a file in pieces, then close it."""
        if self.is_broken:
            os.close(file)
        else:
            self._items.append(_Item("piece", rank, os.fstat(file).st_size, file))
            self._flush()

    def acknowledge(self, size: int) -> None:
        """Note that the other end has read this many bytes."""
        self._unacknowledged -= size
        self._flush()

    def close(self) -> None:
        """Drop all queued messages and stop sending."""
        self.is_broken = True
        for item in self._items:
            if item.file is not None:
                os.close(item.file)
        self._items.clear()

    def _flush(self) -> None:
        while self._items and not self.is_broken and (self._items[0].size == 0 or self._unacknowledged < _WINDOW):
            item = self._items.popleft()
            if item.file is not None:
                item = self._next_piece(item, item.file)
            self._unacknowledged += item.size
            if not self._wire.send(item.word, item.body):
                self.close()  # part of the message may have been sent

    def _next_piece(self, item: _Item, file: int) -> _Item:
        """Return the next piece of a file, and put the rest of the file back at the front of the queue."""
        start = os.fstat(file).st_size - item.size
        data = os.pread(file, _PIECE, start)
        if len(data) < item.size:
            self._items.appendleft(item._replace(size=item.size - len(data)))
        else:
            os.close(file)
        return _Item("piece", (item.body, data), len(data))
