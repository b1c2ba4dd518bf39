"""The calls of ranks that stay, one after the other.

    Ranks ──► Calls ── Guard ──(line)── the rank's main thread

The thread of the launch runs them: `Coordinator` passes on answers, reports, and the clock. A call ends when all its ranks
have answered. If one of them raises, the others get a moment to end on their own, and are interrupted then. If a rank waits
in a collective, the connections between the ranks are closed, which ends the wait. Then all ranks form new process groups
before the next call. They also do if the ranks have begun different numbers of operations.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from parawrap.errors import LaunchError, SessionError
from parawrap.launch._platform import Platform
from parawrap.launch._system_limits import explain_error
from parawrap.launch.coordinator._ending import Ending
from parawrap.launch.coordinator._event_loop import Loop
from parawrap.launch.coordinator._latch import Latch
from parawrap.launch.coordinator._rank_state import RankState
from parawrap.launch.coordinator._standstill import Standstill, report_interval_s
from parawrap.launch.coordinator._transcript import Record, Transcript
from parawrap.launch.guard._guard import CallGuard
from parawrap.launch.messages._first_rank_failure import Died, Ended, Outcome, PackedValue, Raised, Returned
from parawrap.launch.messages._line import Arrival, Message, pickle_value
from parawrap.launch.messages._sent_globals import PackedCall, SentGlobals
from parawrap.launch.rank._control_thread import Status
from parawrap.launch.rank._process_connections import MESSAGES, connections_between

__all__ = ["Calls", "RankCall"]

_ANSWER_S = 30.0  # for the control thread of a rank to answer: it waits for the GIL only, but a machine may be busy
_HALT_S = 30.0  # to interrupt the ranks; a stopped process never does, and one that holds the GIL late
_LEAST_GRACE_S = 1.0  # for the errors of closed connections to arrive
_REMEMBERED = 100  # calls whose globals a late answer may report as not set; ranks answer one call after the other
_REGROUP_S = 60.0  # for all ranks to meet again; a guess that no test has contradicted
_NEVER = float("inf")  # by the monotonic clock
_log = logging.getLogger("parawrap.launch")


class RankCall:
    """One call on all ranks, or on some of them.

    Args:
        number: Calls are numbered from 1.
        name: The function's name.
        ranks: The ranks that call the function, in order.

    Attributes:
        packed: The pickled function, arguments, and globals.
        before: What was known of these globals before, for `SentGlobals.restore`.
        has_begun: True once it was sent to the ranks.
        records: Receive the output of the ranks during the call, by rank.
        done: Set once the call has ended.
        ending: How the call ended; None before its end.
        has_output: True if a rank wrote output during the call.
        took_s: Seconds between the begin and the end of the call.
    """

    def __init__(self, number: int, name: str, ranks: Sequence[int]) -> None:
        self.number = number
        self.name = name
        self.ranks = ranks
        self.packed: PackedCall | None = None
        self.before: Mapping[str, Any] = {}
        self.records: Sequence[Record] = ()
        self.done = Latch()
        self.ending: Ending | None = None
        self.has_begun = False
        self.has_output = False
        self.took_s = 0.0
        self.is_cancelled = False


class _Value:
    """The value of an answer. Implements the methods of `PackedValue`."""

    def __init__(self, answer: Arrival) -> None:
        self._answer: Arrival | None = answer

    def open(self) -> Any:
        assert self._answer is not None, "closed"
        return self._answer.load()

    def close(self) -> None:
        self._answer = None


@dataclass
class _CallState:
    """One rank of a call, as `Standstill` sees it."""

    rank: int
    pid: int
    outcome: Outcome | None = None
    status: Status | None = None
    status_at: float = 0.0

    @property
    def is_running(self) -> bool:
        return self.outcome is None


@dataclass
class _Current:
    """The call that runs.

    Attributes:
        step: "call" until all ranks have answered, then the question that they answer: "numbers", "connections", or
            "regroup".
        until: The end of the step, by the monotonic clock; later, the ranks are ended.
        halts: True if the ranks that still run are to end the call.
        halted: The ranks that have been interrupted, or are blocked.
        broken: True if connections between the ranks were closed.
        refused: The error of a payload that could not be sent.
    """

    call: RankCall
    states: dict[int, _CallState]
    standstill: Standstill
    up_at: float
    began: float
    step: str = "call"
    until: float = _NEVER
    answered_at: float = 0.0
    halts: bool = False
    halted: set[int] = field(default_factory=set)
    breaks: bool = False
    broken: bool = False
    stuck: bool = False
    stuck_stacks: dict[int, str] = field(default_factory=dict)
    answers: dict[int, Any] = field(default_factory=dict)
    refused: Exception | None = None


class Calls:
    """Runs the calls of one launch. Any thread may call `submit`, `interrupt`, and `close`.

    Args:
        platform: The launch's platform.
        sent: Notes the globals that functions assign in the ranks.

    Attributes:
        ready: Set once all ranks can be called, or the launch has ended.
        idle: Set once the last call has ended after `close`, or the launch has ended.
        ending: How the launch ended; None before its end.
        lost: The reason why the ranks had to be ended, other than a death or a time limit.
        transcripts: The output of the ranks. Set by their owner.
        ended_in: The name of the function that the ranks ran when the launch ended.
    """

    def __init__(self, platform: Platform, sent: SentGlobals) -> None:
        self._platform = platform
        self._sent = sent
        self.ready = Latch()
        self.idle = Latch()
        self._queue: deque[RankCall] = deque()
        self._current: _Current | None = None
        self._generation = 0
        self._loop: Loop | None = None
        self._states: Sequence[RankState] = ()
        self._end_ranks: Callable[[], None] = lambda: None
        self._time_out: Callable[[str], None] = lambda _: None
        self._is_closing = False
        self.ending: Ending | BaseException | None = None
        self.lost: str | None = None
        self.transcripts: Sequence[Transcript] = ()
        self.ended_in = ""
        self._last: dict[int, RankCall] = {}
        self._before: dict[int, Mapping[str, Any]] = {}

    def attach(
        self, loop: Loop, states: Sequence[RankState], end: Callable[[], None], time_out: Callable[[str], None]
    ) -> None:
        """Use the ranks of an attempt that is about to begin. `end` ends them, and `time_out` does at a time limit."""
        self._loop, self._states, self._end_ranks, self._time_out = loop, states, end, time_out

    # -- any thread

    def submit(self, call: RankCall) -> None:
        """Run a call after those before it."""
        self._queue.append(call)
        self._wake(self._start_next)

    def has(self, call: RankCall) -> bool:
        """True if `submit` was called with this call."""
        return call.has_begun or call in self._queue or call.done.is_set()

    def interrupt(self, call: RankCall, *, cancels: bool = False) -> None:
        """Raise KeyboardInterrupt in the function of each rank that runs it, or drop a call that has not begun."""
        self._wake(partial(self._interrupt, call, cancels=cancels))

    def close(self) -> None:
        """End the ranks once they have answered the calls that were submitted."""
        self._is_closing = True
        self._wake(self._start_next)

    @property
    def is_busy(self) -> bool:
        """True while a call runs or waits for its turn."""
        return self._current is not None or bool(self._queue)

    def is_running(self, rank: int) -> bool:
        """True if this rank runs a call."""
        current = self._current
        return current is not None and rank in current.states and current.states[rank].is_running

    def pid_of(self, rank: int) -> int:
        """Return the id of a rank's process."""
        return self._states[rank].pid if self._states else 0

    def last_call_of(self, rank: int) -> str:
        """Describe the last call of a rank."""
        call = self._last.get(rank)
        if call is None:
            return ""
        return f"{call.name}, {call.took_s:.3g} s" if call.done.is_set() else call.name

    def _wake(self, act: Callable[[], None]) -> None:
        if self._loop is not None:
            self._loop.call_soon(act)
        if self.ending is not None:
            self._fail_queue()

    # -- the thread of the launch

    def on_ready(self) -> None:
        """Handle that all ranks have joined their process groups."""
        self.ready.set()
        self._start_next()

    def end(self, ending: Ending | BaseException) -> None:
        """End all calls, because the launch has ended."""
        self.ending = ending
        self.ended_in = self._current.call.name if self._current is not None else ""
        current, self._current = self._current, None
        if current is not None:
            self._finish(current, self._make_ending(current, ending))
        self._fail_queue()
        self.ready.set()
        self.idle.set()

    def _fail_queue(self) -> None:
        while self._queue:
            try:
                call = self._queue.popleft()
            except IndexError:  # another thread was faster
                return
            self._drop(call)

    def _drop(self, call: RankCall) -> None:
        call.ending = Ending({}, cancelled=True)
        call.done.set()

    def _start_next(self) -> None:
        if self._current is not None or not self.ready.is_set() or self.ending is not None:
            return
        if self._queue:
            self._begin(self._queue.popleft())
        elif self._is_closing:
            for state in self._states:
                _guard_of(state).end_calls(state.rank)
            self.idle.set()

    def _begin(self, call: RankCall) -> None:
        if call.done.is_set():
            self._send_names(call)
            self._start_next()
            return
        call.has_begun = True
        packed, call.packed = call.packed, None
        assert packed is not None
        refused = self._send(call, packed)
        self._note_sent(call)
        now, limit = time.monotonic(), self._platform.timeout_min
        states = {rank: _CallState(rank, self._states[rank].pid) for rank in call.ranks}
        standstill = Standstill([*states.values()], report_interval_s(self._platform))
        up_at = _NEVER if limit is None else now + 60 * limit
        current = _Current(call, states, standstill, up_at, now, answered_at=now)
        self._current = current
        self._last.update(dict.fromkeys(call.ranks, call))
        if refused:
            self._sent.restore(call.before)
            current.refused = next(iter(refused.values()))
            for rank in refused.keys() & states.keys():
                states[rank].outcome = Ended(time.time())
            self._halt(current, "fail")
            self._on_answered(current)

    def _send_names(self, call: RankCall) -> None:
        """Send the globals of a call that was dropped."""
        packed, call.packed = call.packed, None
        assert packed is not None
        if self._send(call, packed._replace(payload=packed.names_only), "names"):
            self._sent.restore(call.before)
        self._note_sent(call)

    def _note_sent(self, call: RankCall) -> None:
        self._before[call.number] = call.before
        self._before.pop(call.number - _REMEMBERED, None)

    def _send(self, call: RankCall, packed: PackedCall, word: str = "call") -> dict[int, Exception]:
        """Send a call to its ranks, and new globals to the others. Return errors by the rank that it cannot be sent to."""
        refused: dict[int, Exception] = {}
        for state in self._states:
            is_called = state.rank in call.ranks
            payload = packed.payload if is_called else packed.names_only
            if payload is not None:
                if self.transcripts:
                    self.transcripts[state.rank].leave_out()
                try:
                    message = Message(word if is_called else "names", None, call.number)
                    _guard_of(state).call(state.rank, message, *payload)
                except SessionError as error:  # no room for its tensors
                    refused[state.rank] = error
                except OSError as error:
                    msg = f"the call of {call.name} cannot be sent to rank {state.rank}: {explain_error(error)}"
                    refused[state.rank] = LaunchError(msg)
        return refused

    def _interrupt(self, call: RankCall, *, cancels: bool) -> None:
        call.is_cancelled = call.is_cancelled or cancels
        current = self._current
        if current is not None and current.call is call:
            if current.step == "call":
                self._halt(current, "interrupt")
        elif call in self._queue:  # it stays there, because later calls rely on the globals that come with it
            self._drop(call)

    def _halt(self, current: _Current, reason: str) -> None:
        """Have the ranks that still run end the call. ``grace_s`` counts once all of them are interrupted or blocked."""
        if current.halts and reason != "interrupt":
            return
        if not current.halts:
            current.until = time.monotonic() + max(self._platform.grace_s, _HALT_S)
        current.halts = True
        for rank, state in current.states.items():
            if state.is_running:
                self._states[rank].guard.send(rank, "halt", (current.call.number, reason))

    # -- reports about ranks

    def on_output(self, rank: int, stream: int, data: bytes) -> None:
        """Note the output of a rank."""
        if self._current is not None:
            call = self._current.call
            call.has_output = True
            if rank in call.ranks and call.records:
                call.records[rank].write(stream, data)

    def on_status(self, rank: int, status: Status, at: float) -> None:
        """Handle the report on the main thread of a rank."""
        current = self._current
        if current is None or current.step != "call" or rank not in current.states:
            return
        state = current.states[rank]
        state.status, state.status_at = status, at
        current.standstill.hint()
        others = len(current.states) < len(self._states) or not all(each.is_running for each in current.states.values())
        if others and not current.halts and current.standstill.is_deadlock(current.answered_at):
            current.stuck = True
            for each in current.states.values():
                if each.is_running:
                    self._states[each.rank].stacks = None
                    self._states[each.rank].request_stacks()
            self._halt(current, "fail")

    def on_word(self, rank: int, word: str, body: Any) -> bool:
        """Handle a message of a rank's control thread. Return False if it is none of this object's concern."""
        current = self._current
        if word == "stacks" and current is not None and current.stuck:
            current.stuck_stacks[rank] = body
        if word not in ("interrupted", "blocked", "connections", "numbers"):
            return False
        if current is None:
            return True
        if word in ("interrupted", "blocked") and current.step == "call":
            current.halted.add(rank)
            if all(each in current.halted for each, state in current.states.items() if state.is_running):
                current.until = time.monotonic() + max(self._platform.grace_s, _LEAST_GRACE_S)
        if word == "blocked":
            if current.step == "call" and current.halts and not current.breaks:
                current.breaks = True
                current.answers = {}
                self._send_all("connections")
        elif word == "connections" or word == current.step:
            current.answers[rank] = body
            self._on_replies(current, word)
        return True

    def _on_replies(self, current: _Current, word: str) -> None:
        living = [state.rank for state in self._states if state.is_alive]
        if not all(rank in current.answers for rank in living):
            return
        answers, current.answers = current.answers, {}
        if word == "connections":
            broken = connections_between(answers.values())
            current.broken = True
            self._send_all("break", broken)
            if current.step == "connections":
                self._regroup(current)
        elif _differ([*answers.values()]):
            self._ask(current, "connections")
        else:
            self._conclude(current)

    def on_answer(self, rank: int, answer: Arrival) -> None:
        """Handle an answer of a rank's main thread."""
        current = self._current
        if answer.word == "owned":
            names = answer.load()
            if names is not None:
                self._sent.note_owned(rank, *names)
            else:  # this rank could not set them
                self._sent.restore(self._before.get(answer.number, {}))
        elif current is None or answer.number != current.call.number:
            return
        elif answer.word == "regrouped":
            self._on_regrouped(current, rank, answer.load())
        elif current.step == "call" and rank in current.states:
            state = current.states[rank]
            state.outcome = outcome = _outcome_of(answer)
            current.answered_at = time.monotonic()
            if isinstance(outcome, Raised):
                self._states[rank].transcript.record(outcome.traceback)
                self._halt(current, "fail")
            self._on_answered(current)

    def _on_answered(self, current: _Current) -> None:
        if any(state.is_running for state in current.states.values()):
            return
        if not current.halts or len(self._states) == 1 or not self._platform.requires_ipc:
            self._conclude(current)
        elif current.broken:
            self._regroup(current)
        elif current.breaks:  # the connections are about to be closed
            current.step, current.until = "connections", time.monotonic() + _ANSWER_S
        else:
            self._ask(current, "numbers")

    # -- after a call has failed

    def _ask(self, current: _Current, word: str) -> None:
        current.step, current.until, current.answers = word, time.monotonic() + _ANSWER_S, {}
        self._send_all(word)

    def _regroup(self, current: _Current) -> None:
        self._generation += 1
        current.step, current.until, current.answers = "regroup", time.monotonic() + _REGROUP_S, {}
        generation = f"calls-{self._generation}"
        payload = pickle_value((generation, current.call.name), "the order")
        for state in self._states:
            _guard_of(state).call(state.rank, Message("regroup", None, current.call.number), *payload)

    def _on_regrouped(self, current: _Current, rank: int, failure: str | None) -> None:
        if failure is not None:
            self._lose(f"the process groups could not be made again after a failed call: rank {rank} raised {failure}")
            return
        current.answers[rank] = True
        if len(current.answers) == len(self._states):
            self._conclude(current)

    def _send_all(self, word: str, body: Any = None) -> None:
        for state in self._states:
            state.guard.send(state.rank, word, body)

    def _lose(self, reason: str) -> None:
        """End the ranks, because they can be called no more."""
        self.lost = self.lost or reason
        if self._current is not None:
            self._current.until = _NEVER
        self._end_ranks()

    # -- the clock

    def next_moment(self) -> float:
        """Return the time of the next scheduled action, by the monotonic clock."""
        current = self._current
        return _NEVER if current is None else min(current.until, current.up_at if current.step == "call" else _NEVER)

    def silent_from(self) -> float | None:
        """Return the begin of the call that runs: ranks may be silent since then. None if all ranks are idle."""
        current = self._current
        return None if current is None or current.step != "call" or current.halts else current.began

    def keep_time(self) -> None:
        """Act on a time that has come."""
        current, now = self._current, time.monotonic()
        if current is None:
            return
        if current.step == "call" and now >= current.up_at:
            current.up_at = _NEVER
            self._time_out(f"not done after timeout_min={self._platform.timeout_min:g} minutes")
        elif now >= current.until:
            running = ", ".join(f"{rank}" for rank, state in current.states.items() if state.is_running)
            if current.step == "call":
                self._lose(
                    f"rank(s) {running} did not stop within grace_s={self._platform.grace_s:g} after the call had failed "
                    "or was interrupted"
                )
            else:
                self._lose(f"the ranks did not agree on their process groups after a failed call ({current.step})")

    # -- the end of a call

    def _conclude(self, current: _Current) -> None:
        self._current = None
        outcomes = {rank: state.outcome for rank, state in current.states.items() if state.outcome is not None}
        hosts = [state.guard.host for state in self._states[:: self._platform.ranks_per_node]]
        ending = Ending(
            outcomes=outcomes,
            hosts=hosts,
            cancelled=current.call.is_cancelled,
            stuck=current.stuck,
            stacks=current.stuck_stacks,
            refused=current.refused,
        )
        self._finish(current, ending)
        self._start_next()

    def _make_ending(self, current: _Current, ending: Ending | BaseException) -> Ending:
        """Return how a call ended that the end of its ranks has ended."""
        if isinstance(ending, BaseException):
            return Ending({}, broken=f"the ranks ended: {ending}")
        outcomes: dict[int, Outcome] = {}
        for rank, outcome in ending.outcomes.items():
            own = current.states[rank].outcome if rank in current.states else None
            outcomes[rank] = outcome if own is None or isinstance(outcome, (Died, Raised)) else own
        stacks = {rank: text for rank, text in (ending.stacks or {}).items() if self._was_running(current, rank)}
        return Ending(
            outcomes={
                rank: each for rank, each in outcomes.items() if not isinstance(each, Returned) or rank in current.states
            },
            hosts=ending.hosts,
            stacks=stacks,
            cancelled=current.call.is_cancelled or (ending.cancelled and self.lost is None),
            timed_out=ending.timed_out,
            broken=ending.broken,
            lost=self.lost,
        )

    def _was_running(self, current: _Current, rank: int) -> bool:
        return rank in current.states and current.states[rank].is_running

    def _finish(self, current: _Current, ending: Ending) -> None:
        current.call.took_s = time.monotonic() - current.began
        current.call.ending = ending
        current.call.done.set()


def _guard_of(state: RankState) -> CallGuard:
    return cast("CallGuard", state.guard)


def _differ(numbers: Sequence[Mapping[str, int]]) -> bool:
    """True if the ranks may be out of step: counts differ, or the failed call has sent messages from rank to rank."""
    seen: dict[str, int] = {MESSAGES: 0}
    return any(seen.setdefault(group, number) != number for each in numbers for group, number in each.items())


def _outcome_of(answer: Arrival) -> Outcome:
    if answer.word == "returned":
        return Returned(time.time(), _Value(answer))
    if answer.word == "halted":
        return Ended(answer.load())
    assert answer.file is not None
    body = answer.load()
    return Raised(body["at"], PackedValue(answer.file), body["summary"], body["traceback"], body["is_echo"])
