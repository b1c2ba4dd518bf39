"""Supervise one attempt, from the start of its ranks until the last one has ended.

Guarantee: `run` returns in bounded time after the first failure, the end of a time limit, or `cancel`. No process of the
attempt is alive then.

One thread runs the coordinator; any thread may call `collect_stacks`. Guards start the ranks and report on them.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from parawrap.launch._platform import Platform
from parawrap.launch.coordinator._calls import Calls
from parawrap.launch.coordinator._event_loop import Loop
from parawrap.launch.coordinator._rank_state import RankState
from parawrap.launch.coordinator._rank_times import RankTimes
from parawrap.launch.coordinator._standstill import Standstill, report_interval_s
from parawrap.launch.messages._first_rank_failure import (
    Died,
    Ended,
    Outcome,
    PackedValue,
    Raised,
    Requeued,
    Returned,
    first_rank_failure,
)
from parawrap.launch.messages._last_words import LAST_WORDS
from parawrap.launch.messages._line import Arrival
from parawrap.launch.rank._control_thread import FORCED, Status
from parawrap.launch.rank._rank_assignment import Assignment

__all__ = ["Coordinator"]

_ECHO_WAIT_S = 1.0  # time for the original failure to arrive after an echo of it
_STACKS_WAIT_S = 1.0  # a rank answers at once, unless C code holds the GIL
_WATCHING_S = 1.0  # a longer delay of the loop means that this process itself was stopped
_GIVE_UP_S = 20.0  # time for guards to report the end of killed ranks and their leftovers
_NEVER = float("inf")  # by the monotonic clock
_NO_ANSWER = "no answer within a second: the rank is stopped, or runs code that holds the GIL"
_NOT_STARTED = "its process has not started yet"


class Coordinator:
    """Supervises one attempt.

    Args:
        platform: The launch's platform.
        loop: The loop of the guards.
        states: The states of all ranks, by rank.
        up_at: The end of ``timeout_min``, by the monotonic clock.
        calls: The calls of ranks that stay.

    Attributes:
        cancelled: True if `cancel` ended the attempt.
        timed_out: The time limit that ended the attempt.
        stuck: True if the attempt was ended because its ranks waited for ranks that had returned.
        broken: The reason why ranks could not be started.
        preempted: True if the ranks were ordered to save and exit.
    """

    def __init__(
        self,
        platform: Platform,
        loop: Loop,
        states: Sequence[RankState],
        up_at: float | None = None,
        calls: Calls | None = None,
    ) -> None:
        self._platform = platform
        self._loop = loop
        self._states = states
        self._guards = list({id(state.guard): state.guard for state in states}.values())
        self._standstill = Standstill(states, report_interval_s(platform))
        self._changed = threading.Condition()
        self._outcomes: dict[int, Outcome] = {}
        self._has_failed = False
        self._departed_at: float | None = None
        self._unanswered: set[int] = set()
        self._up_at = up_at
        self._end_at: float | None = None
        self._kill_at: float | None = None
        self._has_killed = False
        self._leave_at: float | None = None
        self._last_sign = time.monotonic()
        self.cancelled = False
        self.timed_out: str | None = None
        self.stuck = False
        self.broken: str | None = None
        self.preempted = False
        self._calls = calls
        if calls is not None:
            calls.attach(loop, states, self.end, self._time_out)

    def collect_stacks(self) -> dict[int, str]:
        """Return the stacks of every running rank. A rank that does not answer within a second has a text that says so."""
        with self._changed:
            running = [state for state in self._states if state.is_running]
            for state in running if self.timed_out is None else ():  # keep the stacks of a time limit
                state.stacks = None
        self._loop.call_soon(self._request_stacks)
        with self._changed:
            self._changed.wait_for(
                lambda: all(state.stacks is not None or not state.is_running for state in running), _STACKS_WAIT_S
            )
            return {state.rank: state.stacks or _NO_ANSWER for state in running if state.is_running}

    def outcomes(self) -> dict[int, Outcome]:
        """Return how each rank ended. Complete once `run` has returned."""
        return dict(sorted(self._outcomes.items()))

    def stacks(self) -> dict[int, str]:
        """Return the stacks that were collected at a time limit or a deadlock."""
        return {state.rank: state.stacks for state in self._states if state.stacks is not None}

    def state_of(self, rank: int) -> str:
        """Describe the state of a rank."""
        state = self._states[rank]
        if state.outcome is not None:
            return state.outcome.summary
        if self._calls is not None and state.pid:
            return "running" if self._calls.is_running(rank) else "idle"
        return "running" if state.pid else "starting"

    def times(self, restart: int) -> list[RankTimes]:
        """Return when the phases of each started rank began, in the attempt after `restart` others."""
        return [
            RankTimes(state.rank, restart, state.guard.host, state.began, _failure_in(state.outcome))
            for state in self._states
            if state.began
        ]

    @property
    def given_up(self) -> bool:
        """True if the coordinator ended the attempt for another reason than the outcome of a rank."""
        return self.cancelled or self.stuck or self.timed_out is not None or self.broken is not None

    # -- the loop

    def begin(self, assignment_of: Callable[[int], Assignment]) -> None:
        """Start all ranks. If one cannot be started, end the others and raise."""
        try:
            for state in self._states:
                state.began["start"] = time.time()
                state.guard.start(assignment_of(state.rank), self)
        except BaseException:
            self.end()
            self.run()
            raise

    def run(self) -> None:
        """Supervise the ranks until all have ended."""
        self._last_sign = time.monotonic()
        try:
            while not self._is_over():
                self._loop.turn(self._next_moment() - time.monotonic())
                self._keep_time()
        except BaseException:
            self._kill()
            raise
        finally:
            with self._changed:
                self._changed.notify_all()

    def end(self) -> None:
        """End every rank."""
        if self._kill_at is None:
            self._kill_at = time.monotonic() + self._platform.grace_s
            for state in self._states:
                state.order_to_end()

    def cancel(self) -> None:
        """End every rank, unless the ranks are ending already."""
        if self._kill_at is None and not self._is_over():
            self.cancelled = True
            self.end()

    def preempt(self, *, ends_late: bool) -> None:
        """Order the ranks to save and exit. With `ends_late`, ranks that still run after ``grace_s`` are ended.

        All ranks save in the same loop iteration: the first one that no rank has reached yet. So each rank reports how
        often `should_checkpoint` has returned False, and further calls block until that iteration is known. The rank's
        control thread reports it, because the main thread of a rank that is ahead may wait in a collective.
        """
        if self._kill_at is not None:
            return
        if ends_late and self._leave_at is None:
            self._leave_at = time.monotonic() + self._platform.grace_s
        if self.preempted:
            return
        self.preempted = True
        running = [state for state in self._states if state.is_running]
        self._unanswered = {state.rank for state in running}
        for state in running:
            state.guard.send(state.rank, "preempt")

    def _agree_on_checkpoint(self, rank: int) -> None:
        """Note that this rank has answered or exited. Once all have, send them the call that returns True."""
        if self._unanswered == {rank}:
            due_from = max((state.answered for state in self._states if state.answered is not None), default=0)
            for state in self._states:
                if state.is_running:
                    state.guard.send(state.rank, "checkpoint", due_from)
        self._unanswered.discard(rank)

    def _is_over(self) -> bool:
        return all(guard.is_over for guard in self._guards)

    def _list_living(self) -> list[RankState]:
        return [state for state in self._states if state.is_alive]

    # -- the clock

    def _next_moment(self) -> float:
        """Return the time of the next scheduled action, such as a kill or a time limit."""
        if self._kill_at is not None:
            return self._kill_at
        if self._end_at is not None:
            return self._end_at
        calls_at = None if self._calls is None else self._calls.next_moment()
        moments = (self._up_at, self._leave_at, self._silent_at(), calls_at, _NEVER)
        return min(each for each in moments if each is not None)

    def _silent_at(self) -> float | None:
        """Return the end of ``hang_timeout_s``, unless a rank gives a sign of life before."""
        hang = self._platform.hang_timeout_s
        if hang is None or not all(state.pid for state in self._states):
            return None
        if self._calls is None:
            return self._last_sign + hang
        since = self._calls.silent_from()
        return None if since is None else max(since, self._last_sign) + hang

    def _keep_time(self) -> None:
        moment = self._next_moment()
        late_s = time.monotonic() - moment
        if late_s < 0:
            return
        if self._kill_at is not None:
            self._end_by_force()
        elif self._end_at is not None or moment == self._leave_at:
            self.end()
        elif self._calls is not None and moment == self._calls.next_moment():
            self._calls.keep_time()
        elif moment == self._up_at:
            self._time_out(f"not done after timeout_min={self._platform.timeout_min:g} minutes")
        elif late_s > _WATCHING_S:  # this process was stopped and has read nothing since
            self._last_sign = time.monotonic()
        else:
            self._time_out(f"silent for hang_timeout_s={self._platform.hang_timeout_s:g} seconds")

    def _time_out(self, reason: str) -> None:
        self.timed_out = reason
        self._end_with_stacks()

    def _end_with_stacks(self) -> None:
        """Request the stacks of every rank, then end the ranks."""
        for state in self._list_living():
            if state.is_running and (self._calls is None or self._calls.is_running(state.rank)):
                state.stacks = _NO_ANSWER if state.pid else _NOT_STARTED
                state.request_stacks()
        self._end_at = time.monotonic() + _STACKS_WAIT_S

    def _end_by_force(self) -> None:
        """Kill the ranks. On the second call, give up guards that have not reported the end of their ranks."""
        if self._has_killed:
            self._kill_at = _NEVER
            for guard in self._guards:
                guard.give_up()
        else:
            self._has_killed = True
            self._kill_at = time.monotonic() + _GIVE_UP_S
            self._kill()

    def _kill(self) -> None:
        for state in self._list_living():
            state.kill()

    def _request_stacks(self) -> None:
        for state in self._list_living():
            state.request_stacks()

    # -- reports from guards

    def on_start(self, rank: int, pid: int) -> None:
        self._states[rank].pid = pid
        self._last_sign = time.monotonic()

    def on_output(self, rank: int, stream: int, data: bytes) -> None:
        self._states[rank].transcript.write(stream, data)
        if self._calls is not None:
            self._calls.on_output(rank, stream, data)
        self._last_sign = time.monotonic()  # read the clock again: printing may have taken long

    def on_word(self, rank: int, word: str, body: Any, file: int | Path | None) -> None:
        state = self._states[rank]
        if self._calls is not None and self._calls.on_word(rank, word, body):
            return
        if word == "status":
            self._on_status(state, body)
        elif word == "stacks":
            self._on_stacks(state, body)
        elif word == "reached":
            phase, state.began[phase] = body
            self._release()
        elif word == "answered":
            state.answered = body
            self._agree_on_checkpoint(rank)
        else:
            self._settle(state, _outcome_of(word, body, file, state))

    def on_answer(self, rank: int, answer: Arrival) -> None:
        assert self._calls is not None
        self._last_sign = time.monotonic()
        self._calls.on_answer(rank, answer)

    def on_end(self, rank: int, code: int | None, lost_with: str = "") -> None:
        state = self._states[rank]
        state.is_alive = False
        state.began["end"] = time.time()
        if state.outcome is None:
            self._settle(state, self._judge_death(state, code, lost_with))

    def on_trouble(self, what: str) -> None:
        self.broken = self.broken or what
        self.end()

    def _on_stacks(self, state: RankState, text: str) -> None:
        state.owes_stacks = False
        with self._changed:
            state.stacks = text
            self._changed.notify_all()
        if (self.timed_out is not None or self.stuck) and _NO_ANSWER not in self.stacks().values():
            self._end_at = time.monotonic()

    def _on_status(self, state: RankState, status: Status) -> None:
        state.status, state.status_at = status, time.monotonic()
        self._last_sign = max(self._last_sign, state.status_at - status.unmoved_s)
        if self._calls is not None:
            self._calls.on_status(state.rank, status, state.status_at)
            return
        self._standstill.hint()
        self._end_deadlock()

    def _judge_death(self, state: RankState, code: int | None, lost_with: str) -> Outcome:
        ended_by_us = state.ordered_to_end and not lost_with and _is_caused_by_order(state, code)
        if ended_by_us or self.broken is not None:  # a failing node may have missed the rank's last message
            return Ended(time.time())
        last_words = state.transcript.last_words(LAST_WORDS)
        return Died.of(code, at=time.time(), pid=state.pid, last_words=last_words, lost_with=lost_with)

    # -- the end of a rank, and its consequences

    def _settle(self, state: RankState, outcome: Outcome) -> None:
        """Store how a rank's function ended, and decide what happens to the other ranks."""
        if isinstance(outcome, Raised):
            state.transcript.record(outcome.traceback)
            if self.preempted and state.ordered_to_end:  # the rank was late, and its clean-up failed
                outcome = Ended(outcome.at)
        state.began["teardown"] = outcome.at
        with self._changed:
            state.outcome = self._outcomes[state.rank] = outcome
            if self.timed_out is None and not self.stuck:
                state.stacks = None  # stale
            self._changed.notify_all()
        self._last_sign = time.monotonic()
        self._has_failed = self._has_failed or isinstance(outcome, (Raised, Died))
        first = first_rank_failure(self._outcomes) if self._has_failed else None
        if first is not None:
            self._on_failure(self._outcomes[first])
        elif len(self._outcomes) == len(self._states):
            self.end()
        else:
            self._on_departure(state.rank, outcome)

    def _on_departure(self, rank: int, outcome: Outcome) -> None:
        """Handle the exit of a rank while others run: they may wait for it, or must restart with it."""
        self._departed_at = time.monotonic()
        if isinstance(outcome, Requeued) and self._leave_at is None:
            self._leave_at = time.monotonic() + self._platform.grace_s
        if isinstance(outcome, Requeued) and self.timed_out is None:
            self._end_at = None  # the reported echo came from this exit
        self._agree_on_checkpoint(rank)
        self._release()

    def _release(self) -> None:
        """Let ranks that have returned end, once all others have joined the process groups."""
        if all("run" in state.began or not state.is_running for state in self._states):
            for state in self._list_living():
                if not state.is_running:
                    state.guard.send(state.rank, "met")
        if self._calls is not None and all("run" in state.began for state in self._states):
            self._calls.on_ready()

    def _end_deadlock(self) -> None:
        """End the attempt if all running ranks wait for ranks that have exited. It counts as stuck unless they restart."""
        if self._departed_at is None or self._kill_at is not None or self._end_at is not None:
            return
        if self._standstill.is_deadlock(self._departed_at):
            self.stuck = not (self.preempted or any(isinstance(each, Requeued) for each in self._outcomes.values()))
            if self.stuck:
                self._end_with_stacks()
            else:
                self.end()

    def _on_failure(self, first: Outcome) -> None:
        """End the other ranks. After an echo, first wait a moment for the original failure."""
        if not (isinstance(first, Raised) and first.is_echo):
            self.end()
        elif self._end_at is None:
            self._end_at = time.monotonic() + _ECHO_WAIT_S


def _failure_in(outcome: Outcome | None) -> str | None:
    return outcome.summary if isinstance(outcome, (Raised, Died)) else None


def _is_caused_by_order(state: RankState, code: int | None) -> bool:
    """True if the order to end, or a kill by the coordinator, explains the rank's exit code."""
    return code in (None, FORCED, -signal.SIGTERM) or (state.killed and code == -signal.SIGKILL)


def _outcome_of(word: str, body: dict[str, Any], file: int | Path | None, state: RankState) -> Outcome:
    at = body["at"]
    if word == "returned":
        assert file is not None
        return Returned(at, PackedValue(file))
    if word == "raised":
        assert file is not None
        return Raised(at, PackedValue(file), body["summary"], body["traceback"], body["is_echo"])
    if word == "left":
        return Died(at, state.pid, exit_code=body["code"], by_sys_exit=True, last_words=body["said"])
    if word == "requeued":
        return Requeued(at)
    if state.ordered_to_end:
        return Ended(at)
    return Died(at, state.pid, signal=signal.SIGTERM)  # sent from outside the launch
