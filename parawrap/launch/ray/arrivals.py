"""The TCP connections of ranks, which the actors of their nodes open.

A token, which Ray carries to the nodes, protects the port.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import time
from typing import Self

TOKEN_BYTES = 32
CONNECT_S = 60.0
"""Seconds for all connections of a rank to arrive; a guess that no test has contradicted."""

_HELLO_BYTES = TOKEN_BYTES + 5  # the token, the rank, and the kind of connection


class Arrivals:
    """The connections that arrive at a port. One thread uses it.

    Args:
        host: The address to listen on; empty for all.
        token: Stands at the beginning of each connection.
        kinds: The number of connections of each rank.
        world_size: The number of ranks.
    """

    def __init__(self, host: str, token: bytes, kinds: int, world_size: int) -> None:
        self._token = token
        self._kinds = kinds
        self._listener = socket.create_server((host, 0), backlog=kinds * world_size)
        self._arrived: dict[int, dict[int, socket.socket]] = {}

    @property
    def address(self) -> tuple[str, int]:
        """The host and port."""
        host, port = self._listener.getsockname()[:2]
        return host, port

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        for found in self._arrived.values():
            for connection in found.values():
                connection.close()

    def of_rank(self, rank: int) -> list[socket.socket]:
        """Wait for the connections of a rank, in the order of their kinds.

        Raises:
            TimeoutError: If they do not arrive in time.
        """
        until = time.monotonic() + CONNECT_S
        while len(self._arrived.get(rank, ())) < self._kinds:
            self._listener.settimeout(max(0.0, until - time.monotonic()))
            try:
                self._accept()
            except BlockingIOError as error:  # of a limit of no time
                raise TimeoutError from error
        arrived = self._arrived.pop(rank)
        return [arrived[kind] for kind in range(self._kinds)]

    def _accept(self) -> None:
        """Accept a connection. Close it if it does not begin with the token."""
        connection, _ = self._listener.accept()
        connection.settimeout(CONNECT_S)
        hello = b""
        with contextlib.suppress(OSError):
            while len(hello) < _HELLO_BYTES and (data := connection.recv(_HELLO_BYTES - len(hello))):
                hello += data
        if len(hello) < _HELLO_BYTES or not hmac.compare_digest(hello[:TOKEN_BYTES], self._token):
            connection.close()
            return
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        rank = int.from_bytes(hello[TOKEN_BYTES:-1], "little")
        self._arrived.setdefault(rank, {})[hello[-1]] = connection
