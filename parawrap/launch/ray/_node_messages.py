"""The messages between the launching process and the guard of a node, as one stream of bytes in each direction.

A message is a word and its values. It is pickled and follows its length.
"""

from __future__ import annotations

import pickle
import struct
from typing import Any

__all__ = ["Inbox", "pack_message"]

_LENGTH = struct.Struct("<Q")


def pack_message(word: str, *values: Any) -> bytes:
    """Return the bytes of a message."""
    data = pickle.dumps((word, values))
    return _LENGTH.pack(len(data)) + data


class Inbox:
    """Finds the messages in a stream of bytes. Used by one thread."""

    def __init__(self) -> None:
        self._received = bytearray()

    def take(self, data: bytes) -> list[tuple[str, tuple[Any, ...]]]:
        """Add the next bytes of the stream. Return the messages that are complete now."""
        self._received += data
        messages, start = [], 0
        with memoryview(self._received) as received:
            while len(received) - start >= _LENGTH.size:
                end = start + _LENGTH.size + _LENGTH.unpack_from(received, start)[0]
                if end > len(received):
                    break
                messages.append(pickle.loads(received[start + _LENGTH.size : end]))
                start = end
        del self._received[:start]
        return messages
