"""What keeps a node: starts the ranks that the other end of its line orders, and tells that end all that becomes of them.

What it guarantees: when that end is gone, so are the ranks, after ``grace_s``.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from parawrap.errors import LaunchError
from parawrap.launch.clusters._network import interface_of
from parawrap.launch.clusters._send_queue import SendQueue
from parawrap.launch.parcels._outcomes import Parcel
from parawrap.launch.parcels._wire import Wire
from parawrap.launch.ranks._assignment import Assignment
from parawrap.launch.watch._local_node import LocalNode
from parawrap.launch.watch._loop import Loop
from parawrap.launch.watch._starters import Starter

__all__ = ["NodeAgent"]

_LONGEST_TURN_S = 1.0  # whoever interrupts this process is heard within that time
_NEVER = float("inf")


class NodeAgent:
    """Keeps this machine's ranks for somebody at the other end of a line, until that end hangs up.

    Args:
        wire: the line.
        number: the node's.
        starter: how processes are started.
        payload: the packed call.
        grace_s: seconds that ranks have to clean up when the line is gone.
        path_of: where a rank's parcel is put, for the other end to find it there; None sends parcels along the line.
    """

    def __init__(
        self,
        wire: Wire,
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
        self._node = LocalNode(self._loop, starter, payload)
        self._outbox = SendQueue(wire)
        self._running: set[int] = set()
        self._started = 0
        self._told_over = 0
        self._kill_at = _NEVER
        self._has_line = True
        self._loop.watch(wire, self._on_order)
        self._outbox.put("hello", (number, socket.gethostname()))

    def keep(self) -> None:
        """Serve until the line is gone and the last rank with it."""
        try:
            while self._has_line or not self._node.is_over:
                self._loop.turn(min(self._kill_at - time.monotonic(), _LONGEST_TURN_S))
                self._see_to_line()
                if time.monotonic() >= self._kill_at:
                    self._kill_at = _NEVER
                    self._kill()
        finally:
            self._node.close()
            self._outbox.close()
            self._loop.close()
            self._wire.close()

    def _see_to_line(self) -> None:
        if self._outbox.is_broken and self._has_line:
            self._hang_up()
        if self._node.is_over and self._told_over != self._started:
            self._told_over = self._started
            self._outbox.put("over", self._started)
        self._node.listen(not self._outbox.is_full)

    def _kill(self) -> None:
        for rank in self._running:
            self._node.kill(rank)

    def _hang_up(self) -> None:
        self._has_line = False
        self._loop.forget(self._wire)
        self._outbox.close()
        self._kill_at = time.monotonic() + self._grace_s
        for rank in self._running:
            self._node.tell(rank, "end")

    # -- what the other end orders

    def _on_order(self) -> None:
        order = self._wire.receive()
        if order is None:
            self._hang_up()
        elif order.word == "start":
            self._start(order.body)
        elif order.word == "taken in":
            self._outbox.taken_in(order.body)
        elif order.word == "tell":
            self._node.tell(*order.body)
        else:
            self._node.kill(order.body)

    def _start(self, orders: Assignment) -> None:
        self._started += 1
        rank = orders.place.global_rank
        self._running.add(rank)
        try:
            self._node.start(self._adapted(orders), self)
        except (LaunchError, OSError) as error:
            self._outbox.put("trouble", f"no process can be started for rank {rank}: {error}")
            self.on_end(rank, None)

    def _adapted(self, orders: Assignment) -> Assignment:
        """Of the addresses by which the other end can be reached, the one by which it was, and this end's own."""
        here, there = self._wire.addresses()
        meeting = orders.meeting
        if meeting is not None and meeting.host is not None:
            meeting = replace(meeting, host=there)
        return replace(orders, meeting=meeting, interface=interface_of(here))

    # -- what becomes of ranks

    def on_hello(self, rank: int, pid: int) -> None:
        self._outbox.put("hello", (rank, pid))

    def on_output(self, rank: int, stream: int, data: bytes) -> None:
        self._outbox.put("output", (rank, stream, data), len(data))

    def on_word(self, rank: int, word: str, body: Any, file: int | Path | None) -> None:
        if word == "alive" and self._outbox.is_full:
            return
        if isinstance(file, int) and self._path_of is not None:
            path = self._path_of(rank)
            try:
                Parcel(file).put(path)
            except OSError as error:
                what = f"what rank {rank} {word} cannot be put into {path.parent}: {error}; make room there"
                self._outbox.put("trouble", what)
                self.on_end(rank, None)  # before its exit code, which would be taken for a death
                return
            file = path
        elif isinstance(file, int):
            self._outbox.put_file(rank, file)
            file = None
        self._outbox.put("word", (rank, word, body, file))

    def on_end(self, rank: int, code: int | None, lost_with: str = "") -> None:
        self._running.discard(rank)
        self._outbox.put("end", (rank, code))

    def on_trouble(self, what: str) -> None:
        self._outbox.put("trouble", what)
