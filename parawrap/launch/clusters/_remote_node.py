"""The supervising process's view of a node on another machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from parawrap.errors import LaunchError
from parawrap.launch.clusters._connections import Front
from parawrap.launch.coordinator._event_loop import Loop
from parawrap.launch.guard._guard import Watcher
from parawrap.launch.messages._channel import Channel
from parawrap.launch.messages._pickle_values import memory_file
from parawrap.launch.rank._rank_assignment import Assignment

__all__ = ["ARRIVAL_S", "RemoteNode", "await_nodes"]

ARRIVAL_S = 300.0
"""Seconds for the nodes of a launch to connect after their agents were started."""

_LOOK_S = 0.2
_ACKNOWLEDGED_AT_ONCE = 1 << 15
_LOST = "its node, which no longer answers"


class RemoteNode:
    """The ranks of another machine, which a `NodeAgent` starts there. Used by the thread of its loop.

    If the connection breaks or the machine stops answering, the node and its ranks are lost.

    Args:
        loop: The loop that waits for the node's messages.
        wire: The connection to the node's agent.
        number: The node's number.
        host: The node's hostname.
    """

    def __init__(self, loop: Loop, wire: Channel, number: int, host: str) -> None:
        self.host = host
        self._loop = loop
        self._wire = wire
        self._number = number
        self._watchers: dict[int, Watcher] = {}
        self._files: dict[int, int] = {}
        self._started = 0
        self._over = 0
        self._unacknowledged = 0
        loop.watch(wire, self._on_message)

    @property
    def is_over(self) -> bool:
        return self._over == self._started or self.is_lost

    @property
    def is_lost(self) -> bool:
        return self._wire.fileno() < 0

    def start(self, assignment: Assignment, watcher: Watcher) -> None:
        """Start a rank on the node. If the node is lost already, report the rank as lost."""
        rank = assignment.place.global_rank
        self._watchers[rank] = watcher
        self._started += 1
        if not self._send("start", assignment):
            self._end(rank, None, _LOST)

    def send(self, rank: int, word: str, body: Any = None) -> None:
        if rank in self._watchers:
            self._send("send", (rank, word, body))

    def kill(self, rank: int) -> None:
        if rank in self._watchers:
            self._send("kill", rank)

    def look(self) -> float:
        return float("inf")

    def give_up(self) -> None:
        if not self.is_over:
            self._lose()

    def close(self) -> None:
        """Close the connection. The agent then ends the ranks that still run."""
        if not self.is_lost:
            self._loop.forget(self._wire)
            self._wire.close()
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def _send(self, word: str, body: Any) -> bool:
        """Send a message. If that fails, the node is lost: part of the message may have been sent."""
        if not self.is_lost and not self._wire.send(word, body):
            self._loop.call_soon(self._lose)
        return not self.is_lost

    def _lose(self) -> None:
        self.close()
        for rank in list(self._watchers):
            self._end(rank, None, _LOST)

    def _end(self, rank: int, code: int | None, lost_with: str = "") -> None:
        self._watchers.pop(rank).on_end(rank, code, lost_with)

    def _on_message(self) -> None:
        message = self._wire.receive()
        if message is None:
            self._lose()
        elif message.word == "over":
            self._over = message.body
        elif message.word == "trouble":
            for watcher in set(self._watchers.values()):
                watcher.on_trouble(f"on node {self._number} ({self.host}), {message.body}")
        else:
            self._on_rank(message.word, *message.body)

    def _on_rank(self, word: str, rank: int, *body: Any) -> None:
        if rank not in self._watchers:
            return
        watcher = self._watchers[rank]
        if word == "started":
            watcher.on_start(rank, *body)
        elif word == "output":
            watcher.on_output(rank, *body)
            self._acknowledge(len(body[1]))
        elif word == "piece":
            self._append_piece(rank, *body)
        elif word == "word":
            watcher.on_word(rank, body[0], body[1], body[2] or self._files.pop(rank, None))
        else:
            self._end(rank, *body)

    def _append_piece(self, rank: int, data: bytes) -> None:
        """Append to the file that is attached to the rank's next message."""
        if rank not in self._files:
            self._files[rank] = memory_file("parcel")
        with open(self._files[rank], "ab", closefd=False) as file:
            file.write(data)
        self._acknowledge(len(data))

    def _acknowledge(self, size: int) -> None:
        """Acknowledge received bytes, so that the agent sends more. One message acknowledges many lines of output."""
        self._unacknowledged += size
        if self._unacknowledged >= _ACKNOWLEDGED_AT_ONCE:
            self._send("received", self._unacknowledged)
            self._unacknowledged = 0


def await_nodes(front: Front, loop: Loop, numbers: Sequence[int], check: Callable[[], None]) -> list[RemoteNode]:
    """Wait until the nodes with these numbers have connected. Return them in this order.

    Args:
        front: The port that the nodes connect to.
        loop: The loop for the nodes' messages.
        numbers: The nodes' numbers.
        check: Called repeatedly. An exception from it ends the wait.

    Raises:
        LaunchError: If a node does not connect within `ARRIVAL_S` seconds.
    """
    nodes: dict[int, RemoteNode] = {}
    until = time.monotonic() + ARRIVAL_S
    try:
        while missing := [number for number in numbers if number not in nodes]:
            check()
            if time.monotonic() > until:
                listed = ", ".join(map(str, missing))
                msg = f"node(s) {listed} did not connect within {ARRIVAL_S:g} seconds: check that they can reach this node"
                raise LaunchError(msg)
            wire = front.accept(_LOOK_S)
            if wire is None:
                continue
            hello = wire.receive()
            if hello is None or hello.body[0] not in missing:
                wire.close()
                continue
            number, host = hello.body
            nodes[number] = RemoteNode(loop, wire, number, host)
    except BaseException:
        for node in nodes.values():
            node.close()
        raise
    return [nodes[number] for number in numbers]
