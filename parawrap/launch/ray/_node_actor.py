"""The Ray actor of a node.

The actor starts the server, which is the process that forks the node's ranks. It connects the ranks
to the launching process.

Ray pickles this file by value and runs it with the Python of the node, so it imports nothing of
parawrap. Nor does it import torch, which takes more than a second: only the server needs it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

CONNECTIONS = 5
"""The connections of a rank: its status, data, control, standard output, and standard error."""

RANK_BYTES = 4
"""The bytes of the number of a rank, after the token in the first message of a connection."""

_CONNECT_S = 30.0  # the launching process answers at once, unless the network is down
_PROGRAM = """
import gc, os, socket, sys
# Ray kills the children of an actor that ends. A grandchild stays: the server must end the ranks
if os.fork():
    os._exit(0)
gc.disable()  # until the server freezes what it has imported, so that forks share the memory
sys.path[:] = {path!r}
try:
    from parawrap.processes.fork_server import serve
except BaseException as error:
    text = f"{{socket.gethostname()}}: {{sys.executable}} cannot import parawrap: {{error!r}}"
    os.write(1, text.encode())
    os._exit(1)
os.write(1, b"ready\\n")
serve(["parawrap.launch.set_up"])  # the end of its standard output tells the actor of its end
"""


class NodeActor:
    """The actor of one node.

    If it ends, its server ends the ranks. `threads` is the number of CPUs per rank.
    """

    def __init__(self, threads: int) -> None:
        # The end of the actor, and that of the server. The server reads requests to fork from its
        # standard input, and ends when the actor's end is closed
        self._requests, of_server = socket.socketpair()
        # "" in the path is the working folder, which differs in the server. `Path("")` is "."
        path = [os.path.abspath(each) for each in sys.path]  # noqa: PTH100
        with of_server:
            server = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM.format(path=path)],
                stdin=of_server.fileno(),
                stdout=subprocess.PIPE,
                # Ray sets the variable to the CPUs of the whole actor
                env={**os.environ, "OMP_NUM_THREADS": str(threads)},
                start_new_session=True,
                cwd="/",  # imports fail in a working folder that was deleted
            )
        self._output: Any = server.stdout

    def started(self) -> tuple[str, str, str]:
        """Wait for the server.

        Return the hostname of the node, its address, and the reason if the server cannot start,
        otherwise an empty text.
        """
        ray: Any = importlib.import_module("ray")  # of the node
        line = self._output.readline().decode()
        failure = line or "its server ended"
        if line == "ready\n":
            failure = ""
        return socket.gethostname(), str(ray.util.get_node_ip_address()), failure

    def start(self, address: tuple[str, int], token: bytes, ranks: Sequence[int]) -> None:
        """Start ranks that are connected to the launching process at this address."""
        for rank in ranks:
            connections = []
            for kind in range(CONNECTIONS):
                connection = socket.create_connection(address, _CONNECT_S)
                connection.settimeout(None)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                hello = token + rank.to_bytes(RANK_BYTES, "little") + bytes([kind])
                connection.sendall(hello)
                connections.append(connection)
            # Request the server to fork a rank with duplicates of the connections. b"f" is FORK of
            # `fork_server.py`, which this file cannot import
            socket.send_fds(self._requests, [b"f"], [each.fileno() for each in connections])
            for each in connections:
                each.close()

    def kill(self, pid: int) -> None:
        """Kill a rank and its process group."""
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(pid, signal.SIGKILL)

    def stay(self) -> None:
        """Block until the actor ends. The call of the launching process then raises an error."""
        threading.Event().wait()

    def close(self) -> None:
        """End the server, and wait until it has ended its ranks."""
        self._requests.close()
        self._output.read()  # until the server has closed it, at its end
