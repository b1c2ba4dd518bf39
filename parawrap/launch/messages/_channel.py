"""Messages between the launching process and its ranks, with open files attached.

A channel is one end of a socket. A message consists of a short word and a pickled body. On one machine, large bodies and
values are sent as attached files, so `send` does not wait for the reader. Any thread may send; one thread receives.

Unpickling can run any code. So a channel over a network has keys, and verifies a message's authentication code before it
unpickles the message.
"""

from __future__ import annotations

import fcntl
import hmac
import logging
import os
import pickle
import select
import socket
import struct
import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from parawrap.launch.messages._pickle_values import memory_file

__all__ = [
    "Channel",
    "Keys",
    "Message",
    "close_in_forked_children",
    "is_readable",
    "receive_exactly",
    "socket_at_standard_input",
]

_HEAD = struct.Struct("<QB?")  # the length of the body, the number of attached files, and if the last one holds the body
_LARGEST_BODY = 1 << 14  # larger ones are attached: a socket buffers about 200 KiB
_MOST_FILES = 8
_CODE_BYTES = 32
_log = logging.getLogger("parawrap.launch")

_kept_from_children: weakref.WeakSet[Any] = weakref.WeakSet()


class Message(NamedTuple):
    """One message. The receiver closes its files."""

    word: str
    body: Any
    files: tuple[int, ...]


class Keys(NamedTuple):
    """The secrets that authenticate messages at one end of a connection, one per direction."""

    sending: bytes
    receiving: bytes


class Channel:
    """One end of a connection between the launching process and a rank or node.

    Args:
        sock: The socket.
        keys: The secrets that authenticate messages. None for a socket pair, which only its two processes can access.
    """

    def __init__(self, sock: socket.socket, keys: Keys | None = None) -> None:
        self._socket = sock
        self._sending = threading.Lock()
        self._sent = _Authenticator(None if keys is None else keys.sending)
        self._received = _Authenticator(None if keys is None else keys.receiving)

    def fileno(self) -> int:
        """Return the socket's descriptor for selectors; -1 once closed."""
        return self._socket.fileno()

    def send(self, word: str, body: Any = None, files: Sequence[int] = ()) -> bool:
        """Send a message. Return False if the other end is closed."""
        data = pickle.dumps((word, body))
        if self._sent.size or len(data) <= _LARGEST_BODY:
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
                head += self._sent.code_of(head)
                data += self._sent.code_of(data)
                if files:
                    socket.send_fds(self._socket, [head], list(files))
                    head = b""
                self._socket.sendall(head + data)
            except OSError:
                return False
        return True

    def receive(self) -> Message | None:
        """Wait for the next message. Return None if the other end is closed or a message is not authentic."""
        files: list[int] = []
        try:
            size = _HEAD.size + self._received.size
            head, files, _, _ = socket.recv_fds(self._socket, size, _MOST_FILES)
            if not head:
                return None
            head += receive_exactly(self._socket, size - len(head))
            length, count, is_attached = _HEAD.unpack(self._authenticated(head))
            data = self._authenticated(receive_exactly(self._socket, length + self._received.size))
            if len(files) != count:  # the kernel dropped descriptors: this process has reached its limit on open files
                for file in files:
                    os.close(file)
                return Message("files lost", None, ())
            if is_attached:
                with os.fdopen(files.pop(), "rb") as attached:
                    attached.seek(0)
                    data = attached.read()
            word, body = pickle.loads(data)
        except (OSError, EOFError):
            for file in files:
                os.close(file)
            return None
        return Message(word, body, tuple(files))

    def _authenticated(self, received: bytes) -> bytes:
        """Return the bytes without the authentication code at their end.

        Raises:
            EOFError: If the code is wrong.
        """
        size = len(received) - self._received.size
        data, code = received[:size], received[size:]
        if not hmac.compare_digest(code, self._received.code_of(data)):
            _log.error("a message has a wrong authentication code, so it is not from this launch: the connection is closed")
            raise EOFError
        return data

    def addresses(self) -> tuple[str, str]:
        """Return the addresses of this end and of the other end of a network connection."""
        return self._socket.getsockname()[0], self._socket.getpeername()[0]

    def close(self) -> None:
        """Close the connection. The other end receives end of file."""
        self._socket.close()


class _Authenticator:
    """Computes authentication codes for one direction of a connection, in order.

    A code depends on its sequence number, so an old message cannot be replayed.

    Args:
        key: The secret for this direction. None gives empty codes.
    """

    def __init__(self, key: bytes | None) -> None:
        self.size = 0 if key is None else _CODE_BYTES
        self._key = key
        self._count = 0

    def code_of(self, data: bytes) -> bytes:
        """Return the code for the next bytes."""
        if self._key is None:
            return b""
        self._count += 1
        return hmac.digest(self._key, self._count.to_bytes(8, "little") + data, "sha256")


def is_readable(line: Channel | socket.socket | int, timeout_s: float) -> bool:
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
