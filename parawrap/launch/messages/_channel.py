"""Messages between the launching process and its ranks, with open files attached.

A channel is one end of a socket pair, which only its two processes can access. A message consists of a short word and a
pickled body. Large bodies and values are sent as attached files, so `send` does not wait for the reader. Any thread may
send; one thread receives.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import select
import socket
import struct
import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from parawrap.launch.messages._pickle_values import memory_file

__all__ = [
    "Channel",
    "ChannelMessage",
    "close_in_forked_children",
    "is_readable",
    "receive_exactly",
    "socket_at_standard_input",
]

_HEAD = struct.Struct("<QB?")  # the length of the body, the number of attached files, and if the last one holds the body
_LARGEST_BODY = 1 << 14  # larger ones are attached: a socket buffers about 200 KiB
_MOST_FILES = 8  # the payload, the line of a rank, and an attached body need three

_kept_from_children: weakref.WeakSet[Any] = weakref.WeakSet()


class HasFileno(Protocol):
    """An object with an open file."""

    def fileno(self) -> int:
        """Return its descriptor."""
        ...


class ChannelMessage(NamedTuple):
    """One message. The receiver closes its files."""

    word: str
    body: Any
    files: tuple[int, ...]


class Channel:
    """One end of a connection between the launching process and a rank."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._sending = threading.Lock()

    def fileno(self) -> int:
        """Return the socket's descriptor for selectors; -1 once closed."""
        return self._socket.fileno()

    def send(self, word: str, body: Any = None, files: Sequence[int] = ()) -> bool:
        """Send a message. Return False if the other end is closed."""
        data = pickle.dumps((word, body))
        if len(data) <= _LARGEST_BODY:
            return self._send(data, files, is_attached=False)
        try:
            file = memory_file("message")
        except OSError:  # the limit on open files
            return self._send(data, files, is_attached=False)
        with os.fdopen(file, "wb", buffering=0) as attached:
            attached.write(data)
            return self._send(b"", [*files, file], is_attached=True)

    def _send(self, data: bytes, files: Sequence[int], *, is_attached: bool) -> bool:
        with self._sending:
            try:
                head = _HEAD.pack(len(data), len(files), is_attached)
                if files:
                    socket.send_fds(self._socket, [head], list(files))
                    head = b""
                self._socket.sendall(head + data)
            except OSError:
                return False
        return True

    def receive(self) -> ChannelMessage | None:
        """Wait for the next message. Return None if the other end is closed."""
        files: list[int] = []
        try:
            head, files, _, _ = socket.recv_fds(self._socket, _HEAD.size, _MOST_FILES)
            if not head:
                return None
            head += receive_exactly(self._socket, _HEAD.size - len(head))
            length, count, is_attached = _HEAD.unpack(head)
            data = receive_exactly(self._socket, length)
            if len(files) != count:  # the kernel dropped descriptors: this process has reached its limit on open files
                for file in files:
                    os.close(file)
                return ChannelMessage("files lost", None, ())
            if is_attached:
                with os.fdopen(files.pop(), "rb") as attached:
                    attached.seek(0)
                    data = attached.read()
            word, body = pickle.loads(data)
        except (OSError, EOFError):
            for file in files:
                os.close(file)
            return None
        return ChannelMessage(word, body, tuple(files))

    def close(self) -> None:
        """Close the connection. The other end receives end of file."""
        self._socket.close()


def is_readable(line: HasFileno | int, timeout_s: float) -> bool:
    """Wait for up to `timeout_s` seconds. Return True if data or end of file can be received."""
    poll = select.poll()  # select() is limited to descriptors below 1024
    poll.register(line, select.POLLIN)
    return bool(poll.poll(1000 * timeout_s))


def receive_exactly(sock: socket.socket, length: int) -> bytes:
    """Receive exactly `length` bytes.

    Raises:
        EOFError: If the connection ends first.
    """
    pieces = bytearray()
    while len(pieces) < length:
        piece = sock.recv(min(length - len(pieces), 1 << 20))
        if not piece:
            raise EOFError
        pieces += piece
    return bytes(pieces)


def socket_at_standard_input() -> socket.socket:
    """Return the socket that this process received as standard input. Replace standard input by ``/dev/null``.

    Also open ``/dev/null`` for closed output streams. The parent passes the socket as standard input because that is safe
    if the parent's own standard streams are closed: its sockets then have numbers from 0 to 2, which a child overwrites.
    """
    line = socket.socket(fileno=fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 3))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    for number in (1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.dup2(null, number)
    if null > 2:
        os.close(null)
    return line


def close_in_forked_children(closable: Any) -> None:
    """Close `closable` in processes that the user forks from this one.

    A forked child inherits all open connections. While it holds one, the rank at the other end cannot detect the death of
    the launching process.
    """
    _kept_from_children.add(closable)


def _close_kept() -> None:
    for closable in list(_kept_from_children):
        closable.close()
    _kept_from_children.clear()


os.register_at_fork(after_in_child=_close_kept)
