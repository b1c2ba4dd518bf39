"""The Ray actor of a node. It starts the node's guard process, and passes bytes between it and the launching process.

Ray pickles this file by value and runs it with the Python of the node, so it imports nothing of parawrap. Importing torch
takes more than a second. So only the guard process imports it, and the ranks are forked from there.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

__all__ = ["CONCURRENCY", "NodeActor", "address_of_node"]

CONCURRENCY = {"events": 1, "acknowledgements": 1}
"""Ray runs the methods of each group, and the other methods, in a thread of their own and in order of arrival."""

_PIECE = 2 << 20  # bytes of one item of Ray's generator
_UNREAD_PIECES = 4  # so at most 8 MiB of a node wait in the object store
_MUCH = 1 << 16  # if so many bytes arrive at once, more will follow soon, and one object for all of them is cheaper
_SOON_S = 0.002  # the next piece of a large value follows at once

# The guard's interpreter. It reports a failed import as a message of `_node_messages`. Garbage collection is off during the
# imports, because it would take a sixth of the time to import torch. The guard turns it on.
_PROGRAM = """
import gc, sys
gc.disable()
sys.path[:] = {path!r}
try:
    from parawrap.launch.ray._guard_process import guard_node
except BaseException as error:
    import os, pickle, socket
    text = f"{{socket.gethostname()}}: {{sys.executable}} cannot import parawrap: {{error!r}}"
    data = pickle.dumps(("unable", (text,)))
    os.write(0, len(data).to_bytes(8, "little") + data)
    os._exit(1)
guard_node({arguments})
"""


class NodeActor:
    """The actor of one node. When it ends, its guard process ends the ranks.

    Args:
        payload: The pickled call.
        spawn_method: The platform's ``spawn_method``.
        grace_s: Seconds for ranks to clean up after the death of this process.
        threads: The number of CPUs per rank.
    """

    def __init__(self, payload: bytes, spawn_method: str, grace_s: float, threads: int) -> None:
        import ray  # of the node

        self._unread = threading.Semaphore(_UNREAD_PIECES)
        self._line, its = socket.socketpair()
        path = [os.path.abspath(each) for each in sys.path]  # noqa: PTH100 (Path resolves "" to ".")
        with its, tempfile.TemporaryFile() as call:
            call.write(payload)
            call.flush()
            arguments = f"{call.fileno()}, {spawn_method!r}, {grace_s!r}, {address_of_node(ray)!r}"
            self._guard = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM.format(path=path, arguments=arguments)],
                stdin=its.fileno(),
                pass_fds=[call.fileno()],
                env={**os.environ, "OMP_NUM_THREADS": str(threads)},  # Ray sets it to the CPUs of the whole actor
                start_new_session=True,
                cwd="/",  # imports fail in a deleted working folder
            )

    def events(self) -> Iterator[bytes]:
        """Return the bytes from the guard, until it ends. Wait while the launching process has not read the last ones."""
        while self._unread.acquire() and (data := self._line.recv(_PIECE)):
            pieces = [data]
            while len(data) >= _MUCH and (room := _PIECE - sum(map(len, pieces))) and self._is_readable_soon():
                data = self._line.recv(room)
                pieces.append(data)
            yield b"".join(pieces)

    def _is_readable_soon(self) -> bool:
        poll = select.poll()  # select() is limited to descriptors below 1024
        poll.register(self._line, select.POLLIN)
        return bool(poll.poll(1000 * _SOON_S))

    def acknowledge(self) -> None:
        """Note that the launching process has read a piece of `events`."""
        self._unread.release()

    def send(self, data: bytes) -> None:
        """Send bytes to the guard."""
        with contextlib.suppress(OSError):  # it has ended, which `events` shows
            self._line.sendall(data)

    def close(self) -> None:
        """Wait until the guard has ended."""
        self._guard.wait()


def address_of_node(ray: Any) -> str:
    """Return the address of this process's node, where the other nodes of the cluster reach it."""
    here = ray.get_runtime_context().get_node_id()
    return next(str(node["NodeManagerAddress"]) for node in ray.nodes() if node["NodeID"] == here)
