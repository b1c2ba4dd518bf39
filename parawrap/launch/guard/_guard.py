"""Start, message, read, and end the ranks of one machine.

Guarantees: a rank's messages and output are reported before its end, and its end is reported once. When `is_over` is True,
no process that the node started is alive.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

from parawrap.errors import LaunchError
from parawrap.launch._system_limits import explain_error, open_files_limit
from parawrap.launch.coordinator._event_loop import Loop
from parawrap.launch.guard._forkserver import FAILED, STARTED, STATUS
from parawrap.launch.guard._orphan_processes import kill_group
from parawrap.launch.guard._start_methods import Starter
from parawrap.launch.messages._channel import Channel, close_in_forked_children, is_readable
from parawrap.launch.messages._line import Arrival, Line, Message
from parawrap.launch.rank._rank_assignment import Assignment

__all__ = ["CallGuard", "CallWatcher", "Guard", "LocalGuard", "Watcher"]

_PIECE = 1 << 16  # the size of a pipe in Linux
_PIECES_IN_A_PIPE = 16  # a pipe holds at most a mebibyte
_LINE_TIMEOUT_S = 10.0  # the longest time that a rank stopped in the middle of a message blocks the launch


class Watcher(Protocol):
    """Receives reports about ranks. Called by the thread of the node's loop."""

    def on_start(self, rank: int, pid: int) -> None:
        """Handle the start of a rank's process."""

    def on_word(self, rank: int, word: str, body: Any, file: int | Path | None) -> None:
        """Handle a message. `file`, an open file or a path with a large value, belongs to the watcher."""

    def on_output(self, rank: int, stream: int, data: bytes) -> None:
        """Handle output of stream 1 (standard output) or 2 (standard error)."""

    def on_end(self, rank: int, code: int | None, lost_with: str = "") -> None:
        """Handle the end of a rank's process. `code` is its exit code, a negative signal number, or None if unknown."""

    def on_trouble(self, what: str) -> None:
        """Handle a failure to start ranks on a node or to receive their messages."""


class CallWatcher(Watcher, Protocol):
    """A watcher of ranks that stay."""

    def on_answer(self, rank: int, answer: Arrival) -> None:
        """Handle the answer of a rank to a call. `answer` stays valid; its file belongs to the watcher."""


class Guard(Protocol):
    """A machine that runs some ranks of a launch. Used by the thread of its loop."""

    @property
    def host(self) -> str:
        """The hostname."""
        ...

    def start(self, assignment: Assignment, watcher: Watcher) -> None:
        """Start a rank and report on it to `watcher`.

        Raises:
            LaunchError: If the process cannot be started.
        """

    def send(self, rank: int, word: str, body: Any = None) -> None:
        """Send a message to a rank, unless it has ended. "end" also ends a process that has not started yet."""

    def kill(self, rank: int) -> None:
        """Kill a rank and its process group."""

    @property
    def is_over(self) -> bool:
        """True if no process that was started here is alive."""
        ...

    @property
    def is_lost(self) -> bool:
        """True if the machine is no longer reachable."""
        ...

    def give_up(self) -> None:
        """Stop waiting for missing reports."""

    def close(self) -> None:
        """Kill the ranks that still run and close all files."""


class CallGuard(Guard, Protocol):
    """A guard of ranks that stay."""

    def call(self, rank: int, message: Message, pickled: memoryview, buffers: list[memoryview]) -> None:
        """Send a request to a rank that stays, unless it has ended. `pickled` and `buffers` are the value of `message`.

        Raises:
            SessionError: If memory lacks room for its tensors. Nothing is sent then.
        """

    def end_calls(self, rank: int) -> None:
        """Close the line of a rank that stays. Its serving function then returns."""


@dataclass
class _Process:
    """A rank's process, which leads its own process group.

    Attributes:
        status: The pipe with reports from the process that forked the rank.
        pid: The process id; 0 until the process has started.
        is_cancelled: True if the rank was ordered to end before it had started.
        has_ended: True if the end was reported. Processes that the rank started may still be alive.
        streams: The pipes of standard output (1) and standard error (2).
        line: The calls of a rank that stays, and its answers.
    """

    channel: Channel
    watcher: Watcher
    status: int
    pid: int = 0
    is_cancelled: bool = False
    has_ended: bool = False
    streams: dict[int, int] = field(default_factory=dict)
    line: Line | None = None


class LocalGuard:
    """The ranks of this machine.

    Args:
        loop: The loop that waits for messages, output, and ends of ranks.
        starter: Starts the processes.
        payload: The file of the pickled call. The caller closes it.
        line: The socket of `Job.line`. The caller closes it.
    """

    def __init__(self, loop: Loop, starter: Starter, payload: int, line: int | None = None) -> None:
        self._loop = loop
        self._starter = starter
        self._files = (payload,) if line is None else (payload, line)
        self._processes: dict[int, _Process] = {}

    @property
    def host(self) -> str:
        return socket.gethostname()

    @property
    def is_lost(self) -> bool:
        return False

    @property
    def is_over(self) -> bool:
        return not self._processes

    def start(self, assignment: Assignment, watcher: Watcher) -> None:
        rank = assignment.place.global_rank
        try:
            process = self._start_process(assignment.grace_s, watcher)
        except OSError as error:
            msg = f"the process of rank {rank} cannot be started: {explain_error(error)}"
            raise LaunchError(msg) from error
        self._processes[rank] = process
        self._loop.watch(process.channel, partial(self._on_message, rank, process))
        self._loop.watch(process.status, partial(self._on_status, rank, process))
        if assignment.stays:
            self._open_line(rank, process, assignment)
        else:
            process.channel.send("assignment", assignment, self._files)

    def _open_line(self, rank: int, process: _Process, assignment: Assignment) -> None:
        ours, its = socket.socketpair()
        ours.settimeout(_LINE_TIMEOUT_S)
        close_in_forked_children(ours)
        process.line = Line(ours, copies_small=True)
        self._loop.watch(process.line, partial(self._on_answer, rank, process))
        with its:
            process.channel.send("assignment", assignment, (*self._files, its.fileno()))

    def _start_process(self, grace_s: float, watcher: Watcher) -> _Process:
        ours, its = socket.socketpair()
        ours.settimeout(_LINE_TIMEOUT_S)
        channel = Channel(ours)
        close_in_forked_children(channel)  # before the start, which may fork this process
        try:
            with its:
                close_in_forked_children(its)
                return _Process(channel, watcher, self._starter.start(its, grace_s))
        except BaseException:
            channel.close()
            raise

    def send(self, rank: int, word: str, body: Any = None) -> None:
        if rank not in self._processes:
            return
        process = self._processes[rank]
        if word == "end" and not process.pid:
            process.is_cancelled = True
            self._starter.wake()
        else:
            process.channel.send(word, body)

    def call(self, rank: int, message: Message, pickled: memoryview, buffers: list[memoryview]) -> None:
        process = self._processes.get(rank)
        if process is not None and process.line is not None:
            with contextlib.suppress(ConnectionError):  # its end is reported soon
                process.line.send_pickled(message, pickled, buffers)

    def end_calls(self, rank: int) -> None:
        process = self._processes.get(rank)
        if process is not None:
            self._close_line(process)

    def kill(self, rank: int) -> None:
        """Kill a rank: its process group and its process, because just after the start it may not lead its group yet."""
        process = self._processes.get(rank)
        if process is None or process.has_ended:
            return
        if process.pid:
            kill_group(process.pid)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, signal.SIGKILL)
            self._starter.wake()
        else:  # if it still starts, it finds its connection closed and exits
            self._forget(rank, process)
            process.watcher.on_end(rank, None)

    def give_up(self) -> None:
        for rank, process in list(self._processes.items()):
            self._forget(rank, process)
            if not process.has_ended:
                process.watcher.on_end(rank, None)

    def close(self) -> None:
        for rank, process in list(self._processes.items()):
            self.kill(rank)
            self._forget(rank, process)
        self._starter.release()

    # -- reports

    def _on_message(self, rank: int, process: _Process) -> None:
        message = process.channel.receive()
        if message is None:
            self._close_channel(process)
        elif message.word == "files lost":
            process.watcher.on_trouble(f"a message of rank {rank} arrived without its attached files: {open_files_limit()}")
        elif message.word == "hello":
            self._listen_to(rank, process, message.files)
        elif message.word == "imports":
            self._starter.load(message.body)
        else:
            process.watcher.on_word(rank, message.word, message.body, message.files[0] if message.files else None)

    def _on_answer(self, rank: int, process: _Process) -> None:
        """Report the answers that have arrived, after the output that was written before."""
        while process.line is not None:
            answer = process.line.receive()
            if answer is None:
                self._close_line(process)
                return
            self._drain(rank, process)
            cast("CallWatcher", process.watcher).on_answer(rank, answer.kept())
            if process.line is None or not process.line.has_received_more:
                return

    def _close_line(self, process: _Process) -> None:
        if process.line is not None:
            self._loop.forget(process.line)
            process.line.close()
            process.line = None

    def _listen_to(self, rank: int, process: _Process, streams: Iterable[int]) -> None:
        for number, file in enumerate(streams, start=1):
            os.set_blocking(file, False)
            process.streams[number] = file
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
        record = os.read(process.status, STATUS.size)
        if len(record) < STATUS.size:
            self._on_gone(rank, process)
            return
        word, number = STATUS.unpack(record)
        if word == STARTED:
            process.pid = number
            process.watcher.on_start(rank, number)
            if process.is_cancelled:
                self.kill(rank)
        elif word == FAILED:
            error = OSError(number, os.strerror(number))
            self._forget(rank, process)
            process.watcher.on_trouble(f"the process of rank {rank} cannot be forked: {explain_error(error)}")
            process.watcher.on_end(rank, None)
        else:
            self._end(rank, process, None if process.is_cancelled else number)

    def _on_gone(self, rank: int, process: _Process) -> None:
        """Handle a closed status pipe: all processes of the rank have ended, or its server died, which killed the rank."""
        if not process.has_ended:
            if process.pid:
                kill_group(process.pid)
            self._end(rank, process, None, self._starter.describe())
        self._forget(rank, process)

    def _end(self, rank: int, process: _Process, code: int | None, lost_with: str = "") -> None:
        """Report the end of a process, after its pending messages and output."""
        process.has_ended = True
        while process.channel.fileno() >= 0 and is_readable(process.channel, 0):
            self._on_message(rank, process)
        while process.line is not None and is_readable(process.line, 0):
            self._on_answer(rank, process)
        self._drain(rank, process)
        self._disconnect(process)
        process.watcher.on_end(rank, code, lost_with)

    def _drain(self, rank: int, process: _Process) -> None:
        """Report the output in the pipes. Do not wait for end of file: a child of the rank may hold them open."""
        poll = select.poll()  # cheaper than reads that find nothing
        for file in process.streams.values():
            poll.register(file, select.POLLIN)
        ready = {file for file, _ in poll.poll(0)}
        for number, file in [(number, file) for number, file in process.streams.items() if file in ready]:
            with contextlib.suppress(BlockingIOError):
                for _ in range(_PIECES_IN_A_PIPE):
                    if data := os.read(file, _PIECE):
                        process.watcher.on_output(rank, number, data)

    def _forget(self, rank: int, process: _Process) -> None:
        if self._processes.pop(rank, None) is not None:
            self._disconnect(process)
            self._loop.forget(process.status)
            os.close(process.status)

    def _disconnect(self, process: _Process) -> None:
        for number in list(process.streams):
            self._stop_listening(process, number)
        self._close_line(process)
        self._close_channel(process)

    def _stop_listening(self, process: _Process, number: int) -> None:
        file = process.streams.pop(number)
        self._loop.forget(file)
        os.close(file)

    def _close_channel(self, process: _Process) -> None:
        if process.channel.fileno() >= 0:
            self._loop.forget(process.channel)
            process.channel.close()
