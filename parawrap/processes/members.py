"""The processes of ranks, in the launching process: their start, their output, and their end.

Guarantee: after `Members.close`, no process of a rank is alive, also if `close` raises.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from parawrap.errors import LaunchError, SessionError
from parawrap.processes.events import Events
from parawrap.processes.fork_server import EXITED, STARTED, STATUS, Connections
from parawrap.processes.main_thread import Status
from parawrap.processes.outcomes import Died, Ended, Outcome
from parawrap.processes.output import Transcript
from parawrap.processes.rank_process import FORCED, Assignment
from parawrap.processes.wire import SLABS_ONLY, Message, Wire

# For the server to report the end of killed ranks. A guess that no test has contradicted
_GIVE_UP_S = 20.0
_PIECE = 1 << 16  # bytes: the size of a pipe in Linux
_log = logging.getLogger("parawrap.launch")


class RankStarter(Protocol):
    """Starts the ranks of a launch, on this machine or on others."""

    def start(self, rank: int) -> Connections:
        """Start a rank. Raise LaunchError if its process cannot be started."""
        ...

    def kill(self, rank: int, pid: int, /) -> None:
        """Kill a rank and its process group. `pid` is 0 before its start."""

    def describe(self, rank: int, /) -> str:
        """Describe what a rank was lost with, if its connections ended."""
        ...


@dataclass(eq=False)
class Member:
    """A rank, as the launching process sees it. Times are by the monotonic clock.

    The owner of the answers reads `wire`: the pool, or a lane of workers.
    """

    rank: int
    place: str
    wire: Wire
    control: Wire
    status: int  # a pipe with records of the server
    transcript: Transcript
    transcripts: Sequence[Transcript]  # get its output: its own, and that of a call with a handle
    # Descriptors of its standard output, under 1, and error, under 2, while they are open
    streams: dict[int, int] = field(default_factory=dict)
    is_read_elsewhere: bool = False  # a lane of workers reads `wire`, and closes it
    record: bytes = b""  # a part of a status record
    pid: int = 0
    is_alive: bool = True  # its process, or one that it started, may run
    has_exited: bool = False
    wrote_at: float = 0.0
    asked: set[str] = field(default_factory=set)  # words that it has not answered yet
    looked: Status | None = None  # its answer to the last look
    looked_at: float = 0.0
    steps: int = 0  # how often `should_checkpoint` had returned False when it was preempted
    operations: int | None = None  # collectives that it has begun; None without a process group

    def tell(self, word: str, body: Any = None) -> None:
        """Send a message to its control thread.

        At a limit of this process, nothing is sent. Orders to end have a time limit, so they hold.
        """
        with contextlib.suppress(OSError):
            self.control.send(word, body)


class Listener(Protocol):
    """Gets what the ranks report, under the lock of the events."""

    def on_message(self, member: Member, message: Message, /) -> None:
        """Handle a message of a rank."""

    def on_end(self, member: Member, outcome: Outcome, /) -> None:
        """Handle the end of a process."""


class Members:
    """The processes of ranks. The thread of the pool uses it; other threads hold the events' lock.

    Attributes:
        all: The ranks that were started.
        is_ending: True if the ranks were ordered to end.
        is_cancelled: True if the order came from `cancel`.
        lost: Why the ranks had to be ended, if not for a limit or an outcome.
    """

    def __init__(
        self, starter: RankStarter, events: Events, listener: Listener, grace_s: float
    ) -> None:
        self._starter = starter
        self._events = events
        self._listener = listener
        self._grace_s = grace_s
        self._has_killed = False
        self.all: list[Member] = []
        self.is_ending = False
        self.is_cancelled = False
        self.lost = ""

    # -- the start

    def start(
        self,
        rank: int,
        assignment: Assignment,
        transcript: Transcript,
        *,
        is_read_elsewhere: bool = False,
    ) -> Member:
        """Start a process.

        Raises:
            LaunchError: If it cannot be started.
        """
        connections = self._starter.start(rank)
        member: Member | None = None
        try:
            member = Member(
                rank=rank,
                place=connections.place,
                wire=Wire(connections.data),
                control=Wire(connections.control),
                status=connections.status,
                transcript=transcript,
                transcripts=[transcript],
                streams=dict(enumerate(connections.streams, start=1)),
                is_read_elsewhere=is_read_elsewhere,
            )
            self._take_over(member)
        except BaseException:
            if member not in self.all:  # nothing owns the process: without connections, it exits
                connections.close()
            raise
        with self._events.lock:
            try:
                member.wire.send("assignment", assignment)
            except (OSError, SessionError) as error:
                msg = f"rank {rank} cannot get its settings: {error}"
                raise LaunchError(msg) from error
            if not is_read_elsewhere:
                self._events.update_watch(member.wire)
        return member

    def _take_over(self, member: Member) -> None:
        """Watch a process, and own it from then on."""
        with self._events.lock:
            # Answers are watched apart: a caller's thread may read them
            if not member.is_read_elsewhere:
                self._events.watch_answers(member.wire, partial(self.receive, member, member.wire))
            self._events.watch(member.control, partial(self.receive, member, member.control))
            self._events.watch(member.status, partial(self._on_status, member))
            for number, descriptor in member.streams.items():
                os.set_blocking(descriptor, False)
                self._events.watch(descriptor, partial(self._read_output, member, number))
            self.all.append(member)

    # -- messages and output

    def tell(self, member: Member, word: str, body: Any = None) -> None:
        """Send a message to the control thread of a rank. What has no room leaves later."""
        if member.control.is_open:
            member.tell(word, body)
            self._events.update_watch(member.control)

    def receive(self, member: Member, wire: Wire) -> None:
        """Read once, send what waits for room, and hand on the messages that are complete."""
        if wire.has_unsent:  # the socket may have room, which also wakes the selector
            wire.flush()
            self._events.update_watch(wire)
        try:
            messages = wire.read()
        except EOFError:  # the rank has exited, or is about to
            self.drop(wire)
            return
        for message in messages:
            if message.word != SLABS_ONLY:
                self._listener.on_message(member, message)

    def drain(self, member: Member) -> None:
        """Read the output so far.

        Do not wait for its end: a child of the rank may hold the pipes.
        """
        if not _is_readable(*member.streams.values()):  # one entry into the kernel, not two
            return
        for number in list(member.streams):
            has_more = True
            while has_more:
                has_more = self._read_output(member, number)

    def _read_output(self, member: Member, number: int) -> bool:
        """Read output, and return True if there was some. At its end, close the stream."""
        descriptor = member.streams[number]
        try:
            data = os.read(descriptor, _PIECE)
        except BlockingIOError:
            return False
        except ConnectionError:  # of a rank on another machine
            data = b""
        if data:
            member.wrote_at = time.monotonic()
            for transcript in member.transcripts:
                transcript.write(number, data)
        else:
            self._events.forget(descriptor)
            os.close(member.streams.pop(number))
        return bool(data)

    def drop(self, wire: Wire) -> None:
        """Close a wire.

        The rank sees the end, also if a child that the user's code forked holds a copy.
        """
        if wire.is_open:
            self._events.forget(wire)
            wire.shut()
            wire.close()

    # -- reports of the server

    def _on_status(self, member: Member) -> None:
        """Read the status of a process.

        A death is known from here, never from another connection.
        """
        try:
            data = os.read(member.status, STATUS.size - len(member.record))
        except ConnectionError:
            data = b""
        if not data:  # all processes of the rank have ended, or the server died, which killed it
            if not member.has_exited:
                self._starter.kill(member.rank, member.pid)  # its children outlive the server
                # If another rank could not be forked, that is the reason
                lost_with = "" if self.lost else self._starter.describe(member.rank)
                self._on_exit(member, None, lost_with)
            self._forget(member)
            return
        member.record += data
        if len(member.record) < STATUS.size:  # TCP may deliver it in parts
            return
        word, number = STATUS.unpack(member.record)
        member.record = b""
        if word == STARTED:
            member.pid = number
            if self._has_killed:  # before the number was known
                self._starter.kill(member.rank, number)
        elif word == EXITED:
            self._on_exit(member, number)
        else:  # FAILED
            self.lost = f"the process of rank {member.rank} cannot be forked: {os.strerror(number)}"
            self.end()

    def _on_exit(self, member: Member, code: int | None, lost_with: str = "") -> None:
        """Handle the end of a process, after its last messages and output."""
        member.has_exited = True
        # A child that the user forked from this process may hold the other end: nothing more comes
        member.wire.shut()
        if not member.is_read_elsewhere:
            while member.wire.is_open:  # `receive` closes it at its end
                self.receive(member, member.wire)
        self.drain(member)
        self._listener.on_end(member, self.death_of(member, code, lost_with))

    def death_of(self, member: Member, code: int | None, lost_with: str = "") -> Outcome:
        """Return how a rank has ended that did not answer."""
        # SIGTERM ends workers, which have no handler. None: the code was lost with the server
        by_order = self.is_ending and code in (None, FORCED, -signal.SIGTERM)
        by_force = self._has_killed and code == -signal.SIGKILL
        # A rank could not be forked, and the others end because of it
        because_of_another = bool(self.lost)
        is_expected = by_order or by_force or because_of_another
        if is_expected and not lost_with:  # a lost node is an error at any time
            return Ended(time.time())
        words = member.transcript.last_words()
        return Died(time.time(), member.pid, code, last_words=words, lost_with=lost_with)

    # -- the end of the processes

    @property
    def is_over(self) -> bool:
        """True once none of the processes is alive."""
        # Not a counter: an error between two lines, which this loop must survive, would falsify it
        return all(not member.is_alive for member in self.all)

    def end(self) -> None:
        """Order every rank to end. Those that are late are killed."""
        if not self.is_ending:
            self.is_ending = True
            self._events.timers.clear()  # the time limits of the call that ends with it
            self._events.timers[self._end_by_force] = time.monotonic() + self._grace_s
            for member in self.all:
                self.tell(member, "end")

    def cancel(self) -> None:
        """End every rank, unless they are ending already."""
        if not self.is_ending:
            self.is_cancelled = True
            self.end()

    def close(self, exit_s: float = 0.0) -> None:
        """Let the ranks exit, and wait until no process is alive.

        Ranks that are late are killed: once ``grace_s`` is over, or `exit_s` seconds for the exit
        handlers of ranks that were not ordered to end.
        """
        try:
            with self._events.lock:
                for member in self.all:
                    if member.is_read_elsewhere:
                        member.wire.shut()
                    else:
                        self.drop(member.wire)
                timers = self._events.timers
                late_at = time.monotonic() + max(self._grace_s, exit_s)
                kill_at = timers.get(self._end_by_force, late_at)
                timers.clear()
                timers[self._end_by_force] = kill_at
            while not self.is_over:
                self._events.turn()
        finally:
            if not self.is_over:
                self._abandon()
            self._events.close()
            # The listener and its members refer to each other: without this, their descriptors
            # would stay until the next garbage collection. No report comes after this line
            vars(self).pop("_listener", None)  # `close` may be called again after an error

    def _abandon(self) -> None:
        """Kill the processes without waiting for reports: an error ended the thread of the pool."""
        for member in self.all:
            with contextlib.suppress(Exception):
                if not member.has_exited:
                    self._starter.kill(member.rank, member.pid)
                self._forget(member)

    def _end_by_force(self) -> None:
        """Kill the ranks.

        On the second call, give up those whose end the server does not report.
        """
        if self._has_killed:
            for member in self.all:
                if member.is_alive:
                    member.has_exited = True
                    self._listener.on_end(member, Ended(time.time()))
                    self._forget(member)
            return
        late = [str(member.rank) for member in self.all if not member.has_exited]
        if late and not self.is_ending:
            _log.warning(
                "rank(s) %s had returned, but not exited in time, for example because of exit "
                "handlers: their processes are killed",
                ", ".join(late),
            )
        self.is_ending = self._has_killed = True
        self._events.timers[self._end_by_force] = time.monotonic() + _GIVE_UP_S
        for member in self.all:
            if not member.has_exited:
                self._starter.kill(member.rank, member.pid)

    def kill(self, member: Member) -> None:
        """Kill one process. Others go on."""
        if not member.has_exited:
            self._starter.kill(member.rank, member.pid)

    def _forget(self, member: Member) -> None:
        """Close the files of a rank. None of its processes is alive."""
        if not member.is_alive:
            return
        member.is_alive = False
        if not member.is_read_elsewhere:
            self.drop(member.wire)
        self.drop(member.control)
        for file in (member.status, *member.streams.values()):
            self._events.forget(file)
            os.close(file)
        member.streams.clear()


def _is_readable(*files: Any) -> bool:
    poll = select.poll()  # select() is limited to descriptors below 1024
    for file in files:
        poll.register(file, select.POLLIN)
    return bool(poll.poll(0))
