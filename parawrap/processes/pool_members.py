"""The processes of ranks: one thread starts them, reads what they write, and ends them. `Pool` makes the calls."""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import signal
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from parawrap.processes.fork_server import EXITED, STARTED, STATUS, Connections
from parawrap.processes.main_thread import Status
from parawrap.processes.outcomes import Died, Ended, Outcome
from parawrap.processes.output import Transcript
from parawrap.processes.rank_process import Assignment
from parawrap.processes.wire import Message, Wire

NEVER = float("inf")
"""A time by the monotonic clock."""

_GIVE_UP_S = 20.0  # for the server to report the end of killed ranks
_LONGEST_WAIT_S = 3600.0  # selectors reject very long timeouts
_PIECE = 1 << 16  # the size of a pipe in Linux


class Starter(Protocol):
    """Starts the ranks of a launch, on this machine or on others."""

    def start(self, rank: int) -> Connections:
        """Start a rank. Raise LaunchError if its process cannot be started."""
        ...

    def kill(self, rank: int, pid: int, /) -> None:
        """Kill a rank and its process group. `pid` is 0 before its start."""

    def describe(self, rank: int, /) -> str:
        """Describe what a rank was lost with, if its connections ended."""
        ...


@dataclass
class Member:
    """A rank, as the launching process sees it. Times are by the monotonic clock."""

    rank: int
    place: str
    wire: Wire
    control: Wire
    status: int
    transcript: Transcript
    transcripts: list[Transcript]  # get its output: its own, and that of a call with a handle
    streams: dict[int, int]  # open descriptors of standard output (1) and standard error (2)
    pid: int = 0
    is_alive: bool = True  # its process, or one that it started, may run
    has_exited: bool = False
    wrote_at: float = 0.0
    asked: set[str] = field(default_factory=set)  # words that it has not answered yet
    looked: Status | None = None  # its answer to the last look
    looked_at: float = 0.0
    steps: int = 0  # how often its `should_checkpoint` had returned False when the launch was preempted
    operations: int | None = None  # collectives that it has begun; None without a process group


class Members(ABC):
    """The processes of ranks. One thread uses it, except for `post`.

    Attributes:
        is_ending: True if the ranks were ordered to end.
    """

    def __init__(self, starter: Starter, assignments: Sequence[Assignment], transcripts: Sequence[Transcript]) -> None:
        self._starter = starter
        self._assignments = assignments
        self._transcripts = transcripts
        self._grace_s = assignments[0].grace_s
        self._members: list[Member] = []
        self._timers: dict[Callable[[], object], float] = {}  # actions, and when they are due
        self._posted: deque[Callable[[], object]] = deque()
        self._woken, self._waker = os.pipe()
        os.set_blocking(self._waker, False)
        self._selector = selectors.DefaultSelector()
        self._watch(self._woken, self._run_posted)
        self._has_killed = False
        self._cancelled = False
        self._lost = ""  # why the ranks had to be ended, if not for a limit or an outcome
        self.is_ending = False

    @abstractmethod
    def _take(self, member: Member, message: Message) -> None:
        """Handle a message of a rank."""

    @abstractmethod
    def _settle(self, member: Member, outcome: Outcome) -> None:
        """Handle the end of a process."""

    # -- the course of events

    def post(self, act: Callable[[], object]) -> None:
        """Run `act` in the thread that calls `turn`. Any thread may call it. After `close`, do nothing."""
        self._posted.append(act)
        with contextlib.suppress(OSError):  # closed, or woken already
            os.write(self._waker, b"!")

    def _run_posted(self) -> None:
        os.read(self._woken, 4096)
        while self._posted:
            self._posted.popleft()()

    def turn(self, until: float = NEVER) -> None:
        """Wait for events until a time, handle them, and do what is due."""
        until = min(until, *self._timers.values(), NEVER)
        patience_s = min(max(0.0, until - time.monotonic()), _LONGEST_WAIT_S)
        for key, _ in self._selector.select(patience_s):
            if self._selector.get_map().get(key.fd) is key:  # not closed by an earlier handler
                key.data()
        now = time.monotonic()
        for act, at in list(self._timers.items()):
            if now >= at == self._timers.get(act):  # not changed by an earlier action
                del self._timers[act]
                act()

    def _watch(self, file: Any, act: Callable[[], object]) -> None:
        self._selector.register(file, selectors.EVENT_READ, act)

    def _drop(self, wire: Wire) -> None:
        if wire.fileno() >= 0:
            self._selector.unregister(wire)
            wire.close()

    # -- the start, and reports about ranks

    def fork(self) -> None:
        """Start the processes.

        Raises:
            LaunchError: If a process cannot be started.
        """
        for rank, (assignment, transcript) in enumerate(zip(self._assignments, self._transcripts, strict=True)):
            if self._cancelled:
                return
            place, data, control, status, streams = self._starter.start(rank)
            outputs = dict(enumerate(streams, start=1))
            member = Member(rank, place, Wire(data), Wire(control), status, transcript, [transcript], outputs)
            self._members.append(member)
            for wire in (member.wire, member.control):
                self._watch(wire, partial(self._receive, member, wire))
            self._watch(status, partial(self._on_status, member))
            for number, file in member.streams.items():
                os.set_blocking(file, False)
                self._watch(file, partial(self._read_output, member, number))
            member.wire.send("assignment", assignment)

    def places(self) -> dict[int, str]:
        """Return the node and host of each rank."""
        return {member.rank: member.place for member in self._members}

    def _receive(self, member: Member, wire: Wire) -> None:
        message = wire.receive()
        if message is None:  # the rank has exited, or is about to
            self._drop(wire)
            return
        self._take(member, message)

    def _read_output(self, member: Member, number: int) -> bool:
        """Read output, and return True if there was some."""
        file = member.streams[number]
        try:
            data = os.read(file, _PIECE)
        except BlockingIOError:
            return False
        if data:
            member.wrote_at = time.monotonic()
            for transcript in member.transcripts:
                transcript.write(number, data)
        else:
            self._selector.unregister(file)
            os.close(member.streams.pop(number))
        return bool(data)

    def _drain(self, member: Member) -> None:
        """Read the output so far. Do not wait for end of file: a child of the rank may hold the pipes open."""
        for number in list(member.streams):
            while number in member.streams and self._read_output(member, number):
                pass

    def _on_status(self, member: Member) -> None:
        record = os.read(member.status, STATUS.size)
        if len(record) < STATUS.size:  # all processes of the rank have ended, or the server died, which killed it
            if not member.has_exited:
                self._on_exit(member, None, "" if self._lost else self._starter.describe(member.rank))
            self._forget(member)
            return
        word, number = STATUS.unpack(record)
        if word == STARTED:
            member.pid = number
            if self._has_killed:
                self._starter.kill(member.rank, number)
        elif word == EXITED:
            self._on_exit(member, number)
        else:
            self._lost = f"the process of rank {member.rank} cannot be forked: {os.strerror(number)}"
            self.end()

    def _on_exit(self, member: Member, code: int | None, lost_with: str = "") -> None:
        """Handle the end of a process, after its last messages and output."""
        member.has_exited = True
        while member.wire.fileno() >= 0 and _is_readable(member.wire):
            self._receive(member, member.wire)
        self._drain(member)
        self._settle(member, self._death_of(member, code, lost_with))

    def _death_of(self, member: Member, code: int | None, lost_with: str = "") -> Outcome:
        by_order = self.is_ending and code in (None, 1, -signal.SIGTERM)
        if not lost_with and (by_order or (self._has_killed and code == -signal.SIGKILL) or self._lost):
            return Ended(time.time())
        return Died(time.time(), member.pid, code, last_words=member.transcript.last_words(), lost_with=lost_with)

    # -- the end of the processes

    @property
    def is_over(self) -> bool:
        """True once none of the processes is alive."""
        return not any(member.is_alive for member in self._members)

    def end(self) -> None:
        """Order every rank to end. Those that are late are killed."""
        if not self.is_ending:
            self.is_ending = True
            self._timers = {self._end_by_force: time.monotonic() + self._grace_s}
            for member in self._members:
                member.control.send("end")

    def cancel(self) -> None:
        """End every rank, unless they are ending already."""
        if not self.is_ending:
            self._cancelled = True
            self.end()

    def close(self) -> None:
        """Let the ranks exit, and wait until no process is alive. Ranks that are late are killed."""
        for member in self._members:
            self._drop(member.wire)
        kill_at = time.monotonic() + self._grace_s
        self._timers = {self._end_by_force: self._timers.get(self._end_by_force, kill_at)}
        while not self.is_over:
            self.turn()
        self._selector.close()
        woken, waker = self._woken, self._waker
        self._waker = -1  # `post` may come in between
        os.close(woken)
        os.close(waker)

    def _end_by_force(self) -> None:
        """Kill the ranks. On the second call, give up those whose end the server has not reported."""
        if self._has_killed:
            for member in self._members:
                member.has_exited = True
                self._settle(member, Ended(time.time()))
                self._forget(member)
            return
        self.is_ending = self._has_killed = True
        self._timers[self._end_by_force] = time.monotonic() + _GIVE_UP_S
        for member in self._members:
            if not member.has_exited:
                self._starter.kill(member.rank, member.pid)

    def _forget(self, member: Member) -> None:
        """Close the files of a rank."""
        if not member.is_alive:
            return
        member.is_alive = False
        self._drop(member.wire)
        self._drop(member.control)
        for file in (member.status, *member.streams.values()):
            self._selector.unregister(file)
            os.close(file)
        member.streams.clear()


def _is_readable(wire: Wire) -> bool:
    poll = select.poll()  # select() is limited to descriptors below 1024
    poll.register(wire, select.POLLIN)
    return bool(poll.poll(0))
