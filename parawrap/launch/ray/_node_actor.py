"""The Ray actor of a node.

It starts the process that forks the node's ranks, and connects them to the launching process.

Ray pickles this file by value and runs it with the Python of the node, so it imports nothing of
parawrap. Importing torch takes more than a second, and only the process that forks the ranks needs
it.
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
        # Our end, and the one of the server. The server reads requests to fork from its standard
        # input, and ends when our end is closed
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
                # Imports fail in a deleted working folder
                cwd="/",
            )
        self._output: Any = server.stdout

    def started(self) -> tuple[str, str, str]:
        """Wait for the server.

        Return the hostname and the address of the node, and why the server cannot start.
        """
        ray: Any = importlib.import_module("ray")  # of the node
        said = self._output.readline().decode()
        failure = said or "it ended"
        if said == "ready\n":
            failure = ""
        return socket.gethostname(), str(ray.util.get_node_ip_address()), failure

    def start(self, address: tuple[str, int], token: bytes, ranks: Sequence[int]) -> None:
        """Start ranks that are connected to the launching process at this address."""
        for rank in ranks:
            connections = [
                socket.create_connection(address, _CONNECT_S) for _ in range(CONNECTIONS)
            ]
            for kind, each in enumerate(connections):
                each.settimeout(None)
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                each.sendall(token + rank.to_bytes(4, "little") + bytes([kind]))
            # A request of the server: fork a rank with these connections. It gets duplicates. This
            # is FORK of `fork_server.py`, which this file cannot import
            socket.send_fds(self._requests, [b"f"], [each.fileno() for each in connections])
            for each in connections:
                each.close()

    def kill(self, pid: int) -> None:
        """Kill a rank and its process group."""
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(pid, signal.SIGKILL)

    def stay(self) -> None:
        """Block until the actor ends, so that the launching process learns of its end."""
        threading.Event().wait()

    def close(self) -> None:
        """End the server, and wait until it has ended its ranks."""
        self._requests.close()
        self._output.read()
