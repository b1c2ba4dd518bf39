"""The connections between ranks, and how they are broken."""

from __future__ import annotations

import socket
import struct
from contextlib import ExitStack, closing

from parawrap.launch.rank._process_connections import break_connections, connections_between, connections_here
from tests.helpers.waiting import eventually

RESETS = struct.pack("ii", 1, 0)  # of SO_LINGER


def test_breaking_what_others_break():
    """Two ranks break their connections at the same time. Each finds some that the other one has reset just now."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        near, far = [], []
        for _ in range(2):
            near.append(stack.enter_context(closing(socket.create_connection(server.getsockname()))))
            far.append(stack.enter_context(closing(server.accept()[0])))

        class Broken(set):
            def __contains__(self, ends):
                if ends == (near[0].getsockname(), server.getsockname()):
                    far[0].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESETS)
                    far[0].close()
                    eventually(lambda: near[0].getsockopt(socket.SOL_SOCKET, socket.SO_ERROR), "the reset")
                return super().__contains__(ends)

        break_connections(Broken(connections_between([connections_here()])))
        assert far[1].recv(1) == b""
