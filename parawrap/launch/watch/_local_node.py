"""A node: a machine's ranks, started, spoken to, listened to and buried.

What it guarantees: what a rank said and wrote is told before its end is, and its end once; when a node is over, no process
that it started lives.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from parawrap.launch._leftovers import LOOK_S, Leftovers, kill_group
from parawrap.launch.parcels._wire import Wire, close_in_forked_children, is_readable
from parawrap.launch.ranks._assignment import Assignment
from parawrap.launch.watch._forkserver import STATUS
from parawrap.launch.watch._loop import Loop
from parawrap.launch.watch._starters import Starter

__all__ = ["LocalNode", "Node", "Watcher"]

_PIECE = 1 << 16
_PIECES_IN_A_PIPE = 16  # it holds a mebibyte at the most
_LINE_TIMEOUT_S = 10.0  # a rank that is stopped in the middle of a message stops nobody else for longer


class Watcher(Protocol):
    """Whoever is told what becomes of ranks, wherever they run. Called by the thread of the node's loop."""

    def on_hello(self, rank: int, pid: int) -> None:
        """Its process runs, and speaks."""

    def on_word(self, rank: int, word: str, body: Any, file: int | Path | None) -> None:
        """It says something; `file`, open or at a path, holds what is too large for a message, and is the watcher's now."""

    def on_output(self, rank: int, stream: int, data: bytes) -> None:
        """It has written: 1 is standard output, 2 standard error."""

    def on_end(self, rank: int, code: int | None, lost_with: str = "") -> None:
        """Its process is gone: an exit code or minus a signal's number; None where nobody knows, as when a node is lost."""

    def on_trouble(self, what: str) -> None:
        """Ranks cannot be started on a node."""


class Node(Protocol):
    """Where some of a launch's ranks run. Belongs to the thread of its loop."""

    @property
    def host(self) -> str:
        """The machine's name."""
        ...

    def start(self, orders: Assignment, watcher: Watcher) -> None:
        """Start a rank, of which this watcher hears.

        Raises:
            LaunchError: it cannot be started.
        """

    def tell(self, rank: int, word: str, body: Any = None) -> None:
        """Say something to a rank; into the void, where it is gone."""

    def kill(self, rank: int) -> None:
        """Kill a rank and what it started."""

    def look(self) -> float:
        """See to what cannot be waited for; gives in how many seconds to come again."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether nothing runs any more that was started here."""
        ...

    @property
    def is_lost(self) -> bool:
        """Whether nothing can be started here any more."""
        ...

    def give_up(self) -> None:
        """Wait for nothing more from a node that tells nothing any more: it is lost."""

    def close(self) -> None:
        """Let go of everything, also of ranks that still run: then they are killed."""


@dataclass
class _Process:
    """A rank's process, which leads a process group of its own.

    Attributes:
        status: the pipe that tells how it ended; None once that is known.
        streams: the pipes it writes into, by their numbers in the rank.
    """

    wire: Wire
    watcher: Watcher
    pid: int
    status: int | None
    streams: dict[int, int] = field(default_factory=dict)


class LocalNode:
    """Ranks as processes of this machine, started by this process.

    Args:
        loop: waits for what they say, write and come to.
        starter: how processes are started.
        payload: the packed call; stays the caller's to close.
    """

    def __init__(self, loop: Loop, starter: Starter, payload: int) -> None:
        self._loop = loop
        self._starter = starter
        self._payload = payload
        self._processes: dict[int, _Process] = {}
        self._leftovers = Leftovers()
        self._listens = True

    @property
    def host(self) -> str:
        return socket.gethostname()

    @property
    def is_lost(self) -> bool:
        return False

    @property
    def is_over(self) -> bool:
        return not self._processes and not self._leftovers

    def start(self, orders: Assignment, watcher: Watcher) -> None:
        """Start one rank and tell it who it is."""
        rank = orders.place.global_rank
        ours, its = socket.socketpair()
        ours.settimeout(_LINE_TIMEOUT_S)
        wire = Wire(ours)
        close_in_forked_children(wire)  # before the start, which may be a fork of this process
        try:
            with its:
                started = self._starter.start(its, orders.grace_s)
        except BaseException:
            wire.close()
            raise
        process = _Process(wire, watcher, started.pid, started.status)
        self._processes[rank] = process
        self._loop.watch(wire, partial(self._on_message, rank, process))
        self._loop.watch(started.status, partial(self._on_status, rank, process))
        wire.send("orders", orders, (self._payload,))

    def tell(self, rank: int, word: str, body: Any = None) -> None:
        if rank in self._processes:
            self._processes[rank].wire.send(word, body)

    def kill(self, rank: int) -> None:
        """Its process group is its own from its first moment, but for an instant before."""
        if rank in self._processes:
            pid = self._processes[rank].pid
            kill_group(pid)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def look(self) -> float:
        had_leftovers = bool(self._leftovers)
        self._leftovers.look()
        return LOOK_S if self._leftovers else 0.0 if had_leftovers else float("inf")

    def listen(self, wanted: bool) -> None:
        """Whether what ranks write is wanted; if not, it waits in their pipes, and they with it when these are full."""
        if wanted == self._listens:
            return
        self._listens = wanted
        for rank, process in self._processes.items():
            for number, file in process.streams.items():
                if wanted:
                    self._loop.watch(file, partial(self._on_output, rank, process, number, file))
                else:
                    self._loop.forget(file)

    def give_up(self) -> None:
        """What the kernel was told to kill here, it will kill."""

    def close(self) -> None:
        for rank, process in self._processes.items():
            self.kill(rank)
            self._let_go(process)
            if process.status is not None:
                self._loop.forget(process.status)
                os.close(process.status)
        self._processes.clear()

    # -- what happens

    def _on_message(self, rank: int, process: _Process) -> None:
        message = process.wire.receive()
        if message is None:
            self._hang_up(process)
        elif message.word == "hello":
            self._listen_to(rank, process, message.files)
            process.watcher.on_hello(rank, process.pid)
        else:
            if isinstance(message.body, dict):
                self._starter.load(message.body.pop("loaded", ()))
            process.watcher.on_word(rank, message.word, message.body, message.files[0] if message.files else None)

    def _listen_to(self, rank: int, process: _Process, streams: Iterable[int]) -> None:
        for number, file in enumerate(streams, start=1):
            os.set_blocking(file, False)
            process.streams[number] = file
            if self._listens:
                self._loop.watch(file, partial(self._on_output, rank, process, number, file))

    def _on_output(self, rank: int, process: _Process, number: int, file: int) -> None:
        try:
            data = os.read(file, _PIECE)
        except BlockingIOError:
            return
        if data:
            process.watcher.on_output(rank, number, data)
        else:
            self._stop_listening(process, number)

    def _on_status(self, rank: int, process: _Process) -> None:
        """The process is gone. What it said and wrote may still be on its way; what it started may still run."""
        assert process.status is not None
        data = os.read(process.status, STATUS.size)
        code = STATUS.unpack(data)[0] if len(data) == STATUS.size else None
        self._loop.forget(process.status)
        os.close(process.status)
        process.status = None
        self._leftovers.take(process.pid)
        while process.wire.fileno() >= 0 and is_readable(process.wire, 0):
            self._on_message(rank, process)
        self._drain(rank, process)
        del self._processes[rank]
        self._let_go(process)
        process.watcher.on_end(rank, code)

    def _drain(self, rank: int, process: _Process) -> None:
        """Whatever the pipes still hold. Not until their end: a process that the rank let loose may hold them open."""
        for number, file in process.streams.items():
            with contextlib.suppress(BlockingIOError):
                for _ in range(_PIECES_IN_A_PIPE):
                    if data := os.read(file, _PIECE):
                        process.watcher.on_output(rank, number, data)

    def _let_go(self, process: _Process) -> None:
        for number in list(process.streams):
            self._stop_listening(process, number)
        self._hang_up(process)

    def _stop_listening(self, process: _Process, number: int) -> None:
        file = process.streams.pop(number)
        if self._listens:
            self._loop.forget(file)
        os.close(file)

    def _hang_up(self, process: _Process) -> None:
        if process.wire.fileno() >= 0:
            self._loop.forget(process.wire)
            process.wire.close()
