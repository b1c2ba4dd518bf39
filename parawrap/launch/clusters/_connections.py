"""Connections between the machines of a launch. The supervising machine listens (the front), and the nodes call it.

A machine may have several addresses, and some of them do not work from other machines: a hostname may resolve to the
loopback interface, and container bridges have the same address on every host. So the front offers all of its addresses. A
node uses the first address where the front of its launch answers.

Both sides prove that they hold the launch's token, which itself is never sent:

    front:   a random nonce
    caller:  its own nonce, and HMAC(token, "caller", both nonces)
    front:   HMAC(token, "front", both nonces)

Messages are authenticated with keys derived from the token and both nonces, one per direction. They are not encrypted.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hmac
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass

from parawrap.launch.messages._channel import Channel, Keys, close_in_forked_children
from parawrap.launch.rank._process_groups import LOOPBACK

__all__ = ["Address", "Front", "dial", "interface_of", "own_addresses"]

_NONCE_BYTES = _CODE_BYTES = 32
_DIAL_S = 3.0  # to connect to one address and authenticate
_REDIAL_S = 0.5
_MOST_CALLERS = 256
_ADMITTED_AT_ONCE = 32
_MESSAGE_S = 10.0  # to send or receive one message
_SIOCGIFADDR = 0x8915
_BACKLOG = 4096
_BUFFER = 1 << 20  # the kernel may allow less; its default of 208 KiB is enough
# A machine without power does not close its connections. So the kernel probes a silent connection, first after _SILENCE_S,
# then every _PROBE_S, and breaks it after _PROBES unanswered probes. The machine of a stopped process answers probes.
_SILENCE_S, _PROBE_S, _PROBES = 5, 5, 3


@dataclass(frozen=True)
class Address:
    """Where the front of a launch listens.

    Attributes:
        hosts: Numeric addresses. Each node may reach a different one.
        port: The port, the same at every address.
        token: The secret of the launch, which both sides prove to hold.
    """

    hosts: tuple[str, ...]
    port: int
    token: bytes


class Front:
    """The listening port for the nodes of a launch, open until all have connected. Used by one thread.

    Callers are served concurrently, so a silent caller does not delay others. At most `_MOST_CALLERS` wait at a time, for
    at most `_DIAL_S` seconds each. So a flood of callers takes a bounded number of descriptors and bytes.

    Args:
        hosts: The addresses offered to nodes. With the loopback address alone, only this machine can connect.
        token: The secret of the launch.

    Raises:
        OSError: If no port can be opened.
    """

    def __init__(self, hosts: Sequence[str], token: bytes) -> None:
        self._callers: dict[socket.socket, _Caller] = {}  # the oldest first
        self._selector = selectors.DefaultSelector()
        self._listener = _socket()
        self._listener.bind((LOOPBACK if list(hosts) == [LOOPBACK] else "", 0))
        self._listener.listen(_BACKLOG)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self.address = Address(tuple(hosts), self._listener.getsockname()[1], token)
        close_in_forked_children(self)

    def accept(self, patience_s: float) -> Channel | None:
        """Return the connection to the next authenticated node, or None if no node connects within `patience_s` seconds."""
        until = time.monotonic() + patience_s
        while True:
            next_look = min([until, *(caller.until for caller in self._callers.values())])
            ready = [key.fileobj for key, _ in self._selector.select(max(0.0, next_look - time.monotonic()))]
            for line in [each for each in self._callers if each in ready]:
                if (wire := self._read(line)) is not None:
                    return wire
            if self._listener in ready:
                self._admit()
            self._drop_late()
            if time.monotonic() >= until:
                return None

    def close(self) -> None:
        """Stop listening and drop callers that are not authenticated."""
        for line in (self._listener, *self._callers):
            line.close()
        self._selector.close()

    def _read(self, line: socket.socket) -> Channel | None:
        """Read from a caller. Return the connection once it is authenticated. Drop a caller with a wrong answer."""
        with contextlib.suppress(OSError, EOFError):
            keys = self._callers[line].read()
            if keys is None:
                return None
            self._selector.unregister(line)
            del self._callers[line]
            return _wire_of(line, keys)
        self._drop(line)
        return None

    def _admit(self) -> None:
        """Accept some connections. The next round reads from them before it accepts more."""
        for _ in range(_ADMITTED_AT_ONCE):
            try:
                line, _ = self._listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    raise
                return  # no caller is waiting, or the caller is gone already
            line.setblocking(False)
            self._callers[line] = _Caller(line, self.address.token)
            self._selector.register(line, selectors.EVENT_READ)
            if len(self._callers) > _MOST_CALLERS:
                self._drop(next(iter(self._callers)))

    def _drop_late(self) -> None:
        now = time.monotonic()
        for line in [line for line, caller in self._callers.items() if caller.until < now]:
            self._drop(line)

    def _drop(self, line: socket.socket) -> None:
        self._selector.unregister(line)
        del self._callers[line]
        line.close()


class _Caller:
    """A caller that is not authenticated yet.

    Attributes:
        until: When the front drops the caller, by the monotonic clock.
    """

    def __init__(self, line: socket.socket, token: bytes) -> None:
        self.until = time.monotonic() + _DIAL_S
        self._line = line
        self._token = token
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._answer = b""
        with contextlib.suppress(OSError):  # if sending fails, `read` fails too
            line.sendall(self._nonce)

    def read(self) -> Keys | None:
        """Read more of the caller's answer. Return None until it is complete, then the keys.

        Raises:
            OSError: If the answer is wrong or the connection is broken.
            EOFError: If the caller closed the connection.
        """
        piece = self._line.recv(_NONCE_BYTES + _CODE_BYTES - len(self._answer))
        if not piece:
            raise EOFError
        self._answer += piece
        if len(self._answer) < _NONCE_BYTES + _CODE_BYTES:
            return None
        nonces = self._nonce + self._answer[:_NONCE_BYTES]
        _check(self._answer[_NONCE_BYTES:], self._token, b"caller", nonces)
        self._line.sendall(_code(self._token, b"front", nonces))
        return Keys(_code(self._token, b"from front", nonces), _code(self._token, b"from caller", nonces))


def dial(address: Address, patience_s: float = 0.0) -> Channel | None:
    """Connect to the front at the first address where it answers and proves to hold the token.

    Return None if no address works in time.

    Args:
        address: Where the front listens.
        patience_s: Seconds to keep trying. Each address is tried at least once.
    """
    until = time.monotonic() + patience_s
    while True:
        for host in address.hosts:
            with contextlib.suppress(OSError, EOFError):
                return _dialed(host, address)
        if time.monotonic() > until:
            return None
        time.sleep(_REDIAL_S)


def _dialed(host: str, address: Address) -> Channel:
    """Connect to the front at this host.

    Raises:
        OSError: If no front answers in time, or it does not hold the token.
        EOFError: If the other side closed the connection.
    """
    line, until = _socket(), time.monotonic() + _DIAL_S
    try:
        line.settimeout(_DIAL_S)
        line.connect((host, address.port))
        front_nonce = _receive(line, _NONCE_BYTES, until)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        nonces = front_nonce + nonce
        line.sendall(nonce + _code(address.token, b"caller", nonces))
        _check(_receive(line, _CODE_BYTES, until), address.token, b"front", nonces)
    except BaseException:
        line.close()
        raise
    return _wire_of(line, Keys(_code(address.token, b"from caller", nonces), _code(address.token, b"from front", nonces)))


def _receive(line: socket.socket, length: int, until: float) -> bytes:
    """Receive `length` bytes by the time `until` of the monotonic clock.

    Raises:
        OSError: If the bytes do not arrive in time.
        EOFError: If the connection ends first.
    """
    data = b""
    while len(data) < length:
        line.settimeout(max(0.001, until - time.monotonic()))
        piece = line.recv(length - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


def _code(token: bytes, purpose: bytes, nonces: bytes) -> bytes:
    return hmac.digest(token, purpose + nonces, "sha256")


def _check(code: bytes, token: bytes, purpose: bytes, nonces: bytes) -> None:
    """Check the other side's proof.

    Raises:
        PermissionError: If the proof is wrong.
    """
    if not hmac.compare_digest(code, _code(token, purpose, nonces)):
        raise PermissionError


def _socket() -> socket.socket:
    """Return a socket with a buffer for all unacknowledged bytes of a `SendQueue`. A full connection looks broken."""
    line = socket.socket()
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
    return line


def _wire_of(line: socket.socket, keys: Keys) -> Channel:
    line.settimeout(_MESSAGE_S)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):  # not on macOS
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENCE_S)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * (_SILENCE_S + _PROBE_S * _PROBES))
    wire = Channel(line, keys)
    close_in_forked_children(wire)
    return wire


def own_addresses() -> list[str]:
    """Return this machine's IPv4 addresses, the one of its hostname first. Return loopback only without other addresses."""
    found = [address for _, name in socket.if_nameindex() if (address := _address_of(name)) is not None]
    others = [address for address in found if not address.startswith("127.")]
    named = None
    with contextlib.suppress(OSError):
        named = socket.gethostbyname(socket.gethostname())
    return sorted(others, key=lambda address: address != named) or [LOOPBACK]


def interface_of(address: str) -> str | None:
    """Return the name of the network interface with this address."""
    return next((name for _, name in socket.if_nameindex() if _address_of(name) == address), None)


def _address_of(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return None
