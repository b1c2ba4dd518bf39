"""Messages between a launch and its ranks, with open files attached.

A wire is one end of a socket. A message is a short word and a small picklable body; whatever is large travels in a file
whose descriptor is attached, where both ends are on one machine. Any thread may send; one thread receives.
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
from typing import Any, NamedTuple

__all__ = ["Message", "Wire", "close_in_forked_children", "is_readable", "line_at_standard_input", "receive_exactly"]

_HEAD = struct.Struct("<QB")
_MOST_FILES = 8

_kept_from_children: weakref.WeakSet[Any] = weakref.WeakSet()


class Message(NamedTuple):
    """One message, as it arrived; whoever takes it closes the files."""

    word: str
    body: Any
    files: tuple[int, ...]


class Wire:
    """One end of the line between a launch and a rank; lives as long as the rank, or until closed."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._sending = threading.Lock()

    def fileno(self) -> int:
        """For selectors; -1 once closed."""
        return self._socket.fileno()

    def send(self, word: str, body: Any = None, files: Sequence[int] = ()) -> bool:
        """Send a message; False where nobody is left at the other end to take it."""
        data = pickle.dumps((word, body))
        with self._sending:
            try:
                head = _HEAD.pack(len(data), len(files))
                if files:
                    socket.send_fds(self._socket, [head], list(files))
                    head = b""
                self._socket.sendall(head + data)
            except OSError:
                return False
        return True

    def receive(self) -> Message | None:
        """Wait for the next message; None at the end of the line."""
        files: list[int] = []
        try:
            head, files, _, _ = socket.recv_fds(self._socket, _HEAD.size, _MOST_FILES)
            if not head:
                return None
            length, count = _HEAD.unpack(head + receive_exactly(self._socket, _HEAD.size - len(head)))
            word, body = pickle.loads(receive_exactly(self._socket, length))
            if len(files) != count:  # the kernel dropped them: this process has reached its limit of open files
                for file in files:
                    os.close(file)
                return Message("files lost", None, ())
        except (OSError, EOFError):
            for file in files:
                os.close(file)
            return None
        return Message(word, body, tuple(files))

    def addresses(self) -> tuple[str, str]:
        """Those of this end and of the other, where the line goes over a network."""
        return self._socket.getsockname()[0], self._socket.getpeername()[0]

    def close(self) -> None:
        """Hang up; the other end sees the end of the line."""
        self._socket.close()


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


def line_at_standard_input() -> socket.socket:
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
