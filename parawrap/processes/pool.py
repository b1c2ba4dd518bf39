"""Ranks of one machine, and the calls that they make, one after the other.

    any thread ── post ──► the thread of the pool ── wires ──► ranks
                                   ▲ ├── answers, status ◄─────┤
                                   │ └── output ◄──────────────┤
                                   └──── exits ◄── the server that forked them

A launch is: start the ranks, make one call, close. Ranks that stay make any number of calls. The set-up of the ranks is the
first call, with number 0. One thread uses a pool, except for `post`.

Guarantee: after the first failure of a call, a time limit, or `cancel`, the call ends in bounded time. Ranks that stay are
waited for as long as they run C code that an exception cannot interrupt. After `close`, no process of the pool is alive.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import selectors
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from parawrap.processes.main_thread import Status
from parawrap.processes.outcomes import (
    Died,
    Ended,
    Ending,
    Outcome,
    Raised,
    Requeued,
    Returned,
    counts_as_echo,
    first_failure,
)
from parawrap.processes.output import Transcript
from parawrap.processes.pickling import Packed
from parawrap.processes.process import AnswerBody, Assignment, CallBody
from parawrap.processes.server import EXITED, FAILED, STARTED, STATUS, Connections
from parawrap.processes.settings import Changes
from parawrap.processes.wire import Wire

STILL_S = 60.0
"""Seconds that a rank may be idle before the hint."""

STUCK_S = 20.0
"""Seconds that ranks may wait in collectives for ranks that do not take part."""

_LOOK_S = 1.0  # between two looks at the ranks of a call: often enough for limits of a few seconds
_ECHO_S = 1.0  # for the original failure to arrive after an echo of it
_BREAK_S = 1.0  # for a rank to end its call after an interrupt, before its connections are closed
_LINGER_S = 1.0  # that a rank which has returned stays for the others, as docs/launching.md promises
_STACKS_S = 1.0  # a rank answers at once, unless C code holds the GIL
_STACKS_LOOK_S = 0.005  # between two looks for the answers
_LATE_S = 1.0  # a longer delay of this thread means that this process itself was stopped
_GIVE_UP_S = 20.0  # for the server to report the end of killed ranks
_LONGEST_WAIT_S = 3600.0  # selectors reject very long timeouts
_PIECE = 1 << 16  # the size of a pipe in Linux
_NEVER = float("inf")  # by the monotonic clock
_IDLE_S = 5.0  # a rank that was at its place for less is busy
_NO_ANSWER = "no answer within a second: the rank is stopped, or runs code that holds the GIL"
_log = logging.getLogger("parawrap.launch")


@dataclass(frozen=True)
class Limits:
    """The time limits of a pool.

    Attributes:
        grace_s: Seconds for ranks to clean up before they are killed, and to save when they are preempted.
        timeout_min: Minutes for each call.
        hang_s: Seconds without output and without progress of any rank.
        up_at: When `timeout_min` is over for the whole launch, by the monotonic clock. None counts it per call.
    """

    grace_s: float
    timeout_min: float | None = None
    hang_s: float | None = None
    up_at: float | None = None

    def end_of(self, began: float) -> float:
        """Return the end of a call that began at this time."""
        if self.up_at is not None or self.timeout_min is None:
            return _NEVER if self.up_at is None else self.up_at
        return began + 60 * self.timeout_min


@dataclass
class Call:
    """One call of a function on some ranks, and its state. Times are by the monotonic clock.

    Attributes:
        name: The function's name.
        ranks: The ranks that call the function. The others take the globals that come with it.
        packed: The pickled call.
        files: Descriptors that the function gets as its first arguments. `Pool.call` closes them.
        changes: Changed settings of the script, for ranks that stay.
        transcripts: Get a copy of the output during the call.
        outcomes: How the ranks have ended, by rank.
        number: The number of the call among those of the pool.
        has_begun: True once it was sent to the ranks.
        is_cancelled: True if it was interrupted by `Pool.interrupt` and is to have no results.
        has_output: True if a rank wrote output during the call.
        has_loaded: False if a rank could not unpickle the call.
        departed_at: When the last rank ended the call; the begin of the call before.
        last_sign: When a rank last wrote output, made progress, or ended the call.
        looked_at: When the pool last looked at the ranks.
        is_halting: True once the ranks that still run it are interrupted; `by_user` if the user did.
        is_broken: True once connections between the ranks were closed.
        is_deadlocked: True if its ranks waited for ranks that do not take part.
        has_hinted: True once the hint was logged.
    """

    name: str
    ranks: Sequence[int]
    packed: Packed | None = None
    files: Sequence[int] = ()
    changes: Changes | None = None
    transcripts: Mapping[int, Transcript] = field(default_factory=dict)
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    number: int = 0
    has_begun: bool = False
    is_cancelled: bool = False
    has_output: bool = False
    has_loaded: bool = True
    departed_at: float = 0.0
    last_sign: float = 0.0
    looked_at: float = 0.0
    is_halting: bool = False
    by_user: bool = False
    is_broken: bool = False
    is_deadlocked: bool = False
    has_hinted: bool = False


@dataclass
class _Member:
    """A rank, as the pool sees it."""

    rank: int
    wire: Wire
    control: Wire
    status: int
    transcript: Transcript
    streams: dict[int, int]
    pid: int = 0
    is_alive: bool = True  # the process, or one that it started
    has_exited: bool = False
    asked: set[str] = field(default_factory=set)  # not answered yet
    looked: Status | None = None
    looked_at: float = 0.0
    answered: int | None = None
    operations: int | None = None


class Starter(Protocol):
    """Starts the ranks of one launch, on this machine or on others."""

    def start(self, rank: int) -> Connections:
        """Start a rank. Raise LaunchError if its process cannot be started."""
        ...

    def kill(self, rank: int, pid: int, /) -> None:
        """Kill a rank and its process group. `pid` is 0 before its start."""

    def load(self, names: Sequence[str], /) -> None:
        """Import modules in advance for later ranks, if the process that forks them stays."""

    def describe(self, rank: int, /) -> str:
        """Describe the thing that the rank was lost with, if its connection ended."""
        ...

    def place_of(self, rank: int, /) -> str:
        """Return the node and host of a rank, such as ``"node 0, worker-17"``."""
        ...


class Pool:
    """The ranks of one launch, or those that stay.

    Args:
        starter: Starts the processes.
        assignments: The first message of each rank, by rank.
        transcripts: One per rank.
        limits: The time limits.
        stays: True if the ranks stay after a call.
        wants_groups: True if the ranks need process groups at each call.
        watches: False for ranks that may be idle in a call.

    Attributes:
        is_over: True once no process of the pool is alive.
        is_ending: True if the ranks were ordered to end.
        idle_deaths: How ranks that stay have died between two calls.
        preempted: True if the ranks were ordered to save and exit.
        cancelled: True if `cancel` ended the ranks.
        timed_out: The time limit that ended them.
        lost: Another reason why they had to be ended.
        stacks: The stacks of the ranks that ran a call at the last `collect_stacks`.
        owned: Called with the globals that functions of a rank have assigned, and those that they have deleted.
    """

    def __init__(
        self,
        starter: Starter,
        assignments: Sequence[Assignment],
        transcripts: Sequence[Transcript],
        limits: Limits,
        *,
        stays: bool = False,
        wants_groups: bool = True,
        watches: bool = True,
    ) -> None:
        self._starter = starter
        self._assignments = assignments
        self._transcripts = transcripts
        self._limits = limits
        self._stays = stays
        self._wants_groups = wants_groups
        self._watches = watches
        self._selector = selectors.DefaultSelector()
        self._posted: deque[Callable[[], object]] = deque()
        self._woken, self._waker = os.pipe()
        os.set_blocking(self._waker, False)
        self._selector.register(self._woken, selectors.EVENT_READ, self._run_posted)
        self._members: list[_Member] = []
        self._timers: dict[Callable[[], object], float] = {}  # actions, and when they are due
        self._call: Call | None = None  # that runs
        self._generation = 0
        self._must_regroup = False
        self._number = 0
        self.is_ending = False
        self._has_killed = False
        self._is_set_up = False
        self._preempts = False  # before the call
        self._unanswered: set[int] = set()
        self.idle_deaths: dict[int, Outcome] = {}
        self.preempted = False
        self.cancelled = False
        self.timed_out = ""
        self.lost = ""
        self.stacks: dict[int, str] = {}
        self.owned: Callable[[list[Any], list[Any]], None] = lambda *_: None

    # -- any thread

    def post(self, act: Callable[[], object]) -> None:
        """Run `act` in the thread of the pool. After `close`, do nothing."""
        self._posted.append(act)
        with contextlib.suppress(OSError):  # closed, or woken already
            os.write(self._waker, b"!")

    def state_of(self, rank: int) -> str:
        """Describe the state of a rank."""
        call = self._call
        if not self._is_set_up:
            return "starting"
        if call is not None and rank in call.ranks:
            outcome = call.outcomes.get(rank)
            return "running" if outcome is None else outcome.summary
        return "idle"

    # -- the thread of the pool

    @property
    def is_over(self) -> bool:
        return not any(member.is_alive for member in self._members)

    @property
    def has_given_up(self) -> bool:
        """True if the ranks were ended for another reason than an outcome of a rank."""
        return bool(self.cancelled or self.timed_out or self.lost)

    def fork(self) -> None:
        """Start the processes.

        Raises:
            LaunchError: If a process cannot be started.
        """
        for rank, (assignment, transcript) in enumerate(zip(self._assignments, self._transcripts, strict=True)):
            if self.cancelled:
                return
            data, control, status, streams = self._starter.start(rank)
            member = _Member(rank, Wire(data), Wire(control), status, transcript, dict(enumerate(streams, start=1)))
            self._members.append(member)
            self._watch(member.wire, partial(self._on_answer, member))
            self._watch(member.control, partial(self._on_word, member))
            self._watch(status, partial(self._on_status, member))
            for number, file in member.streams.items():
                os.set_blocking(file, False)
                self._watch(file, partial(self._on_output, member, number))
            member.wire.send("assignment", assignment)

    def set_up(self) -> Ending:
        """Wait until all ranks are set up."""
        ending = self._supervise(Call("the set-up", range(len(self._assignments)), has_begun=True))
        self._is_set_up = ending.is_success
        return ending

    def call(self, call: Call) -> Ending:
        """Make a call, and wait until all its ranks have ended it. Return how they ended."""
        self._number += 1
        if self._must_regroup:
            self._generation += 1
        generation = self._generation if self._must_regroup else None
        is_regrouping, self._must_regroup = self._must_regroup, False
        for member in self._members:
            is_called = member.rank in call.ranks
            if is_called or is_regrouping or self._stays:
                body = CallBody(self._number, call.changes, is_called, generation)
                member.wire.send("call", body, call.packed, call.files)
        for file in call.files:  # so that the ranks alone hold the other ends
            os.close(file)
        call.number, call.packed, call.has_begun = self._number, None, True
        return self._supervise(call)

    def turn(self, until: float = _NEVER) -> None:
        """Wait for events until a time, handle them, and do what is due."""
        until = min(until, *self._timers.values(), _NEVER)
        patience_s = min(max(0.0, until - time.monotonic()), _LONGEST_WAIT_S)
        for key, _ in self._selector.select(patience_s):
            if self._selector.get_map().get(key.fd) is key:  # not closed by an earlier handler
                key.data()
        now = time.monotonic()
        for act, at in list(self._timers.items()):
            if now >= at == self._timers.get(act):  # not changed by an earlier action
                del self._timers[act]
                act()

    def close(self) -> None:
        """Let the ranks exit, and wait until no process is alive. Ranks that are late are killed."""
        for member in self._members:
            self._drop(member.wire)
        kill_at = time.monotonic() + self._limits.grace_s
        self._timers = {self._end_by_force: self._timers.get(self._end_by_force, kill_at)}
        while not self.is_over:
            self.turn()
        self._selector.close()
        woken, waker = self._woken, self._waker
        self._waker = -1  # `post` may come in between
        os.close(woken)
        os.close(waker)

    def end(self) -> None:
        """Order every rank to end. Those that are late are killed."""
        if not self.is_ending:
            self.is_ending = True
            self._timers = {self._end_by_force: time.monotonic() + self._limits.grace_s}
            for member in self._members:
                member.control.send("end")

    def cancel(self) -> None:
        """End every rank, unless they are ending already."""
        if not self.is_ending:
            self.cancelled = True
            self.end()

    def interrupt(self, call: Call, *, cancels: bool = False) -> None:
        """Raise KeyboardInterrupt in the function of each rank that runs this call."""
        call.is_cancelled = call.is_cancelled or cancels
        if self._call is call:
            self._halt(by_user=True)

    def preempt(self) -> None:
        """Order the ranks to save and exit. Ranks that still run after ``grace_s`` are ended.

        All ranks save in the same loop iteration: the first one that no rank has reached yet. So each rank reports how
        often `should_checkpoint` has returned False, and further calls block until that iteration is known. The rank's
        control thread reports it, because the main thread of a rank that is ahead may wait in a collective.
        """
        if self.is_ending or self.preempted or self._stays:
            return
        if self._call is None:
            self._preempts = True
            return
        self._timers[self.end] = time.monotonic() + self._limits.grace_s
        self.preempted = True
        asked = self._running() if self._call.number > 0 else self._members  # some may have ended the set-up
        self._unanswered = {member.rank for member in asked}
        for member in asked:
            member.control.send("preempt")

    def collect_stacks(self) -> None:
        """Ask each rank that runs a call for its stacks, unless a time limit has asked for them."""
        if not self.timed_out:
            self.stacks = {member.rank: _NO_ANSWER for member in self._running()}
            for member in self._running():
                self._ask(member, "stacks")

    def _running(self) -> list[_Member]:
        call = self._call
        if call is None:
            return []
        return [self._members[rank] for rank in call.ranks if rank not in call.outcomes]

    def _ask(self, member: _Member, word: str) -> None:
        """Ask a rank for an answer. A stopped process never answers, so nothing is asked twice."""
        if word not in member.asked:
            member.asked.add(word)
            member.control.send(word)

    def _watch(self, file: Any, act: Callable[[], object]) -> None:
        self._selector.register(file, selectors.EVENT_READ, act)

    def _drop(self, wire: Wire) -> None:
        if wire.fileno() >= 0:
            self._selector.unregister(wire)
            wire.close()

    def _run_posted(self) -> None:
        os.read(self._woken, 4096)
        while self._posted:
            self._posted.popleft()()

    # -- the course of a call

    def _supervise(self, call: Call) -> Ending:
        now = call.departed_at = call.last_sign = call.looked_at = time.monotonic()
        self._call = call
        if not self.is_ending:
            self._timers[self._time_is_up] = self._limits.end_of(now)
            if self._watches:
                self._timers[self._look] = now + self._look_s()
            if self._preempts:
                self.preempt()
            if self.preempted:  # during the set-up
                self._timers[self.end] = now + self._limits.grace_s
        self.stacks = {}
        for member in self._members:
            member.looked = None
            if member.has_exited:
                self._settle(member, self._death_of(member, None))
        while len(call.outcomes) < len(call.ranks) and not (self.cancelled and self.is_over):
            self.turn()
        self._call = None
        if not self.is_ending:
            self._timers.clear()
        if self._stays and self._wants_groups and call.number > 0:
            self._must_regroup = self._needs_groups(call)
        return Ending(
            dict(sorted(call.outcomes.items())),
            self.places(),
            stacks=self.stacks,
            timed_out=self.timed_out,
            deadlocked=call.is_deadlocked,
            cancelled=call.is_cancelled or (self.cancelled and not self.lost),
            lost=self.lost,
        )

    def places(self) -> dict[int, str]:
        """Return the node and host of each rank."""
        return {member.rank: self._starter.place_of(member.rank) for member in self._members}

    def _needs_groups(self, call: Call) -> bool:
        """True if process groups are broken or destroyed, or if ranks are out of step after a failure."""
        operations = {member.operations for member in self._members}
        return call.is_broken or None in operations or (call.is_halting and len(operations) > 1)

    def _settle(self, member: _Member, outcome: Outcome) -> None:
        """Note how a rank has ended the call, and decide what happens to the others."""
        call = self._call
        if call is None or member.rank in call.outcomes or member.rank not in call.ranks:
            return
        if isinstance(outcome, Raised):
            member.transcript.record(outcome.traceback)
            if self.preempted and self.is_ending:  # the rank was late, and its clean-up failed
                outcome = Ended(outcome.at)
        call.outcomes[member.rank] = outcome
        now = call.last_sign = call.departed_at = time.monotonic()
        if call.number > 0:
            self._agree_on_checkpoint(member.rank)
        if self.is_ending:
            return
        if isinstance(outcome, Died) and self._stays:
            self.end()
        elif isinstance(outcome, Requeued):
            self._timers.setdefault(self.end, now + self._limits.grace_s)
            self._timers.pop(self._halt, None)  # the reported echo came from this exit
        elif isinstance(outcome, (Raised, Died)) and (first := first_failure(call.outcomes)) is not None:
            if not counts_as_echo(call.outcomes[first]):
                self._halt()
            elif not call.is_halting:  # the original failure may follow
                self._timers.setdefault(self._halt, now + _ECHO_S)

    def _halt(self, *, by_user: bool = False) -> None:
        """End the call in the ranks that still run it: their processes end too, unless they stay."""
        call = self._call
        assert call is not None
        if not self._stays or call.number == 0:
            self.end()
            return
        if self.is_ending or (call.is_halting and not (by_user and not call.by_user)):
            return
        call.is_halting, call.by_user = True, by_user
        now = time.monotonic()
        self._timers.pop(self._halt, None)
        self._timers[self._break_connections] = self._timers[self._look] = now + _BREAK_S
        if by_user:
            self._timers[self._lose] = now + max(self._limits.grace_s, 2 * _BREAK_S)
        for member in self._running():
            member.control.send("interrupt", (call.number, by_user))

    # -- what is due

    def _break_connections(self) -> None:
        """Close the connections between the ranks that still run the call, because they may wait in a collective."""
        assert self._call is not None
        self._call.is_broken = True
        for member in self._running():
            member.control.send("break")

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
            self._kill(member)

    def _lose(self) -> None:
        running = ", ".join(str(member.rank) for member in self._running())
        self.lost = (
            f"rank(s) {running} did not stop within grace_s={self._limits.grace_s:g} after the call had failed or was "
            "interrupted"
        )
        self.end()

    def _time_is_up(self) -> None:
        self._end_with_stacks(f"not done after timeout_min={self._limits.timeout_min:g} minutes")

    def _end_with_stacks(self, limit: str = "") -> None:
        """Ask the ranks that run for their stacks, then end all ranks."""
        self.collect_stacks()
        self.timed_out = limit
        self._timers = {self._end_without_stacks: time.monotonic() + _STACKS_S}

    def _end_without_stacks(self) -> None:
        self.end()

    # -- looks at ranks

    def _look_s(self) -> float:
        return min(_LOOK_S, STILL_S / 4, STUCK_S / 4, (self._limits.hang_s or STILL_S) / 4)

    def _look(self) -> None:
        """Act on the last looks at ranks, and look again."""
        call, now = self._call, time.monotonic()
        assert call is not None
        self._timers[self._look] = now + self._look_s()
        if now - call.looked_at > self._look_s() + _LATE_S:  # this process itself was stopped, and has read nothing since
            call.last_sign = now
        call.looked_at = now
        running = self._running()
        seen = [(member, member.looked) for member in running if member.looked is not None]
        for member, looked in seen:
            call.last_sign = max(call.last_sign, member.looked_at - looked.idle_s)
        if call.is_halting:
            # Other ranks run C code, which is waited for, unless it waits in a group whose connections cannot be found.
            if any(each.interrupted == call.number or (call.is_broken and each.waits_s) for _, each in seen):
                self._timers.setdefault(self._lose, now + self._limits.grace_s)
        elif call.number > 0:
            self._judge(call, running, now)
        for member in self._running():
            self._ask(member, "look")

    def _judge(self, call: Call, running: Sequence[_Member], now: float) -> None:
        """Log a hint, or end ranks that hang or wait forever."""
        hang_s = self._limits.hang_s
        if hang_s is not None and now - call.last_sign >= hang_s:
            self._end_with_stacks(f"silent for hang_timeout_s={hang_s:g} seconds")
        elif len(running) < len(self._members) and self._wait_forever(call, running, now):
            self._end_waits(call)
        elif not call.has_hinted and any(each.looked is not None and each.looked.idle_s >= STILL_S for each in running):
            call.has_hinted = True
            places = "; ".join(f"rank {member.rank} {self._place_of(member, now)}" for member in running)
            _log.warning("no progress for %g s; the launch continues, unless hang_timeout_s ends it. %s", STILL_S, places)

    def _end_waits(self, call: Call) -> None:
        """End ranks that wait for ranks which do not take part: to restart, or with an error that has their stacks."""
        if self.preempted or any(isinstance(each, Requeued) for each in call.outcomes.values()):
            self.end()
            return
        call.is_deadlocked = True
        if self._stays:
            self.collect_stacks()
            self._halt()
        else:
            self._end_with_stacks()

    def _place_of(self, member: _Member, now: float) -> str:
        if member.looked is None or now - member.looked_at > 3 * self._look_s():
            return "does not answer"
        idle_s = member.looked.idle_s  # that of ranks in one collective differs by a second or two
        return f"{f'idle for {idle_s:.0f} s at' if idle_s >= _IDLE_S else 'busy at'} {member.looked.place}"

    def _wait_forever(self, call: Call, running: Sequence[_Member], now: float) -> bool:
        """True if all running ranks have waited for other ranks for `STUCK_S` since the last one ended the call."""
        return now - call.departed_at >= STUCK_S and all(
            member.looked is not None and member.looked.waits_s >= STUCK_S for member in running
        )

    def _agree_on_checkpoint(self, rank: int) -> None:
        """Note that this rank has answered or ended. Once all have, send them the call that returns True."""
        if self._unanswered == {rank}:
            due_from = max((member.answered for member in self._members if member.answered is not None), default=0)
            for member in self._members:
                member.control.send("checkpoint", due_from)
        self._unanswered.discard(rank)

    # -- reports about ranks

    def _on_answer(self, member: _Member) -> None:
        message = member.wire.receive()
        if message is None:  # it has exited, or is about to
            self._drop(member.wire)
            return
        self._drain(member)
        body: AnswerBody = message.body
        member.operations = body.operations
        if body.owned is not None:
            self.owned(*body.owned)
        if body.modules:
            self._starter.load(body.modules)
        call = self._call
        if call is None or body.number != call.number:
            return
        call.has_loaded = call.has_loaded and body.has_loaded
        outcome = body.outcome
        if isinstance(outcome, Returned):
            assert message.value is not None
            outcome = Returned(outcome.at, message.value)
            if not self._stays and body.number > 0:  # so that collectives of the others raise an error
                self._timers[partial(self._drop, member.wire)] = time.monotonic() + _LINGER_S
        elif isinstance(outcome, Ended) and not (self.is_ending or call.is_halting):  # by a signal from outside
            outcome = Died(outcome.at, member.pid, -signal.SIGTERM)
        self._settle(member, outcome)

    def _on_word(self, member: _Member) -> None:
        message = member.control.receive()
        if message is None:
            self._drop(member.control)
            return
        member.asked.discard(message.word)
        if message.word == "look":
            member.looked, member.looked_at = message.body, time.monotonic()
        elif message.word == "stacks":
            self.stacks[member.rank] = message.body
            if self._end_without_stacks in self._timers and _NO_ANSWER not in self.stacks.values():
                self.end()
        elif message.word == "answered":
            member.answered = message.body
            self._agree_on_checkpoint(member.rank)

    def _on_output(self, member: _Member, number: int) -> bool:
        """Read output, and return True if there was some."""
        file = member.streams[number]
        try:
            data = os.read(file, _PIECE)
        except BlockingIOError:
            return False
        if not data:
            self._selector.unregister(file)
            os.close(member.streams.pop(number))
            return False
        member.transcript.write(number, data)
        if (call := self._call) is not None:
            call.has_output = True
            if member.rank in call.transcripts:
                call.transcripts[member.rank].write(number, data)
            call.last_sign = time.monotonic()
        return True

    def _drain(self, member: _Member) -> None:
        """Read the output so far. Do not wait for end of file: a child of the rank may hold the pipes open."""
        for number in list(member.streams):
            while number in member.streams and self._on_output(member, number):
                pass

    def _on_status(self, member: _Member) -> None:
        record = os.read(member.status, STATUS.size)
        if len(record) < STATUS.size:  # all processes of the rank have ended, or the server died, which killed it
            if not member.has_exited:
                self._on_exit(member, None, self._starter.describe(member.rank))
            self._forget(member)
            return
        word, number = STATUS.unpack(record)
        if word == STARTED:
            member.pid = number
            if self._has_killed:
                self._kill(member)
        elif word == FAILED:
            self.lost = f"the process of rank {member.rank} cannot be forked: {os.strerror(number)}"
            self._on_exit(member, None)
            self._forget(member)
            self.end()
        elif word == EXITED:
            self._on_exit(member, number)

    def _on_exit(self, member: _Member, code: int | None, lost_with: str = "") -> None:
        """Handle the end of a process, after its last messages and output."""
        member.has_exited = True
        while member.wire.fileno() >= 0 and _is_readable(member.wire):
            self._on_answer(member)
        self._drain(member)
        outcome = self._death_of(member, code, lost_with)
        if self._call is None and self._stays and isinstance(outcome, Died):
            self.idle_deaths[member.rank] = outcome
        self._settle(member, outcome)

    def _death_of(self, member: _Member, code: int | None, lost_with: str = "") -> Outcome:
        by_order = self.is_ending and code in (None, 1, -signal.SIGTERM)
        if not lost_with and (by_order or (self._has_killed and code == -signal.SIGKILL) or self.lost):
            return Ended(time.time())
        return Died(time.time(), member.pid, code, last_words=member.transcript.last_words(), lost_with=lost_with)

    # -- the end of processes

    def _kill(self, member: _Member) -> None:
        if not member.has_exited:
            self._starter.kill(member.rank, member.pid)

    def _forget(self, member: _Member) -> None:
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


def stacks_of(pool: Pool) -> dict[int, str]:
    """Return the stacks of every rank that runs a call. Any other thread than the pool's may call it.

    A rank that does not answer within a second has a text that says so.
    """
    until = time.monotonic() + _STACKS_S
    asked = threading.Event()

    def ask() -> None:
        pool.collect_stacks()
        asked.set()

    pool.post(ask)
    asked.wait(_STACKS_S)
    while _NO_ANSWER in (found := dict(pool.stacks)).values() and time.monotonic() < until:
        time.sleep(_STACKS_LOOK_S)
    return found
