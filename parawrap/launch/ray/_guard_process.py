"""The process that guards the ranks of a Ray node.

It imports torch once, starts the ranks, and reports on them to the launching process through the node's actor:

    Coordinator ── RayGuard ──(Ray)── NodeActor ──(socket)── GuardProcess ── ranks

If the actor dies, for example because the launching process died, the ranks end within ``grace_s``.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from parawrap.errors import LaunchError, SessionError
from parawrap.launch._addresses import interface_of
from parawrap.launch.coordinator._event_loop import Loop
from parawrap.launch.guard._guard import LocalGuard
from parawrap.launch.guard._start_methods import starter_named
from parawrap.launch.messages._channel import close_in_forked_children, socket_at_standard_input
from parawrap.launch.messages._line import Arrival, Message
from parawrap.launch.rank._rank_assignment import Assignment
from parawrap.launch.ray._node_messages import Inbox, pack_message

__all__ = ["guard_node"]

_PIECE = 1 << 20  # bytes of one item of Ray's generator
_NEVER = float("inf")  # by the monotonic clock


def guard_node(payload: int, spawn_method: str, grace_s: float, address: str) -> NoReturn:
    """Guard the ranks of this node until the launch ends. The entry point of the process; the actor is at standard input.

    Args:
        payload: The file of the pickled call.
        spawn_method: The platform's ``spawn_method``.
        grace_s: Seconds for ranks to clean up after the death of the actor.
        address: The address of this node in the Ray cluster.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launching process handles Ctrl-C
    gc.freeze()
    gc.enable()
    GuardProcess(socket_at_standard_input(), payload, spawn_method, grace_s, address).run()
    os._exit(0)  # a normal exit would spend 0.1 s on unloading torch


class GuardProcess:
    """Starts the ranks of this node, and sends every report of their `LocalGuard`. Has one thread, so it can be forked.

    A send blocks while the launching process does not read. Further output then waits in the ranks' pipes.
    """

    def __init__(self, line: socket.socket, payload: int, spawn_method: str, grace_s: float, address: str) -> None:
        self._line = line
        close_in_forked_children(line)
        self._grace_s = grace_s
        self._address = address
        self._inbox = Inbox()
        self._loop = Loop()
        # This process is warm already, so both "forkserver" and "fork" fork it.
        self._guard = LocalGuard(self._loop, starter_named("spawn" if spawn_method == "spawn" else "fork"), payload)
        self._running: set[int] = set()
        self._started = self._reported_over = 0
        self._is_connected = True
        self._has_closed = False
        self._kill_at = _NEVER
        self._loop.watch(line, self._on_readable)
        self._send("hello", socket.gethostname(), address)

    def run(self) -> None:
        """Run until the launch ends, or until the actor has died and the last rank has ended."""
        while not self._has_closed and (self._is_connected or not self._guard.is_over):
            self._loop.turn(self._kill_at - time.monotonic())
            if self._guard.is_over and self._reported_over < self._started:
                self._reported_over = self._started
                self._send("over", self._started)
            if time.monotonic() >= self._kill_at:
                self._kill_at = _NEVER
                for rank in list(self._running):
                    self._guard.kill(rank)
        self._guard.close()

    def _send(self, word: str, *values: Any) -> None:
        try:
            if self._is_connected:
                self._line.sendall(pack_message(word, *values))
        except OSError:
            self._disconnect()

    def _disconnect(self) -> None:
        self._is_connected = False
        self._loop.forget(self._line)
        self._kill_at = time.monotonic() + self._grace_s
        for rank in list(self._running):
            self._guard.send(rank, "end")

    # -- messages from the launching process

    def _on_readable(self) -> None:
        try:
            data = self._line.recv(_PIECE)
        except ConnectionError:
            data = b""
        if not data:
            self._disconnect()
        for word, values in self._inbox.take(data):
            if word == "start":
                self._start(*values)
            elif word == "send":
                self._guard.send(*values)
            elif word == "kill":
                self._guard.kill(*values)
            elif word == "call":
                self._call(*values)
            elif word == "end calls":
                self._guard.end_calls(*values)
            else:
                self._has_closed = True

    def _start(self, assignment: Assignment) -> None:
        self._started += 1
        rank = assignment.place.global_rank
        self._running.add(rank)
        interface = assignment.interface or interface_of(self._address)
        try:
            self._guard.start(replace(assignment, interface=interface), self)
        except (LaunchError, OSError) as error:
            self.on_trouble(f"the process of rank {rank} cannot be started: {error}")
            self.on_end(rank, None)

    def _call(self, rank: int, word: str, number: int, pickled: bytes, buffers: list[bytes]) -> None:
        try:
            self._guard.call(rank, Message(word, None, number), memoryview(pickled), [memoryview(each) for each in buffers])
        except SessionError as error:
            self.on_trouble(f"a call cannot be sent to rank {rank}: {error}")

    # -- reports on ranks

    def on_start(self, rank: int, pid: int) -> None:
        self._send("started", rank, pid)

    def on_output(self, rank: int, stream: int, data: bytes) -> None:
        self._send("output", rank, stream, data)

    def on_word(self, rank: int, word: str, body: Any, file: int | Path | None) -> None:
        if isinstance(file, int):
            self._send_file(rank, file)
        self._send("word", rank, word, body)

    def on_answer(self, rank: int, answer: Arrival) -> None:
        if answer.file is not None:
            self._send_file(rank, answer.file)
        buffers = [bytearray(each) for each in answer.buffers]  # unpickled, they can be written to
        self._send("answer", rank, answer.word, answer.number, bytes(answer.pickled), buffers)

    def _send_file(self, rank: int, file: int) -> None:
        """Send a file, which is attached to the rank's next message, and close it."""
        for start in range(0, os.fstat(file).st_size, _PIECE):
            self._send("piece", rank, os.pread(file, _PIECE, start))
        os.close(file)

    def on_end(self, rank: int, code: int | None, lost_with: str = "") -> None:
        self._running.discard(rank)
        self._send("end", rank, code, lost_with)

    def on_trouble(self, what: str) -> None:
        self._send("trouble", what)
