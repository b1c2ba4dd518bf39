"""The agent on a cluster node: it starts the node's ranks for the supervising process and reports on them.

If the connection to the supervising process breaks, the ranks end within ``grace_s``.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from parawrap.errors import LaunchError
from parawrap.launch.clusters._connections import interface_of
from parawrap.launch.clusters._send_queue import SendQueue
from parawrap.launch.coordinator._event_loop import Loop
from parawrap.launch.guard._guard import LocalGuard
from parawrap.launch.guard._start_methods import Starter
from parawrap.launch.messages._channel import Channel
from parawrap.launch.messages._first_rank_failure import Parcel
from parawrap.launch.rank._rank_assignment import Assignment

__all__ = ["NodeAgent"]

_LONGEST_TURN_S = 1.0  # an interrupt of this process is handled within this time
_NEVER = float("inf")


class NodeAgent:
    """Runs this machine's ranks for the process at the other end of a connection, until the connection closes.

    Args:
        wire: The connection.
        number: The node's number.
        starter: Starts the processes.
        payload: The file of the pickled call.
        grace_s: Seconds for ranks to clean up after the connection breaks.
        path_of: Returns the path for a rank's parcel in a shared folder. None sends parcels through the connection.
    """

    def __init__(
        self,
        wire: Channel,
        number: int,
        starter: Starter,
        payload: int,
        grace_s: float,
        path_of: Callable[[int], Path] | None = None,
    ) -> None:
        self._wire = wire
        self._grace_s = grace_s
        self._path_of = path_of
        self._loop = Loop()
        self._node = LocalGuard(self._loop, starter, payload)
        self._queue = SendQueue(wire)
        self._running: set[int] = set()
        self._started = 0
        self._reported_over = 0
        self._kill_at = _NEVER
        self._is_connected = True
        self._loop.watch(wire, self._on_message)
        self._queue.send("hello", (number, socket.gethostname()))

    def run(self) -> None:
        """Run until the connection is closed and the last rank has ended."""
        try:
            while self._is_connected or not self._node.is_over:
                self._loop.turn(min(self._kill_at - time.monotonic(), _LONGEST_TURN_S))
                self._update_line()
                if time.monotonic() >= self._kill_at:
                    self._kill_at = _NEVER
                    for rank in self._running:
                        self._node.kill(rank)
        finally:
            self._node.close()
            self._queue.close()
            self._loop.close()
            self._wire.close()

    def _update_line(self) -> None:
        if self._queue.is_broken and self._is_connected:
            self._disconnect()
        if self._node.is_over and self._reported_over != self._started:
            self._reported_over = self._started
            self._queue.send("over", self._started)
        self._node.listen(not self._queue.is_full)

    def _disconnect(self) -> None:
        self._is_connected = False
        self._loop.forget(self._wire)
        self._queue.close()
        self._kill_at = time.monotonic() + self._grace_s
        for rank in self._running:
            self._node.send(rank, "end")

    # -- messages from the supervising process

    def _on_message(self) -> None:
        message = self._wire.receive()
        if message is None:
            self._disconnect()
        elif message.word == "start":
            self._start(message.body)
        elif message.word == "received":
            self._queue.acknowledge(message.body)
        elif message.word == "send":
            self._node.send(*message.body)
        else:
            self._node.kill(message.body)

    def _start(self, orders: Assignment) -> None:
        self._started += 1
        rank = orders.place.global_rank
        self._running.add(rank)
        try:
            self._node.start(self._localized(orders), self)
        except (LaunchError, OSError) as error:
            self._queue.send("trouble", f"the process of rank {rank} cannot be started: {error}")
            self.on_end(rank, None)

    def _localized(self, orders: Assignment) -> Assignment:
        """Fill in the supervisor's address and the network interface, as this node's connection uses them."""
        here, there = self._wire.addresses()
        meeting = orders.meeting
        if meeting is not None and meeting.host is not None:
            meeting = replace(meeting, host=there)
        return replace(orders, meeting=meeting, interface=interface_of(here))

    # -- events of ranks

    def on_start(self, rank: int, pid: int) -> None:
        self._queue.send("started", (rank, pid))

    def on_output(self, rank: int, stream: int, data: bytes) -> None:
        self._queue.send("output", (rank, stream, data), len(data))

    def on_word(self, rank: int, word: str, body: Any, file: int | Path | None) -> None:
        if word == "alive" and self._queue.is_full:
            return
        if isinstance(file, int) and self._path_of is not None:
            path = self._path_of(rank)
            try:
                Parcel(file).put(path)
            except OSError as error:
                msg = (
                    f"the value that rank {rank} {word} cannot be written to {path.parent}: {error}; free some space there"
                )
                self._queue.send("trouble", msg)
                self.on_end(rank, None)  # reported before the exit code, which would look like a death of the rank
                return
            file = path
        elif isinstance(file, int):
            self._queue.send_file(rank, file)
            file = None
        self._queue.send("word", (rank, word, body, file))

    def on_end(self, rank: int, code: int | None, lost_with: str = "") -> None:
        self._running.discard(rank)
        self._queue.send("end", (rank, code))

    def on_trouble(self, what: str) -> None:
        self._queue.send("trouble", what)
