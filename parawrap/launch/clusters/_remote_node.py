"""A node at the other end of a line, as the side that watches the launch has it."""

from __future__ import annotations

import os
from typing import Any

from parawrap.launch.parcels._packing import memory_file
from parawrap.launch.parcels._wire import Wire
from parawrap.launch.ranks._assignment import Assignment
from parawrap.launch.watch._local_node import Watcher
from parawrap.launch.watch._loop import Loop

__all__ = ["RemoteNode"]

_WORTH_A_MESSAGE = 1 << 15
_LOST = "its node, which no longer answers"


class RemoteNode:
    """The ranks of another machine, kept there by a `NodeAgent`. Belongs to the thread of its loop.

    When the line breaks, or nothing comes through any more, the node and its ranks are lost.

    Args:
        loop: waits for what the node says.
        wire: the line to it.
        number: its number.
        host: its name.
    """

    def __init__(self, loop: Loop, wire: Wire, number: int, host: str) -> None:
        self.host = host
        self._loop = loop
        self._wire = wire
        self._number = number
        self._watchers: dict[int, Watcher] = {}
        self._files: dict[int, int] = {}
        self._started = 0
        self._over = 0
        self._taken_in = 0
        loop.watch(wire, self._on_message)

    @property
    def is_over(self) -> bool:
        return self._over == self._started or self.is_lost

    @property
    def is_lost(self) -> bool:
        return self._wire.fileno() < 0

    def start(self, assignment: Assignment, watcher: Watcher) -> None:
        """Have a rank started there. Where the node is lost already, so is the rank."""
        rank = assignment.place.global_rank
        self._watchers[rank] = watcher
        self._started += 1
        if not self._send("start", assignment):
            self._end(rank, None, _LOST)

    def tell(self, rank: int, word: str, body: Any = None) -> None:
        if rank in self._watchers:
            self._send("tell", (rank, word, body))

    def kill(self, rank: int) -> None:
        if rank in self._watchers:
            self._send("kill", rank)

    def look(self) -> float:
        return float("inf")

    def give_up(self) -> None:
        if not self.is_over:
            self._lose()

    def close(self) -> None:
        """Hang up, at which the node ends what still runs there."""
        if not self.is_lost:
            self._loop.forget(self._wire)
            self._wire.close()
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def _send(self, word: str, body: Any) -> bool:
        """Not sent is lost: what came through of a message that broke off would spoil the next one."""
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

    def _on_rank(self, word: str, rank: int, *said: Any) -> None:
        if rank not in self._watchers:
            return
        watcher = self._watchers[rank]
        if word == "hello":
            watcher.on_hello(rank, *said)
        elif word == "output":
            watcher.on_output(rank, *said)
            self._acknowledge(len(said[1]))
        elif word == "piece":
            self._take_piece(rank, *said)
        elif word == "word":
            watcher.on_word(rank, said[0], said[1], said[2] or self._files.pop(rank, None))
        else:
            self._end(rank, *said)

    def _take_piece(self, rank: int, data: bytes) -> None:
        """Files do not fit through the line: they come in pieces, before the word that they belong to."""
        if rank not in self._files:
            self._files[rank] = memory_file("parcel")
        with open(self._files[rank], "ab", closefd=False) as file:
            file.write(data)
        self._acknowledge(len(data))

    def _acknowledge(self, size: int) -> None:
        """Let the node send as much again; not for every line that a rank writes."""
        self._taken_in += size
        if self._taken_in >= _WORTH_A_MESSAGE:
            self._send("taken in", self._taken_in)
            self._taken_in = 0
