"""Messages between two processes: a word, a small body, a packed value, and open files, over one end of a socket pair.

A value of up to 32 KiB travels in the socket. On one machine, a larger one is a memory file, which any number of receivers
map without a copy. One thread receives at a time; any thread may send.
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from parawrap.processes.pickling import Packed, map_file

_HEAD = struct.Struct("<IQB?")  # bytes of the body, bytes of the value, number of files, True if the last file is the value
_LARGEST_INLINE = 32 << 10  # a socket buffers about 200 KiB, so that a send does not wait for the receiver
_MOST_FILES = 8  # a rank gets four, and a value is one more

_kept_from_children: weakref.WeakSet[Any] = weakref.WeakSet()


class Message(NamedTuple):
    """One message. The receiver closes its files."""

    word: str
    body: Any
    value: memoryview | None
    files: tuple[int, ...]


class Wire:
    """One end of a connection between two processes. Processes that the user forks from this one do not keep it open."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(None)  # whatever socket.setdefaulttimeout says
        self._socket = sock
        self._carries_files = sock.family == socket.AF_UNIX
        self._sending = threading.Lock()
        close_in_forked_children(self)

    def fileno(self) -> int:
        """Return the socket's descriptor for selectors; -1 once closed."""
        return self._socket.fileno()

    def send(self, word: str, body: Any = None, value: Packed | None = None, files: Sequence[int] = ()) -> bool:
        """Send a message. Return False if the other end is closed."""
        pickled, parts, size = pickle.dumps((word, body), 5), [], 0
        is_file = value is not None and self._carries_files and value.size > _LARGEST_INLINE
        if value is not None and is_file:
            files = (*files, value.file())
        elif value is not None:
            parts, size = value.parts, value.size
        parts = [_HEAD.pack(len(pickled), size, len(files), is_file), pickled, *parts]
        try:
            with self._sending:
                if size > _LARGEST_INLINE:
                    for part in parts:
                        self._socket.sendall(part)
                else:
                    _send_all(self._socket, b"".join(parts), files)
        except OSError:
            return False
        return True

    def receive(self) -> Message | None:
        """Wait for the next message. Return None if the other end is closed."""
        files: list[int] = []
        try:
            if self._carries_files:
                head, files, _, _ = socket.recv_fds(self._socket, _HEAD.size, _MOST_FILES)
            else:
                head = self._socket.recv(_HEAD.size)
            if not head:
                return None
            head += _receive_exactly(self._socket, _HEAD.size - len(head))
            body_size, size, count, is_file = _HEAD.unpack(head)
            if len(files) != count:  # the kernel dropped descriptors: this process has reached its limit on open files
                msg = f"{count - len(files)} files of a message are missing"
                raise OSError(msg)
            word, body = pickle.loads(_receive_exactly(self._socket, body_size))
            value = memoryview(_receive_exactly(self._socket, size)) if size else None
            if is_file:
                value = map_file(files[-1])
                os.close(files.pop())
        except (OSError, EOFError):
            for file in files:
                os.close(file)
            return None
        return Message(word, body, value, tuple(files))

    def close(self) -> None:
        """Close the connection. The other end receives end of file."""
        self._socket.close()


def _send_all(sock: socket.socket, data: bytes, files: Sequence[int]) -> None:
    sent = socket.send_fds(sock, [data], files) if files else sock.send(data)
    if sent < len(data):
        sock.sendall(memoryview(data)[sent:])


def _receive_exactly(sock: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view, end = memoryview(data), 0
    while end < size:
        count = sock.recv_into(view[end:])
        if not count:
            raise EOFError
        end += count
    return data


def close_in_forked_children(closable: Any) -> None:
    """Close `closable` in processes that the user forks from this one.

    A forked child inherits all open connections. While it holds one, the other end cannot detect the death of this process.
    """
    _kept_from_children.add(closable)


def _close_kept() -> None:
    for closable in list(_kept_from_children):
        closable.close()
    _kept_from_children.clear()


os.register_at_fork(after_in_child=_close_kept)
