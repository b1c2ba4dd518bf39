"""How the nodes of a launch find each other, and the line between them.

A machine may have several addresses, and not every other machine reaches all of them: names may mean the loopback
interface, and bridges of containers have the same address everywhere. So all are offered, and whoever dials takes the first
at which the right one answers.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from parawrap.launch.parcels._wire import Wire, close_in_forked_children, receive_exactly
from parawrap.launch.ranks._groups import LOOPBACK

__all__ = ["Address", "Front", "dial", "interface_of", "own_addresses"]

_TOKEN_BYTES = 32
_DIAL_S = 3.0
_LINE_S = 10.0  # who takes longer over one message is taken for dead
_SIOCGIFADDR = 0x8915
_BACKLOG = 4096
_ROOM = 1 << 20  # a kernel gives what it allows; 208 KiB by default, which will do
# A machine that has lost its power says nothing: it is lost when this many questions, that far apart, had no answer. For a
# process that is stopped, its machine answers.
_SILENCE_S, _QUESTION_S, _QUESTIONS = 5, 5, 3


@dataclass(frozen=True)
class Address:
    """Where a launch is watched, as its nodes are told.

    Attributes:
        hosts: numeric addresses, any of which may be the one that a node reaches.
        port: the same for all of them.
        token: what a caller has to know.
    """

    hosts: tuple[str, ...]
    port: int
    token: bytes


class Front:
    """Where nodes call; open until all have. Belongs to one thread.

    Args:
        hosts: the addresses that are offered; with loopback alone, nobody else can call.
        token: what a caller has to know.

    Raises:
        OSError: no port can be opened.
    """

    def __init__(self, hosts: Sequence[str], token: bytes) -> None:
        self._listener = _socket()
        self._listener.bind((LOOPBACK if list(hosts) == [LOOPBACK] else "", 0))
        self._listener.listen(_BACKLOG)
        self.address = Address(tuple(hosts), self._listener.getsockname()[1], token)
        close_in_forked_children(self)

    def accept(self, patience_s: float) -> Wire | None:
        """The line to the next node that calls and knows the token; None where none has within that time."""
        self._listener.settimeout(patience_s)
        try:
            line, _ = self._listener.accept()
        except TimeoutError:
            return None
        line.settimeout(_DIAL_S)
        with contextlib.suppress(OSError, EOFError):
            if hmac.compare_digest(receive_exactly(line, _TOKEN_BYTES), self.address.token):
                line.sendall(b"!")
                return _wire_of(line)
        line.close()
        return None

    def close(self) -> None:
        """Take no more calls."""
        self._listener.close()


def dial(address: Address) -> Wire | None:
    """The line to where the launch is watched, by the first way that leads there; None where none does."""
    for host in address.hosts:
        line = None
        try:
            line = _socket()
            line.settimeout(_DIAL_S)
            line.connect((host, address.port))
            line.sendall(address.token)
            if receive_exactly(line, 1) == b"!":
                return _wire_of(line)
        except (OSError, EOFError):
            pass
        if line is not None:
            line.close()
    return None


def _socket() -> socket.socket:
    """With room from the start for all that an `SendQueue` may have under way: a full line looks like a broken one."""
    line = socket.socket()
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _ROOM)
    return line


def _wire_of(line: socket.socket) -> Wire:
    line.settimeout(_LINE_S)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):  # not on macOS
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENCE_S)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _QUESTION_S)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _QUESTIONS)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * (_SILENCE_S + _QUESTION_S * _QUESTIONS))
    wire = Wire(line)
    close_in_forked_children(wire)
    return wire


def own_addresses() -> list[str]:
    """This machine's IPv4 addresses, that of its name first, without the loopback interface's."""
    found = [address for _, name in socket.if_nameindex() if (address := _address_of(name)) is not None]
    others = [address for address in found if not address.startswith("127.")]
    named = None
    with contextlib.suppress(OSError):
        named = socket.gethostbyname(socket.gethostname())
    return sorted(others, key=lambda address: address != named) or [LOOPBACK]


def interface_of(address: str) -> str | None:
    """The network interface with this address."""
    return next((name for _, name in socket.if_nameindex() if _address_of(name) == address), None)


def _address_of(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return None
