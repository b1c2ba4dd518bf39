"""Ranks of one machine, and the calls that they make, one after the other.

    any thread ── post ──► the thread of the pool ── wires ──► ranks
                                   ▲ ├── answers, status ◄─────┤
                                   │ └── output ◄──────────────┤
                                   └──── exits ◄── the server that forked them

A launch is: start the ranks, make one call, close. Ranks that stay make any number of calls. The set-up of the ranks is the
first call, with number 0.

Guarantee: after the first failure of a call, a time limit, or `cancel`, the call ends in bounded time. Ranks that stay are
waited for as long as they run C code that an exception cannot interrupt. After `close`, no process of the pool is alive.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

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
from parawrap.processes.pool_members import Member, Members, Starter
from parawrap.processes.rank_process import Answer, Assignment, CallHead
from parawrap.processes.settings import Changes
from parawrap.processes.wire import Message

STILL_S = 60.0
"""Seconds that a rank may be idle before the hint."""

STUCK_S = 20.0
"""Seconds that ranks may wait in collectives for ranks that do not take part."""

_LOOK_S = 1.0  # between two looks at the ranks of a call: often enough for limits of a few seconds
_ECHO_S = 1.0  # for the original failure to arrive after an echo of it
_BREAK_S = 1.0  # for a rank to end its call after an interrupt, before its connections are closed
_LINGER_S = 1.0  # that a rank which has returned stays for the others, as docs/launching.md promises
_STACKS_S = 1.0  # a rank answers at once, unless C code holds the GIL
_LATE_S = 1.0  # a longer delay of this thread means that this process itself was stopped
_NO_ANSWER = "no answer within a second: the rank is stopped, or runs code that holds the GIL"
_log = logging.getLogger("parawrap.launch")


@dataclass
class Call:
    """One call of a function on some ranks, and its state. Times are by the monotonic clock."""

    name: str  # of the function
    ranks: Sequence[int]  # that call it; the others take the globals that come with it
    packed: Packed | None = None
    files: Sequence[int] = ()  # descriptors that the function gets as its first arguments; `Pool.call` closes them
    changes: Changes | None = None  # of the script's settings, for ranks that stay
    transcripts: Mapping[int, Transcript] = field(default_factory=dict)  # get a copy of the output during the call
    outcomes: dict[int, Outcome] = field(default_factory=dict)  # of the ranks that have ended it
    number: int = 0  # from 1, once it was sent; the set-up has number 0
    is_cancelled: bool = False  # interrupted by `Pool.interrupt`, and to have no results
    has_output: bool = False  # a rank wrote output during the call
    has_loaded: bool = True  # False if a rank could not unpickle the call, or was interrupted before
    departed_at: float = 0.0  # when the last rank ended the call; the begin of the call before
    last_sign: float = 0.0  # when a rank last wrote output, made progress, or ended the call
    looked_at: float = 0.0  # when the pool last looked at the ranks
    is_halting: bool = False  # the ranks that still run it are interrupted
    by_user: bool = False  # ... by the user
    is_broken: bool = False  # connections between the ranks were closed
    is_deadlocked: bool = False  # its ranks waited for ranks that do not take part
    has_hinted: bool = False  # the hint was logged

    @property
    def has_begun(self) -> bool:
        """True once it was sent to the ranks."""
        return self.number > 0


class Pool(Members):
    """The ranks of one launch, or those that stay. One thread uses it, except for `post`, `state_of`, and `stacks`.

    Args:
        starter: Starts the processes.
        assignments: The first message of each rank, by rank.
        transcripts: One per rank.
        timeout_min: Minutes for each call.
        up_at: When `timeout_min` is over for the whole launch, by the monotonic clock. None counts it per call.
        hang_s: Seconds without output and without progress of any rank.
        watches: False for ranks that may be idle in a call.

    Attributes:
        idle_deaths: How ranks that stay have died between two calls.
        preempted: True if the ranks were ordered to save and exit.
        owned: Called with the globals that functions of a rank have assigned, and those that they have deleted.
    """

    def __init__(
        self,
        starter: Starter,
        assignments: Sequence[Assignment],
        transcripts: Sequence[Transcript],
        *,
        timeout_min: float | None = None,
        up_at: float | None = None,
        hang_s: float | None = None,
        watches: bool = True,
    ) -> None:
        super().__init__(starter, assignments, transcripts)
        self._timeout_min = timeout_min
        self._up_at = up_at
        self._hang_s = hang_s
        self._stays = assignments[0].stays
        self._watches = watches
        self._look_s = _LOOK_S if hang_s is None else min(_LOOK_S, hang_s / 4)
        self._call: Call | None = None  # that runs
        self._number = 0  # of the last call
        self._generation = 0  # of the process groups
        self._has_groups = False
        self._must_regroup = False
        self._is_set_up = False
        self._timed_out = ""  # the time limit that ended the ranks
        self._unanswered: set[int] = set()  # ranks that have not reported their steps
        self._stacks: dict[int, str] = {}  # of the ranks that ran a call at the last request
        self._has_stacks = threading.Event()
        self.idle_deaths: dict[int, Outcome] = {}
        self.preempted = False
        self.owned: Callable[[list[Any], list[Any]], None] = lambda *_: None

    # -- any thread

    def state_of(self, rank: int) -> str:
        """Describe the state of a rank."""
        call = self._call
        if not self._is_set_up:
            return "starting"
        if call is not None and rank in call.ranks:
            outcome = call.outcomes.get(rank)
            return "running" if outcome is None else outcome.summary
        return "idle"

    def stacks(self) -> dict[int, str]:
        """Return the stacks of every rank that runs a call.

        A rank that does not answer within a second has a text that says so.
        """
        self._has_stacks.clear()
        self.post(self._ask_for_stacks)
        self._has_stacks.wait(_STACKS_S)
        return dict(self._stacks)

    # -- the thread of the pool

    def set_up(self) -> Ending:
        """Wait until all ranks are set up."""
        ending = self._supervise(Call("the set-up", range(len(self._assignments))))
        self._is_set_up = ending.is_success
        self._has_groups = all(member.operations is not None for member in self._members)
        return ending

    def call(self, call: Call) -> Ending:
        """Make a call, and wait until all its ranks have ended it. Return how they ended."""
        self._number += 1
        self._generation += self._must_regroup
        generation = self._generation if self._must_regroup else None
        for member in self._members:
            is_called = member.rank in call.ranks
            if is_called or self._stays:
                head = CallHead(self._number, call.changes, is_called, generation)
                member.wire.send("call", head, call.packed, call.files)
        for file in call.files:  # so that the ranks alone hold the other ends
            os.close(file)
        call.number, call.packed = self._number, None
        ending = self._supervise(call)
        operations = {member.operations for member in self._members}
        is_out_of_step = call.is_halting and len(operations) > 1
        has_old_groups = generation is not None and not call.has_loaded
        self._must_regroup = self._has_groups and (call.is_broken or None in operations or is_out_of_step or has_old_groups)
        return ending

    def interrupt(self, call: Call, *, cancels: bool = False) -> None:
        """Raise KeyboardInterrupt in the function of each rank that runs this call."""
        call.is_cancelled = call.is_cancelled or cancels
        if self._call is call:
            self._halt(by_user=True)

    def preempt(self) -> None:
        """Order the ranks to save and exit, after `fork`. Ranks that still run after ``grace_s`` are ended.

        All ranks save in the same loop iteration: the first one that no rank has reached yet. So each rank reports how
        often `should_checkpoint` has returned False, and further calls block until that iteration is known. The rank's
        control thread reports it, because the main thread of a rank that is ahead may wait in a collective.
        """
        if self.is_ending or self.preempted or self._stays:
            return
        self.preempted = True
        self._timers[self.end] = time.monotonic() + self._grace_s
        asked = self._running() if self._number > 0 else self._members  # some may have ended the set-up
        self._unanswered = {member.rank for member in asked}
        for member in asked:
            member.control.send("preempt")

    def _running(self) -> list[Member]:
        call = self._call
        if call is None:
            return []
        return [self._members[rank] for rank in call.ranks if rank not in call.outcomes]

    # -- the course of a call

    def _supervise(self, call: Call) -> Ending:
        now = call.departed_at = call.last_sign = call.looked_at = time.monotonic()
        self._call = call
        if not self.is_ending:
            if self._timeout_min is not None:
                self._timers[self._time_is_up] = self._up_at or now + 60 * self._timeout_min
            if self._watches:
                self._timers[self._look] = now + self._look_s
            if self.preempted:  # during the start
                self._timers[self.end] = now + self._grace_s
        self._stacks = {}
        for member in self._members:
            member.looked = None
            copies = (call.transcripts[member.rank],) if member.rank in call.transcripts else ()
            member.transcripts = [member.transcript, *copies]
            if member.has_exited:
                self._settle(member, self._death_of(member, None))
        while len(call.outcomes) < len(call.ranks) and not (self._cancelled and self.is_over):
            self.turn()
        self._call = None
        call.has_output = any(member.wrote_at >= now for member in self._members)
        if not self.is_ending:
            self._timers.clear()
        return Ending(
            dict(sorted(call.outcomes.items())),
            self.places(),
            stacks=self._stacks,
            timed_out=self._timed_out,
            deadlocked=call.is_deadlocked,
            cancelled=call.is_cancelled or (self._cancelled and not self._lost),
            lost=self._lost,
        )

    def _settle(self, member: Member, outcome: Outcome) -> None:
        """Note how a rank has ended the call, and decide what happens to the others."""
        call = self._call
        if call is None and self._stays and isinstance(outcome, Died):
            self.idle_deaths[member.rank] = outcome
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
            self._timers.setdefault(self.end, now + self._grace_s)
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
            self._timers[self._lose] = now + max(self._grace_s, 2 * _BREAK_S)
        for member in self._running():
            member.control.send("interrupt", call.number)

    def _agree_on_checkpoint(self, rank: int) -> None:
        """Note that this rank has answered or ended. Once all have, send them the call that returns True."""
        if self._unanswered == {rank}:
            for member in self._members:
                member.control.send("checkpoint", max(each.steps for each in self._members))
        self._unanswered.discard(rank)

    # -- what is due

    def _break_connections(self) -> None:
        """Close the connections between the ranks that still run the call, because they may wait in a collective."""
        assert self._call is not None
        self._call.is_broken = True
        for member in self._running():
            member.control.send("break")

    def _lose(self) -> None:
        running = ", ".join(str(member.rank) for member in self._running())
        self._lost = (
            f"rank(s) {running} did not stop within grace_s={self._grace_s:g} after the call had failed or was interrupted"
        )
        self.end()

    def _time_is_up(self) -> None:
        self._end_with_stacks(f"not done after timeout_min={self._timeout_min:g} minutes")

    def _end_with_stacks(self, limit: str = "") -> None:
        """Ask the ranks that run for their stacks, then end all ranks."""
        self._ask_for_stacks()
        self._timed_out = limit
        self._timers = {self._end_without_stacks: time.monotonic() + _STACKS_S}

    def _end_without_stacks(self) -> None:
        self.end()

    # -- looks at ranks

    def _ask(self, member: Member, word: str) -> None:
        """Ask a rank for an answer. A stopped process never answers, so nothing is asked twice."""
        if word not in member.asked:
            member.asked.add(word)
            member.control.send(word)

    def _ask_for_stacks(self) -> None:
        """Ask each rank that runs a call for its stacks, unless a time limit has asked for them."""
        if not self._timed_out:
            self._stacks = {member.rank: _NO_ANSWER for member in self._running()}
            for member in self._running():
                self._ask(member, "stacks")
        if not self._stacks:
            self._has_stacks.set()

    def _look(self) -> None:
        """Act on the last looks at ranks, and look again."""
        call, now = self._call, time.monotonic()
        assert call is not None
        self._timers[self._look] = now + self._look_s
        if now - call.looked_at > self._look_s + _LATE_S:  # this process itself was stopped, and has read nothing since
            call.last_sign = now
        call.looked_at = now
        running = self._running()
        seen = [(member, member.looked) for member in running if member.looked is not None]
        signs = [member.looked_at - looked.idle_s for member, looked in seen]
        call.last_sign = max(call.last_sign, *signs, *(member.wrote_at for member in self._members))
        if call.is_halting:
            # Other ranks run C code, which is waited for, unless it waits in a group whose connections cannot be found.
            if any(each.interrupted == call.number or (call.is_broken and each.waits_s) for _, each in seen):
                self._timers.setdefault(self._lose, now + self._grace_s)
        elif call.number > 0:
            self._judge(call, running, now)
        for member in self._running():
            self._ask(member, "look")

    def _judge(self, call: Call, running: Sequence[Member], now: float) -> None:
        """Log a hint, or end ranks that hang, or that wait for ranks which do not take part."""
        if self._hang_s is not None and now - call.last_sign >= self._hang_s:
            self._end_with_stacks(f"silent for hang_timeout_s={self._hang_s:g} seconds")
        elif (
            len(running) < len(self._members)
            and now - call.departed_at >= STUCK_S
            and all(each.looked is not None and each.looked.waits_s >= STUCK_S for each in running)
        ):
            self._end_waits(call)
        elif not call.has_hinted and any(each.looked is not None and each.looked.idle_s >= STILL_S for each in running):
            call.has_hinted = True
            places = "; ".join(
                f"rank {each.rank} idle for {now - each.looked_at + each.looked.idle_s:.0f} s at {each.looked.place}"
                if each.looked is not None
                else f"rank {each.rank} does not answer"
                for each in running
            )
            _log.warning("no progress for %g s; the launch continues, unless hang_timeout_s ends it. %s", STILL_S, places)

    def _end_waits(self, call: Call) -> None:
        """End ranks that wait for ranks which do not take part: to restart, or with an error that has their stacks."""
        if self.preempted or any(isinstance(each, Requeued) for each in call.outcomes.values()):
            self.end()
            return
        call.is_deadlocked = True
        if self._stays:
            self._ask_for_stacks()
            self._halt()
        else:
            self._end_with_stacks()

    # -- messages of ranks

    def _take(self, member: Member, message: Message) -> None:
        word, body = message.word, message.body
        member.asked.discard(word)
        if word == "answer":
            self._on_answer(member, body, message.value)
        elif word == "look":
            member.looked, member.looked_at = body, time.monotonic()
        elif word == "stacks":
            self._stacks[member.rank] = body
            if _NO_ANSWER not in self._stacks.values():
                self._has_stacks.set()
                if self._end_without_stacks in self._timers:
                    self.end()
        elif word == "answered":
            member.steps = body
            self._agree_on_checkpoint(member.rank)

    def _on_answer(self, member: Member, answer: Answer, value: memoryview | None) -> None:
        self._drain(member)
        member.operations = answer.operations
        if answer.owned is not None:
            self.owned(*answer.owned)
        call = self._call
        if call is None or answer.number != call.number:
            return
        call.has_loaded = call.has_loaded and answer.has_loaded
        outcome = answer.outcome
        if isinstance(outcome, Returned):
            assert value is not None
            outcome = Returned(outcome.at, value)
            if not self._stays and call.number > 0:  # so that collectives of the others raise an error
                self._timers[partial(self._drop, member.wire)] = time.monotonic() + _LINGER_S
        elif isinstance(outcome, Ended) and not (self.is_ending or call.is_halting):  # by a signal from outside
            outcome = Died(outcome.at, member.pid, -signal.SIGTERM)
        self._settle(member, outcome)
