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
        """Kill a rank and its process group. `pid` is 0 if its process id is not known yet."""

    def describe(self, rank: int, /) -> str:
        """Describe what a rank was lost with, such as its node, for an error."""
        ...


@dataclass(eq=False)
class Member:
    """A rank, as the launching process sees it. Times are by the monotonic clock."""

    rank: int
    place: str  # its node and host, as in `Connections`
    wire: Wire  # the data wire
    control: Wire
    status: int  # a pipe with records of the server
    transcript: Transcript
    transcripts: Sequence[Transcript]  # that get its output: its own, and that of a call's handle
    # Descriptors of its standard output, under 1, and error, under 2, while they are open
    streams: dict[int, int] = field(default_factory=dict)
    is_read_elsewhere: bool = False  # True: a lane of workers owns and reads `wire`
    record: bytes = b""  # the part of a status record that has arrived
    pid: int = 0  # 0 until the server has reported it
    is_alive: bool = True  # False once its process, and all that it started, have ended
    has_exited: bool = False  # its own process
    exit: Outcome | None = None  # how its process has ended; None before
    wrote_at: float = 0.0
    asked: set[str] = field(default_factory=set)  # words of requests that it has not answered yet
    looked: Status | None = None  # its last answer to "look" during this call
    looked_at: float = 0.0  # when this answer arrived
    steps: int = 0  # how often `should_checkpoint` had returned False when it was preempted
    operations: int | None = None  # collectives that it has begun; None without a process group

    def tell(self, word: str, body: Any = None) -> None:
        """Send a message to its control thread.

        At a limit of this process, nothing is sent. A rank that gets no order to end is killed when
        its time is over.
        """
        with contextlib.suppress(OSError):
            self.control.send(word, body)


class Listener(Protocol):
    """Gets what the ranks report, under the lock of the events."""

    def on_message(self, member: Member, message: Message, /) -> None:
        """Handle a message of a rank."""

    def on_end(self, member: Member, outcome: Outcome, /) -> None:
        """Handle the end of a rank's process."""


class Members:
    """The processes of ranks. The thread of the pool uses it; other threads hold the events' lock.

    Args:
        starter: Starts and kills the processes.
        events: The events of the pool.
        listener: Gets messages of ranks, and their ends.
        grace_s: Seconds between an order to end and the kill.

    Attributes:
        all: The ranks that were started.
        is_ending: True if the ranks were ordered to end.
        is_cancelled: True if the order came from `cancel`.
        lost: Why the ranks had to be ended, such as a failed fork; empty if the reason is a time
            limit or an outcome.
    """

    def __init__(
        self, starter: RankStarter, events: Events, listener: Listener, grace_s: float
    ) -> None:
        self._starter = starter
        self._events = events
        self._listener = listener
        self._grace_s = grace_s
        self._has_killed = False  # True once `_end_by_force` has run
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
        connections = self._starter.start(rank)  # this function owns them until `_take_over`
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
            if member not in self.all:  # no `close` would end the process
                connections.close()  # it exits then
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
        """Watch the connections of a process, and own it from the last line on."""
        with self._events.lock:
            # Apart from the others: a caller may read answers in its own thread
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
        """Send a message to the control thread of a rank. It leaves later if the socket is full."""
        if member.control.is_open:
            member.tell(word, body)
            self._events.update_watch(member.control)

    def receive(self, member: Member, wire: Wire) -> None:
        """Send unsent data, read once, and give the complete messages to the listener."""
        if wire.has_unsent:  # the selector wakes also if the socket has room
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
        # One system call for both streams, which usually have no output
        poll = select.poll()  # select() is limited to descriptors below 1024
        for descriptor in member.streams.values():
            poll.register(descriptor, select.POLLIN)
        if not poll.poll(0):
            return
        for number in list(member.streams):
            while self._read_output(member, number):
                pass

    def _read_output(self, member: Member, number: int) -> bool:
        """Read output of stream 1 or 2, and close it at its end. Return True if there was some."""
        descriptor = member.streams[number]
        try:
            data = os.read(descriptor, _PIECE)
        except BlockingIOError:
            return False
        except ConnectionError:  # the stream is a socket, of a rank on another machine
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
        """Stop watching a wire, and close it."""
        if wire.is_open:
            self._events.forget(wire)
            # `close` alone would not end the connection while a child that the user forked has a
            # copy of the socket
            wire.shut()
            wire.close()

    # -- reports of the server

    def _on_status(self, member: Member) -> None:
        """Read a record of the status pipe.

        A death is known from this pipe, never from another connection.
        """
        try:
            data = os.read(member.status, STATUS.size - len(member.record))
        except ConnectionError:  # as in `_read_output`
            data = b""

        # The end of the pipe: no process of the rank is left, or the server or keeper has died
        if not data:
            if not member.has_exited:
                self._starter.kill(member.rank, member.pid)  # also children, which may have stayed
                # If another rank could not be forked, that is the reason
                lost_with = "" if self.lost else self._starter.describe(member.rank)
                self._on_exit(member, None, lost_with)
            self._forget(member)
            return

        member.record += data
        if len(member.record) < STATUS.size:  # TCP may deliver a record in parts
            return
        word, number = STATUS.unpack(member.record)
        member.record = b""
        if word == STARTED:
            member.pid = number
            if self._has_killed:  # `_end_by_force` did not know the process id
                self._starter.kill(member.rank, number)
        elif word == EXITED:
            self._on_exit(member, number)
        else:  # FAILED
            self.lost = f"the process of rank {member.rank} cannot be forked: {os.strerror(number)}"
            self.end()

    def _on_exit(self, member: Member, code: int | None, lost_with: str = "") -> None:
        """Handle the end of a process, after its last messages and output.

        `code` is None if nothing has reported it. Then `lost_with` says with what it was lost.
        """
        member.has_exited = True
        # Another process may hold a copy of the rank's end: with `shut`, the wire ends all the same
        member.wire.shut()
        if not member.is_read_elsewhere:
            while member.wire.is_open:  # `receive` closes it at its end
                self.receive(member, member.wire)
        self.drain(member)
        member.exit = self._death_of(member, code, lost_with)
        self._listener.on_end(member, member.exit)

    def _death_of(self, member: Member, code: int | None, lost_with: str) -> Outcome:
        """Return the outcome of a rank whose process has ended, if it did not answer."""
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
        # Computed, not counted: an exception between two lines could falsify a counter
        return all(not member.is_alive for member in self.all)

    def end(self) -> None:
        """Order every rank to end. Ranks that are late are killed."""
        if not self.is_ending:
            self.is_ending = True
            self._events.timers.clear()  # those of the call, which ends too
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

        Ranks that are late are killed: ``grace_s`` after an order to end. Ranks that were not
        ordered to end have at least `exit_s` seconds for their exit handlers.
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
            self._wait_for_ends()
        finally:
            if not self.is_over:
                self._abandon()
            self._events.close()
            # The listener and its members refer to each other: without this, their descriptors
            # would stay until the next garbage collection. No report comes after this line
            vars(self).pop("_listener", None)  # `close` may be called again after an error

    def _wait_for_ends(self) -> None:
        # Not in the `try` of `close`: Python 3.13 may leave out the `finally` if a signal handler
        # raises where a `while` goes back
        while not self.is_over:
            self._events.turn()

    def _abandon(self) -> None:
        """Kill the processes without waiting for reports: an error ended the thread of the pool."""
        for member in self.all:
            with contextlib.suppress(Exception):
                if not member.has_exited:
                    self._starter.kill(member.rank, member.pid)
                self._forget(member)

    def _end_by_force(self) -> None:
        """Kill the ranks. The second call gives up those whose end the server does not report."""
        if self._has_killed:
            for member in self.all:
                if member.is_alive:
                    member.has_exited, member.exit = True, Ended(time.time())
                    self._listener.on_end(member, member.exit)
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
        """Note that no process of a rank is alive, and close its connections."""
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
