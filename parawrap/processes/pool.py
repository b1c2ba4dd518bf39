"""The calls of the ranks of one launch, one after the other.

::

    a caller ── begin ──► data wires ──► ranks     thread of the pool ◄── status, output (`Members`)
        ▲                                 │                   │
        └───────── answers ◄──────────────┘                   └──► deadlines, hints, deaths, the end

A launch is: start the ranks, make one call, close. Ranks that stay make any number of calls. The
set-up of the ranks is the first call, with number 0.

Two guarantees:

- After the first failure of a call, a time limit, or `cancel`, the call ends in bounded time. An
  exception: the pool waits for ranks that stay while they run C code that no exception can
  interrupt.
- After `close`, no process of the pool is alive.
"""

from __future__ import annotations

import logging
import pickle
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from parawrap.errors import LaunchError, SessionError
from parawrap.processes.calls import (
    Call,
    Halt,
    describe_idleness,
    ignores_halt,
    reason_of_hang,
)
from parawrap.processes.events import Events
from parawrap.processes.latch import Latch
from parawrap.processes.members import Member, Members, RankStarter
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
from parawrap.processes.rank_process import SET_UP, Answer, Assignment, CallHead
from parawrap.processes.torch_groups import LINGER_S
from parawrap.processes.wire import LOST, Letter, Message, Wire

STILL_S = 60.0
"""Seconds that a rank may be idle before the hint."""

STUCK_S = 20.0
"""Seconds that ranks may wait in collectives for ranks that do not take part."""

# Seconds
_POLL_S = 1.0  # between two looks at the ranks: often enough for limits of a few seconds
_ECHO_S = 1.0  # for the original failure to arrive after an echo of it
_BREAK_S = 1.0  # for a rank to end its call after an interrupt, before its connections are closed
_STACKS_S = 1.0  # for stacks to arrive: a rank answers at once, unless C code holds the GIL
# For the exit handlers of ranks that have returned, such as uploads of experiment trackers. A guess
_EXIT_HANDLERS_S = 600.0
_LINES_S = 0.5  # for the ranks to report their lines, while the user waits after Ctrl-C
_STOPPED_S = 1.0  # a longer delay of this thread means that this process itself was stopped
_TRIM_S = 3.0  # without a call, after which large slabs are freed

# Bytes of one call in the slabs of all ranks. Beyond, the ranks share a file. A guess
_MOST_COPIED = 256 << 20
# Threads that wait for stacks or lines at a time. A guess. If more do, the first ones wait their
# whole time
_MOST_REQUESTS = 64
_NO_ANSWER = "no answer within a second: the rank is stopped, or runs code that holds the GIL"
_log = logging.getLogger("parawrap.launch")


class Pool:
    """The ranks of one launch, or those that stay.

    One thread owns the pool: the thread of the pool. It calls all methods. Any thread may call
    `post`, `state_of`, `stacks`, and `lines`. A caller that makes a call itself also uses `begin`,
    `has_ended`, and `finish`, and holds `events.lock` for each.

    Args:
        starter: Starts the processes.
        assignments: The first message of each rank, by rank.
        transcripts: One per rank.
        timeout_min: Minutes for each call. None sets no limit.
        deadline: When `timeout_min` is over for the whole launch, by the monotonic clock. None
            counts it per call.
        hang_s: Seconds without output and without progress, after which `reason_of_hang` gives a
            reason. None sets no limit.

    Attributes:
        events: What the pool waits for.
        idle_deaths: How ranks that stay have died between two calls.
        preempted: True if the ranks were ordered to save and exit.
        note_owned: Called with two lists: the globals that functions of a rank have assigned, and
            those they have deleted.
    """

    def __init__(
        self,
        starter: RankStarter,
        assignments: Sequence[Assignment],
        transcripts: Sequence[Transcript],
        *,
        timeout_min: float | None = None,
        deadline: float | None = None,
        hang_s: float | None = None,
    ) -> None:
        self.events = Events()
        self._timers = self.events.timers
        self._grace_s = assignments[0].grace_s
        self._members = Members(starter, self.events, self, self._grace_s)
        self._assignments = assignments
        self._transcripts = transcripts
        self._timeout_min = timeout_min
        self._deadline = deadline
        self._hang_s = hang_s
        self._stays = assignments[0].stays
        # Four looks within `hang_s`: a call that hangs ends at most a quarter late
        self._look_s = _POLL_S if hang_s is None else min(_POLL_S, hang_s / 4)
        self._call: Call | None = None  # the one that runs
        self._number = SET_UP  # of the last call
        self._generation = 0  # of the process groups
        self._has_groups = False  # True if the set-up made process groups
        self._must_regroup = False  # True: the next call begins with a new generation
        self._is_set_up = False
        self._timed_out = ""  # the time limit that ended the ranks
        self._unanswered: set[int] = set()  # ranks that have not reported their steps
        self._stacks: dict[int, str] = {}  # of the ranks that ran a call at the last request
        self._unlocated: set[int] = set()  # ranks that have not reported their lines
        # One latch per thread that waits for all stacks, or for all lines. If a rank never answers,
        # none is removed: the deques drop the oldest
        self._stack_requests: deque[Latch] = deque(maxlen=_MOST_REQUESTS)
        self._line_requests: deque[Latch] = deque(maxlen=_MOST_REQUESTS)
        self.idle_deaths: dict[int, Outcome] = {}
        self.preempted = False
        self.note_owned: Callable[[list[Any], list[Any]], None] = lambda *_: None

    # -- any thread

    def post(self, act: Callable[[], object]) -> None:
        """Run an action in the thread of the owner. After `close`, do nothing."""
        self.events.post(act)

    def state_of(self, rank: int) -> str:
        """Describe the state of a rank."""
        call = self._call  # read once: the thread of the pool may end the call meanwhile
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
        have_arrived = Latch()
        self.events.post(partial(self._ask_for_stacks, have_arrived))
        have_arrived.wait(_STACKS_S)
        # A copy in one step of C: the thread of the pool may add an answer
        return dict(self._stacks)

    def lines(self) -> dict[int, str]:
        """Return a line of user code for each rank that runs a call: the line that it executes.

        For a rank that does not answer at once, this is its last known line, if there is one.
        """
        have_arrived = Latch()
        self.events.post(partial(self._ask_for_lines, have_arrived))
        have_arrived.wait(_LINES_S)
        lines: dict[int, str] = {}
        for member in self._running():
            looked = member.looked  # read once: the begin of the next call sets None
            lines[member.rank] = "an unknown place" if looked is None else looked.line
        return lines

    # -- the owner

    @property
    def is_ending(self) -> bool:
        """True if the ranks were ordered to end."""
        return self._members.is_ending

    def start(self) -> None:
        """Start the processes, unless `cancel` comes first.

        Raises:
            LaunchError: If a process cannot be started.
        """
        for rank, assignment in enumerate(self._assignments):
            if self._members.is_cancelled:
                return
            self._members.start(rank, assignment, self._transcripts[rank])

    def set_up(self) -> Ending:
        """Wait until all ranks are set up."""
        call = Call("the set-up", range(len(self._assignments)))
        with self.events.lock:
            self._note_begin(call)
        ending = self._wait(call)
        self._is_set_up = ending.is_success
        self._has_groups = all(member.operations is not None for member in self._members.all)
        return ending

    def call(self, call: Call) -> Ending:
        """Make a call, and wait until all its ranks have ended it. Return how they ended.

        Raises as `begin` does.
        """
        with self.events.lock:
            self.begin(call)
        return self._wait(call)

    def _wait(self, call: Call) -> Ending:
        # Without the lock: the owner alone changes the outcomes of a call that it makes itself
        while not self.has_ended(call):
            self.events.turn()
        with self.events.lock:
            return self.finish(call)

    def begin(self, call: Call) -> None:
        """Send a call to its ranks. A limit of this process fails the call, and not the ranks.

        No rank gets a call for which this raises.

        Raises:
            LaunchError: If memory lacks room for the call.
            OSError: If this process has reached a limit.
        """
        packed = call.packed
        assert packed is not None
        block = packed.block
        number = self._number + 1
        generation = self._generation + 1 if self._must_regroup else None

        # Ranks that do not run the function take what later calls rely on
        concerns_all = packed.brings_definitions or call.changes is not None or self._must_regroup
        needs_all = self._stays and concerns_all
        members = [each for each in self._members.all if needs_all or each.rank in call.ranks]

        # A slab per rank pays when it is used again. A shared file is written once for all ranks
        fits_slabs = self._stays and len(members) * block.size <= _MOST_COPIED
        if len(members) > 1 and not fits_slabs:
            block.copy_bytes()

        # All letters are encoded before the first is sent: a limit fails the call as a whole
        letters: list[tuple[Wire, Letter]] = []
        # A head for ranks that run the function (True), and one for others (False)
        heads: dict[bool, bytes] = {}
        try:
            for member in members:
                runs_it = member.rank in call.ranks
                if runs_it not in heads:
                    head = CallHead(number, call.changes, runs_it, generation, packed.item)
                    heads[runs_it] = pickle.dumps(("call", head), 5)
                letters.append((member.wire, member.wire.encode(heads[runs_it], block)))
        except BaseException as error:  # Ctrl-C too: no rank may get a part of the call
            for wire, letter in letters:
                wire.drop(letter)
            if isinstance(error, SessionError):
                raise LaunchError(str(error)) from None
            raise

        # From here on nothing fails
        self._number = call.number = number
        call.generation = generation
        if generation is not None:
            self._generation = generation
        # It holds the arguments, which this call does not need any more. The letters keep the block
        # until it has left
        call.packed = None
        call.others = {member.rank for member in members} - {*call.ranks}
        self._note_begin(call)

        # All ranks get the call, even if a limit delays it: `flush` does not raise
        for wire, letter in letters:
            wire.enqueue(letter)
            wire.flush()
            self.events.update_watch(wire)
        self.events.wake_in_time()

    def _note_begin(self, call: Call) -> None:
        """Make a call the one that runs, and set its timers."""
        now = time.monotonic()
        call.began_at = call.departed_at = call.last_sign = call.looked_at = now
        self._call = call
        self._timers.pop(self._trim, None)
        if not self.is_ending:
            if self._timeout_min is not None:
                ends_at = now + 60 * self._timeout_min if self._deadline is None else self._deadline
                self._timers[self._time_is_up] = ends_at
            self._timers[self._look] = now + self._look_s
            if self.preempted:  # during the start
                self._timers[self.end] = now + self._grace_s
        self._stacks = {}
        for member in self._members.all:
            member.looked = None
            member.transcripts = [member.transcript]
            if member.rank in call.transcripts:
                member.transcripts.append(call.transcripts[member.rank])
            # Its process ended before this call: no report follows
            if member.exit is not None:
                call.others.discard(member.rank)
                self._settle(member, member.exit)

    def has_ended(self, call: Call) -> bool:
        """True once all ranks of the call have ended it, or are gone."""
        is_settled = len(call.outcomes) >= len(call.ranks) and not call.others
        # After a `cancel` before the start, ranks without processes never get an outcome
        return is_settled or (self._members.is_cancelled and self._members.is_over)

    def finish(self, call: Call) -> Ending:
        """Return how the ranks have ended a call."""
        self._call = None
        if not self.is_ending:  # else the timers are those of the end
            self._timers.clear()
            if self._stays:
                self._timers[self._trim] = time.monotonic() + _TRIM_S
                self.events.wake_in_time()

        # Groups work only if all ranks have the same ones, at the same collective
        operations = {member.operations for member in self._members.all}
        is_out_of_step = call.halt is not None and len(operations) > 1
        has_broken = call.halt is not None and call.halt.has_broken
        some_have_old_groups = call.generation is not None and bool(call.unloaded)
        have_failed = is_out_of_step or has_broken or some_have_old_groups
        some_lack_groups = None in operations  # a function has destroyed them
        self._must_regroup = self._has_groups and (have_failed or some_lack_groups)

        last_lines: dict[int, str] = {}
        if self._timed_out:
            for member in self._members.all:
                if member.looked is not None:
                    last_lines[member.rank] = member.looked.line
        lost = self._members.lost
        # The loss of ranks is an error, even if `cancel` came afterwards
        are_cancelled = self._members.is_cancelled and not lost
        return Ending(
            dict(sorted(call.outcomes.items())),
            {member.rank: member.place for member in self._members.all},
            stacks=self._stacks,
            timed_out=self._timed_out,
            last_lines=last_lines,
            deadlocked=call.is_deadlocked,
            cancelled=call.is_cancelled or are_cancelled,
            lost=lost,
            error=call.error,
            has_output=any(each.wrote_at >= call.began_at for each in self._members.all),
            regroups=self._must_regroup,
        )

    def end_of_idle_ranks(self) -> Ending:
        """Return how ranks that stay have ended between two calls."""
        return Ending(self.idle_deaths, {member.rank: member.place for member in self._members.all})

    def end(self) -> None:
        """Order every rank to end. Ranks that are late are killed."""
        self._members.end()

    def cancel(self) -> None:
        """End every rank, unless they are ending already."""
        self._members.cancel()

    def close(self) -> None:
        """Let the ranks exit, and wait until no process is alive.

        Ranks that are late are killed. Those that have answered their last call have time for their
        exit handlers.
        """
        # An error has ended the start, or the thread of the pool: no rank is given time
        if self._call is not None or not self._is_set_up:
            self._members.end()
        self._members.close(_EXIT_HANDLERS_S)

    def _trim(self) -> None:
        """Free large slabs that no call has used for a while. `begin` removes this timer."""
        # The ranks send the numbers of released slabs, and no caller reads them
        self.events.take_back()
        for member in self._members.all:
            if member.wire.is_open:
                member.wire.trim()
                self.events.update_watch(member.wire)

    def interrupt(self, call: Call, *, cancels: bool = False) -> None:
        """Raise KeyboardInterrupt in the function of each rank that runs this call.

        If it `cancels`, the caller gets LaunchCancelledError.
        """
        call.is_cancelled = call.is_cancelled or cancels
        if self._call is call:
            self._interrupt(by_user=True)

    def preempt(self) -> None:
        """Order the ranks to save and exit, unless they stay. Those that are late are ended.

        All ranks save in the same loop iteration: the first one that no rank has reached yet. So
        each rank reports how often `should_checkpoint` has returned False, and further calls block
        until that iteration is known. The rank's control thread reports it, because the main thread
        of a rank that is ahead may wait in a collective.
        """
        if self.is_ending or self.preempted or self._stays:
            return
        self.preempted = True
        self._timers[self.end] = time.monotonic() + self._grace_s
        # During the set-up, all ranks: also those that have ended it will run the function
        asked = self._members.all if self._number == SET_UP else self._running()
        self._unanswered = {member.rank for member in asked}
        for member in asked:
            self._members.tell(member, "preempt")

    def _running(self) -> list[Member]:
        """Return the ranks that run the function of the call."""
        call = self._call  # read once, as in `state_of`
        if call is None:
            return []
        return [self._members.all[rank] for rank in call.ranks if rank not in call.outcomes]

    def _busy(self) -> list[Member]:
        """Return the ranks that run the function, and those that only load what the call brings."""
        call = self._call
        loading = [] if call is None else [self._members.all[rank] for rank in sorted(call.others)]
        return [*self._running(), *loading]

    # -- the course of a call

    def on_end(self, member: Member, outcome: Outcome) -> None:
        """Handle the end of a process."""
        self._note_answer(member)
        self._settle(member, outcome)

    def _note_answer(self, member: Member) -> None:
        """Note that a rank of `others` has loaded what the call brings, or has ended."""
        call = self._call
        if call is not None and member.rank in call.others:
            call.others.remove(member.rank)
            if self.events.is_lent and self.has_ended(call):
                self.events.wake_caller()

    def _settle(self, member: Member, outcome: Outcome) -> None:
        """Note how a rank has ended the call, and decide what happens to the others."""
        call = self._call
        if call is None:  # between two calls
            if self._stays and isinstance(outcome, Died):
                self.idle_deaths[member.rank] = outcome
            return
        if member.rank in call.outcomes or member.rank not in call.ranks:
            return  # the first outcome holds: a rank that has returned may exit afterwards

        # The outcome
        if isinstance(outcome, Died) and self._stays and member.wrote_at < call.began_at:
            # Output of earlier calls is no clue, such as the tracebacks of their errors
            outcome = replace(outcome, last_words="")
        if isinstance(outcome, Raised):
            member.transcript.record(outcome.traceback)
            if self.preempted and self.is_ending:  # the rank was late, and its clean-up failed
                outcome = Ended(outcome.at)
        call.outcomes[member.rank] = outcome
        if self.events.is_lent and self.has_ended(call):
            self.events.wake_caller()
        now = call.last_sign = call.departed_at = time.monotonic()
        if call.number != SET_UP:  # a rank that has only been set up still reports its steps
            self._agree_on_checkpoint(member.rank)

        # The others
        if self.is_ending:
            return
        if isinstance(outcome, Died) and self._stays:  # the other ranks are of no use without it
            self.end()
        elif isinstance(outcome, Requeued):
            self._timers.setdefault(self.end, now + self._grace_s)  # an earlier limit holds
            self._timers.pop(self._interrupt, None)  # an echo before came from this exit
        elif isinstance(outcome, (Raised, Died)):
            first = first_failure(call.outcomes)
            if first is None:  # all are echoes of a rank that exits to be restarted
                return
            if not counts_as_echo(call.outcomes[first]):
                self._interrupt()
            elif call.halt is None:  # the original failure may follow
                self._timers.setdefault(self._interrupt, now + _ECHO_S)

    def _interrupt(self, *, by_user: bool = False) -> None:
        """Interrupt the call in the ranks that still run it. End ranks that do not stay."""
        call = self._call
        assert call is not None
        if not self._stays or call.number == SET_UP:
            self.end()
            return
        if self.is_ending:
            return
        before = call.halt
        has_broken = False
        if before is not None:
            # A second interrupt matters only if it is the first one of the user: it adds a limit
            if before.by_user or not by_user:
                return
            has_broken = before.has_broken
        call.halt = Halt(by_user, has_broken)
        now = time.monotonic()
        self._timers.pop(self._interrupt, None)  # it waited for the original failure
        self._timers[self._break_connections] = now + _BREAK_S
        # A look asks for answers, on which the next one acts. This look waits too, so that its
        # answers show the effect of the interrupt
        self._timers[self._look] = now + _BREAK_S
        # After a failure, ranks that only load what the call brings go on: later calls need it
        interrupted = self._running()
        if by_user:
            interrupted = self._busy()
            # Ranks have a second to stop before their connections are closed, and one after it.
            # After a failure, `_look` sets the limit: C code may take its time
            self._timers[self._lose] = now + max(self._grace_s, 2 * _BREAK_S)
        for member in interrupted:
            self._members.tell(member, "interrupt", call.number)

    def _agree_on_checkpoint(self, rank: int) -> None:
        """Note that a rank has reported its steps, or has ended.

        After the last one, tell all ranks from which call of `should_checkpoint` on it returns
        True: the highest number of steps.
        """
        is_last = self._unanswered == {rank}
        if is_last:
            step = max(member.steps for member in self._members.all)
            for member in self._members.all:
                self._members.tell(member, "checkpoint", step)
        self._unanswered.discard(rank)

    # -- what is due

    def _break_connections(self) -> None:
        """Close the connections between ranks that still run: they may wait in a collective."""
        assert self._call is not None
        halt = self._call.halt
        assert halt is not None
        running = self._running()
        if running:
            halt.has_broken = True
        for member in running:
            self._members.tell(member, "break")

    def _lose(self) -> None:
        """End all ranks: some have not stopped after an interrupt."""
        late = ", ".join(str(member.rank) for member in self._busy())
        self._members.lost = (
            f"rank(s) {late} did not stop within grace_s={self._grace_s:g} after the call had "
            "failed or was interrupted"
        )
        self.end()

    def _time_is_up(self) -> None:
        """End the ranks at the time limit."""
        self._end_with_stacks(f"not done after timeout_min={self._timeout_min:g} minutes")

    def _end_with_stacks(self, limit: str = "") -> None:
        """Ask the ranks that run for their lines and their stacks, then end all ranks.

        `limit` is the time limit that is the reason; empty in a deadlock.
        """
        # First: a rank answers in order, so its line arrives before its stacks
        for member in self._running():
            self._ask(member, "look")
        self._ask_for_stacks()
        self._timed_out = limit
        # No other timer may end the ranks before their answers. They come within `_STACKS_S`
        self._timers.clear()
        self._timers[self._end_without_stacks] = time.monotonic() + _STACKS_S

    def _end_without_stacks(self) -> None:
        # A function of its own, because `preempt` sets a timer for `end`: the timer of this one
        # tells `on_message` that the end waits for stacks
        self.end()

    # -- looks at ranks

    def _ask(self, member: Member, word: str) -> None:
        """Send a rank a request, unless it has to answer an earlier one with the same word.

        A stopped process never answers: its requests must not pile up.
        """
        if word not in member.asked:
            member.asked.add(word)
            self._members.tell(member, word)

    def _ask_for_stacks(self, have_arrived: Latch | None = None) -> None:
        """Ask each rank that runs a call for its stacks, unless a time limit has done so.

        Set `have_arrived` once all have arrived.
        """
        if have_arrived is not None:
            self._stack_requests.append(have_arrived)
        if not self._timed_out:
            self._stacks = {member.rank: _NO_ANSWER for member in self._running()}
            for member in self._running():
                self._ask(member, "stacks")
        if not self._stacks:  # no rank runs a call, so no answer follows
            _set_all(self._stack_requests)

    def _ask_for_lines(self, have_arrived: Latch) -> None:
        """Ask each rank that runs a call for its line. Set `have_arrived` once all have arrived."""
        self._line_requests.append(have_arrived)
        running = self._running()
        self._unlocated = {member.rank for member in running}
        for member in running:
            self._ask(member, "look")
        if not running:
            _set_all(self._line_requests)

    def _look(self) -> None:
        """Act on the answers to the last look, and ask the ranks again."""
        call, now = self._call, time.monotonic()
        assert call is not None
        self._timers[self._look] = now + self._look_s
        was_stopped = now - call.looked_at > self._look_s + _STOPPED_S
        if was_stopped:  # this process itself: signs of the ranks wait to be read
            call.last_sign = now
        call.looked_at = now

        # The last sign of life. Ranks that only load the call make progress too
        running, busy = self._running(), self._busy()
        for member in busy:
            if member.looked is not None:
                progressed_at = member.looked_at - member.looked.idle_s
                call.last_sign = max(call.last_sign, progressed_at)
        for member in self._members.all:
            call.last_sign = max(call.last_sign, member.wrote_at)

        if call.halt is not None:
            if any(ignores_halt(member, call.number, call.halt) for member in running):
                self._timers.setdefault(self._lose, now + self._grace_s)
        elif call.number != SET_UP:  # the limits are those of the function
            self._judge(call, running, now)
        for member in busy:
            self._ask(member, "look")

    def _judge(self, call: Call, running: Sequence[Member], now: float) -> None:
        """End ranks that hang, or that wait for ranks which do not take part, or log a hint."""
        if self._hang_s is not None:
            why = reason_of_hang(call, running, self._members.all, self._hang_s, now)
            if why:
                self._end_with_stacks(f"silent for hang_timeout_s={self._hang_s:g} seconds: {why}")
                return

        # A deadlock. If all ranks run the call, each wait may end: the last rank is only late.
        # Without a running rank, the call lasts until the others have loaded its globals
        is_one_absent = len(running) < len(self._members.all)
        do_all_wait = all(each.looked and each.looked.waits_s >= STUCK_S for each in running)
        can_be_deadlocked = bool(running) and is_one_absent and do_all_wait
        if can_be_deadlocked and now - call.departed_at >= STUCK_S:
            self._end_waits(call)
            return

        is_one_idle = any(each.looked and each.looked.idle_s >= STILL_S for each in running)
        if is_one_idle and not call.has_hint:
            call.has_hint = True
            _log.warning(
                "no progress for %g s; the launch continues, unless hang_timeout_s ends it. %s",
                STILL_S,
                "; ".join(describe_idleness(member, now) for member in running),
            )

    def _end_waits(self, call: Call) -> None:
        """End ranks that wait for ranks which do not take part: to restart, or with an error."""
        is_to_restart = any(isinstance(each, Requeued) for each in call.outcomes.values())
        if self.preempted or is_to_restart:
            self.end()
            return
        call.is_deadlocked = True
        if self._stays:
            # Their control threads answer while they wait: the error of the call has the stacks
            self._ask_for_stacks()
            self._interrupt()
        else:
            self._end_with_stacks()

    # -- messages of ranks

    def on_message(self, member: Member, message: Message) -> None:
        """Handle a message of a rank."""
        word, body = message.word, message.body
        member.asked.discard(word)
        if word == "answer":
            self._on_answer(member, body, message)
        elif word == LOST and self._call is not None:  # this was an answer, with its outcome
            self._call.error = message.error
            self._settle(member, Ended(time.time()))
        elif word == "look":
            member.looked, member.looked_at = body, time.monotonic()
            self._unlocated.discard(member.rank)
            if not self._unlocated:
                _set_all(self._line_requests)
        elif word == "stacks":
            self._stacks[member.rank] = body
            have_all_answered = _NO_ANSWER not in self._stacks.values()
            if have_all_answered:
                _set_all(self._stack_requests)
                waits_for_stacks = self._end_without_stacks in self._timers
                if waits_for_stacks:
                    self.end()
        elif word == "steps":
            member.steps = body
            self._agree_on_checkpoint(member.rank)

    def _on_answer(self, member: Member, answer: Answer, message: Message) -> None:
        """Handle the answer of a rank to a call."""
        self._members.drain(member)  # the output so far belongs to this call
        member.operations = answer.operations
        if answer.owned is not None:
            assigned, deleted = answer.owned
            self.note_owned(assigned, deleted)
        call = self._call
        if call is None or answer.number != call.number:  # of an earlier call
            return
        if not answer.has_loaded:
            call.unloaded.add(member.rank)
        self._note_answer(member)
        outcome = answer.outcome
        if isinstance(outcome, Returned):
            call.error = call.error or message.error
            outcome = Returned(outcome.at, message.block, answer.item)
            is_last = not self._stays and call.number != SET_UP
            if is_last:
                # Without its wire, the rank exits. Then collectives of the others raise an error
                drop = partial(self._members.drop, member.wire)
                self._timers[drop] = time.monotonic() + LINGER_S
        elif isinstance(outcome, Ended):
            by_order = self.is_ending or call.halt is not None
            if not by_order:  # by SIGTERM from outside
                outcome = Died(outcome.at, member.pid, -signal.SIGTERM)
        self._settle(member, outcome)


def _set_all(requests: deque[Latch]) -> None:
    """Let the threads go on that wait for answers, and forget their requests."""
    for have_arrived in requests:
        have_arrived.set()
    requests.clear()
