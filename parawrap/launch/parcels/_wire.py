"""Messages between a launch and its ranks, with open files attached.

A wire is one end of a socket. A message is a short word and a small picklable body; whatever is large travels in a file
whose descriptor is attached, where both ends are on one machine. Any thread may send; one thread receives.

Unpickling runs code, so a wire over a network has keys: it unpickles a message only after checking its authentication code.
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

__all__ = [
    "Keys",
    "Message",
    "Wire",
    "close_in_forked_children",
    "is_readable",
    "receive_exactly",
    "socket_at_standard_input",
]

_HEAD = struct.Struct("<QB")
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
    """The secrets that authenticate the messages of one end of a line, one for each direction."""

    sending: bytes
    receiving: bytes


class Wire:
    """One end of the line between a launch and a rank; lives as long as the rank, or until closed.

    Args:
        sock: The socket.
        keys: The secrets that authenticate messages. None for a socket pair, which only its two processes can reach.
    """

    def __init__(self, sock: socket.socket, keys: Keys | None = None) -> None:
        self._socket = sock
        self._sending = threading.Lock()
        self._sent = _Authenticator(None if keys is None else keys.sending)
        self._received = _Authenticator(None if keys is None else keys.receiving)

    def fileno(self) -> int:
        """For selectors; -1 once closed."""
        return self._socket.fileno()

    def send(self, word: str, body: Any = None, files: Sequence[int] = ()) -> bool:
        """Send a message. False if the other end is gone."""
        data = pickle.dumps((word, body))
        with self._sending:
            try:
                head = _HEAD.pack(len(data), len(files))
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
        """Wait for the next message. None at the end of the line, or if a message is not authentic."""
        files: list[int] = []
        try:
            size = _HEAD.size + self._received.size
            head, files, _, _ = socket.recv_fds(self._socket, size, _MOST_FILES)
            if not head:
                return None
            head += receive_exactly(self._socket, size - len(head))
            length, count = _HEAD.unpack(self._authenticated(head))
            word, body = pickle.loads(self._authenticated(receive_exactly(self._socket, length + self._received.size)))
            if len(files) != count:  # the kernel dropped them: this process has reached its limit of open files
                for file in files:
                    os.close(file)
                return Message("files lost", None, ())
        except (OSError, EOFError):
            for file in files:
                os.close(file)
            return None
        return Message(word, body, tuple(files))

    def _authenticated(self, received: bytes) -> bytes:
        """Return the bytes without the code that follows them.

        Raises:
            EOFError: If the code is wrong.
        """
        size = len(received) - self._received.size
        data, code = received[:size], received[size:]
        if not hmac.compare_digest(code, self._received.code_of(data)):
            _log.error("a message has a wrong authentication code, so it is not from this launch: the line is closed")
            raise EOFError
        return data

    def addresses(self) -> tuple[str, str]:
        """Those of this end and of the other, where the line goes over a network."""
        return self._socket.getsockname()[0], self._socket.getpeername()[0]

    def close(self) -> None:
        """Hang up; the other end sees the end of the line."""
        self._socket.close()


class _Authenticator:
    """Computes the codes of what goes one way along a line, in order. A code depends on its number, so none can be reused.

    Args:
        key: The secret of this direction. None gives empty codes.
    """

    def __init__(self, key: bytes | None) -> None:
        self.size = 0 if key is None else _CODE_BYTES
        self._key = key
        self._count = 0

    def code_of(self, data: bytes) -> bytes:
        """Return the code of the next bytes."""
        if self._key is None:
            return b""
        self._count += 1
        return hmac.digest(self._key, self._count.to_bytes(8, "little") + data, "sha256")


def is_readable(line: Wire | socket.socket | int, timeout_s: float) -> bool:
    """Whether something, or the end of the line, is there to be received; waits for it as long as asked.

    Not by ``select``, which knows no descriptors beyond 1023.
    """
    poll = select.poll()
    poll.register(line, select.POLLIN)
    return bool(poll.poll(1000 * timeout_s))


def receive_exactly(sock: socket.socket, length: int) -> bytes:
    """That many bytes, however many pieces they come in.

    Raises:
        EOFError: the line ended before.
    """
    pieces = bytearray()
    while len(pieces) < length:
        piece = sock.recv(min(length - len(pieces), 1 << 20))
        if not piece:
            raise EOFError
        pieces += piece
    return bytes(pieces)


def socket_at_standard_input() -> socket.socket:
    """The socket that a fresh process was given as standard input. 0, 1 and 2 are what they should be afterwards.

    A line is handed over this way because it works whatever its number is in the parent: one whose standard streams are
    closed gives low numbers to its sockets, which would be overwritten on their way as any other file.
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
    """Close this in processes that the user forks from this one.

    A forked child holds every open line too: with one of them alive, ranks would not see that their launch is gone.
    """
    _kept_from_children.add(closable)


def _close_kept() -> None:
    for closable in list(_kept_from_children):
        closable.close()
    _kept_from_children.clear()


os.register_at_fork(after_in_child=_close_kept)
