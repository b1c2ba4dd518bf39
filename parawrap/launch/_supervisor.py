"""The watch over the ranks of one launch, from their start until the last of them is gone.

What it guarantees: `run` returns in bounded time after the first failure, the end of a time limit or `cancel`, and when it
returns, no process of the launch lives and every descriptor it used is closed.

One thread runs it. `cancel` and `ask_for_stacks` may be called from any other.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from parawrap.launch._charge import Charge
from parawrap.launch._control import FORCED
from parawrap.launch._leftovers import LOOK_S, Leftovers
from parawrap.launch._outcomes import Died, Ended, Outcome, Parcel, Raised, Returned, first_failure
from parawrap.launch._platform import Platform
from parawrap.launch._server import STATUS
from parawrap.launch._wire import Message, is_readable

__all__ = ["Supervisor"]

_PIECE = 1 << 16
_PIECES_IN_A_PIPE = 16  # it holds a mebibyte at the most
_ECHO_WAIT_S = 1.0  # after an echo of a failure, this long for the failure itself
_STACKS_WAIT_S = 1.0
_LONGEST_WAIT_S = 3600.0  # a selector cannot wait for very long
_LAST_WORDS = 2000
_NO_ANSWER = "no answer within a second: the rank is in code that lets no Python run"


class Supervisor:
    """Watches one launch; lives as long as it does.

    Attributes:
        cancelled: whether `cancel` ended it.
        timed_out: which time limit ended it.
        stuck: whether it was ended because its ranks waited for such as had returned.
        broken: why there are no outcomes, where what starts the ranks failed itself.
        history: how earlier attempts ended.
    """

    def __init__(self, platform: Platform, on_loaded: Callable[[Iterable[str]], None]) -> None:
        self._platform = platform
        self._on_loaded = on_loaded
        self._charges: dict[int, Charge] = {}
        self._alive: set[int] = set()
        self._leftovers = Leftovers()
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = os.pipe()
        self._wishes: list[str] = []
        self._access = threading.Lock()
        self._stacks_in = threading.Condition(self._access)
        self._up_at: float | None = None
        self._end_at: float | None = None
        self._kill_at: float | None = None
        self._last_sign = time.monotonic()
        self.cancelled = False
        self.timed_out: str | None = None
        self.stuck = False
        self.broken: str | None = None
        self.history: list[str] = []
        self._selector.register(self._woken, selectors.EVENT_READ, self._on_wish)

    # -- from any thread

    def cancel(self) -> None:
        """Have the ranks end."""
        self._wish("cancel")

    def ask_for_stacks(self) -> dict[int, str]:
        """What every thread of every running rank is doing; a rank that gives no answer within a second says so."""
        with self._access:
            asked = [charge for charge in self._charges.values() if charge.is_running]
            for charge in asked:
                charge.stacks = None
        self._wish("stacks")
        with self._access:
            self._stacks_in.wait_for(
                lambda: all(charge.stacks is not None or not charge.is_running for charge in asked), _STACKS_WAIT_S
            )
            return {charge.rank: charge.stacks or _NO_ANSWER for charge in asked if charge.is_running}

    def outcomes(self) -> dict[int, Outcome]:
        """How each rank ended; complete once `run` has returned."""
        return {rank: charge.outcome for rank, charge in self._charges.items() if charge.outcome is not None}

    def all_returned(self) -> bool:
        """Whether every rank has returned."""
        outcomes = self.outcomes().values()
        return len(outcomes) == self._platform.world_size and all(isinstance(each, Returned) for each in outcomes)

    def stacks(self) -> dict[int, str]:
        """The stacks that were taken when the time was up."""
        return {rank: charge.stacks for rank, charge in self._charges.items() if charge.stacks is not None}

    def _wish(self, word: str) -> None:
        with self._access:
            if self._waker >= 0:
                self._wishes.append(word)
                os.write(self._waker, b"!")

    # -- the watch

    def watch(self, charge: Charge) -> None:
        """Take a started rank into charge."""
        with self._access:
            self._charges[charge.rank] = charge
        self._alive.add(charge.rank)
        self._selector.register(charge.wire, selectors.EVENT_READ, partial(self._on_message, charge))
        if charge.status is not None:
            self._selector.register(charge.status, selectors.EVENT_READ, partial(self._on_status, charge))

    def run(self) -> None:
        """Watch until no rank is left."""
        self._last_sign = time.monotonic()
        if self._platform.timeout_min is not None:
            self._up_at = self._last_sign + 60 * self._platform.timeout_min
        try:
            while not self._is_over():
                for key, _ in self._selector.select(self._patience()):
                    if self._selector.get_map().get(key.fd) is key:  # not closed by one that came before it
                        key.data()
                self._keep_time()
        finally:
            self._close()

    def end(self) -> None:
        """Have every rank end."""
        if self._kill_at is None:
            self._kill_at = time.monotonic() + self._platform.grace_s
            for rank in self._alive:
                self._charges[rank].tell_to_end()

    def _is_over(self) -> bool:
        return not self._alive and not self._leftovers

    # -- the clock

    def _next_moment(self) -> float | None:
        """When the clock itself makes something happen: ranks are killed, ended, out of time, or silent for too long."""
        if self._kill_at is not None:
            return self._kill_at
        if self._end_at is not None:
            return self._end_at
        hang = self._platform.hang_timeout_s
        all_began = sum(charge.greeted for charge in self._charges.values()) == self._platform.world_size
        silent_at = self._last_sign + hang if hang is not None and all_began else None
        return min((each for each in (self._up_at, silent_at) if each is not None), default=None)

    def _patience(self) -> float:
        moment, longest = self._next_moment(), LOOK_S if self._leftovers else _LONGEST_WAIT_S
        return longest if moment is None else min(max(0.0, moment - time.monotonic()), longest)

    def _keep_time(self) -> None:
        self._leftovers.look()
        moment = self._next_moment()
        if moment is None or time.monotonic() < moment:
            return
        if self._kill_at is not None:
            self._kill_at = float("inf")
            self._kill()
        elif self._end_at is not None:
            self.end()
        elif moment == self._up_at:
            self._time_out(f"not done after timeout_min={self._platform.timeout_min:g} minutes")
        else:
            self._time_out(f"silent for hang_timeout_s={self._platform.hang_timeout_s:g} seconds")

    def _time_out(self, reason: str) -> None:
        """Ask every rank what it is doing, then end them."""
        self.timed_out = reason
        for rank in self._alive:
            if self._charges[rank].is_running:
                self._charges[rank].stacks = _NO_ANSWER
                self._charges[rank].ask_for_stacks()
        self._end_at = time.monotonic() + _STACKS_WAIT_S

    def _kill(self) -> None:
        for rank in self._alive:
            self._charges[rank].kill()

    # -- what happens

    def _on_wish(self) -> None:
        os.read(self._woken, 4096)
        with self._access:
            wishes, self._wishes = self._wishes, []
        if "cancel" in wishes and self._kill_at is None and not self._is_over():
            self.cancelled = True
            self.end()
        if "stacks" in wishes:
            for rank in self._alive:
                self._charges[rank].ask_for_stacks()

    def _on_message(self, charge: Charge) -> None:
        message = charge.wire.receive()
        if message is None:
            self._hang_up(charge)
        elif message.word == "hello":
            self._on_hello(charge, message.files)
        elif message.word == "alive":
            self._last_sign = time.monotonic()
        elif message.word == "stacks":
            self._on_stacks(charge, message.body)
        elif message.word in ("stuck", "moves"):
            charge.is_stuck = message.word == "stuck"
            charge.stacks = message.body if charge.is_stuck else None
            self._end_stuck()
        else:
            self._on_loaded(message.body["loaded"])
            self._settle(charge, _outcome_of(message, charge))

    def _on_hello(self, charge: Charge, streams: Iterable[int]) -> None:
        charge.greeted = True
        self._last_sign = time.monotonic()
        self._listen_to(charge, streams)

    def _listen_to(self, charge: Charge, streams: Iterable[int]) -> None:
        for number, file in enumerate(streams, start=1):
            os.set_blocking(file, False)
            charge.streams[number] = file
            self._selector.register(file, selectors.EVENT_READ, partial(self._on_output, charge, number, file))

    def _on_output(self, charge: Charge, number: int, file: int) -> None:
        self._last_sign = time.monotonic()
        try:
            data = os.read(file, _PIECE)
        except BlockingIOError:
            return
        if data:
            charge.transcript.write(number, data)
        else:
            self._stop_listening(charge, number)

    def _stop_listening(self, charge: Charge, number: int) -> None:
        file = charge.streams.pop(number)
        self._selector.unregister(file)
        os.close(file)

    def _on_stacks(self, charge: Charge, text: str) -> None:
        charge.asked = False
        with self._access:
            charge.stacks = text
            self._stacks_in.notify_all()
        if self.timed_out is not None and _NO_ANSWER not in self.stacks().values():
            self._end_at = time.monotonic()

    def _on_status(self, charge: Charge) -> None:
        """The process is gone. What it said and wrote may still be on its way; what it started may still run."""
        assert charge.status is not None
        data = os.read(charge.status, STATUS.size)
        code = STATUS.unpack(data)[0] if len(data) == STATUS.size else None
        self._selector.unregister(charge.status)
        os.close(charge.status)
        charge.status = None
        self._bury(charge, code)

    def _bury(self, charge: Charge, code: int | None) -> None:
        """Take note of the end of a rank's process."""
        self._alive.discard(charge.rank)
        self._leftovers.take(charge.pid)
        while charge.wire.fileno() >= 0 and is_readable(charge.wire, 0):
            self._on_message(charge)
        self._drain(charge)
        if charge.outcome is None:
            self._settle(charge, self._died(charge, code))

    def _drain(self, charge: Charge) -> None:
        """Whatever the pipes still hold. Not until their end: a process that the rank let loose may hold them open."""
        for number, file in list(charge.streams.items()):
            with contextlib.suppress(BlockingIOError):
                for _ in range(_PIECES_IN_A_PIPE):
                    charge.transcript.write(number, os.read(file, _PIECE))
            self._stop_listening(charge, number)

    def _died(self, charge: Charge, code: int | None) -> Outcome:
        if charge.told_to_end and _is_our_doing(charge, code):
            return Ended(time.time())
        last_words = charge.transcript.last_words(_LAST_WORDS)
        return Died.of(code, at=time.time(), pid=charge.pid, last_words=last_words)

    def _settle(self, charge: Charge, outcome: Outcome) -> None:
        """Take note of how a rank's function ended, and see to the others."""
        if isinstance(outcome, Raised):
            charge.transcript.record(outcome.traceback)
        with self._access:
            charge.outcome = outcome
            if self.timed_out is None and not self.stuck:
                charge.stacks = None  # they tell of what is over
            self._stacks_in.notify_all()
        self._last_sign = time.monotonic()
        outcomes = self.outcomes()
        first = first_failure(outcomes)
        if first is not None:
            self._on_failure(outcomes[first])
        elif len(outcomes) < self._platform.world_size:
            for rank in self._alive:
                self._charges[rank].tell_of_others()
            self._end_stuck()
        elif self.all_returned():
            self.end()

    def _end_stuck(self) -> None:
        """Where all that still run wait for ranks that have returned, none will ever go on."""
        running = [self._charges[rank] for rank in self._alive if self._charges[rank].is_running]
        if running and all(charge.is_stuck for charge in running) and self._kill_at is None:
            self.stuck = True
            self.end()

    def _on_failure(self, first: Outcome) -> None:
        """End the others; but where only an echo was heard so far, wait for what it is an echo of."""
        if not (isinstance(first, Raised) and first.is_echo):
            self.end()
        elif self._end_at is None:
            self._end_at = time.monotonic() + _ECHO_WAIT_S

    def _hang_up(self, charge: Charge) -> None:
        self._selector.unregister(charge.wire)
        charge.wire.close()

    def _close(self) -> None:
        """Leave nothing open, also when the watch itself failed: then the ranks are killed."""
        self._kill()
        for charge in self._charges.values():
            if charge.wire.fileno() >= 0:
                self._selector.unregister(charge.wire)
                charge.wire.close()
            for number in list(charge.streams):
                self._stop_listening(charge, number)
            if charge.status is not None:
                os.close(charge.status)
            charge.transcript.finish()
        with self._access:
            os.close(self._woken)
            os.close(self._waker)
            self._waker = -1
            self._stacks_in.notify_all()
        self._selector.close()


def _is_our_doing(charge: Charge, code: int | None) -> bool:
    """Whether a rank that was told to end can have ended this way because of that."""
    return code in (None, FORCED, -signal.SIGTERM) or (charge.killed and code == -signal.SIGKILL)


def _outcome_of(message: Message, charge: Charge) -> Outcome:
    body: dict[str, Any] = message.body
    at = body["at"]
    if message.word == "returned":
        return Returned(at, Parcel(message.files[0]))
    if message.word == "raised":
        return Raised(at, Parcel(message.files[0]), body["summary"], body["traceback"], body["is_echo"])
    if message.word == "left":
        return Died(at, charge.pid, exit_code=body["code"], by_sys_exit=True, last_words=body["said"])
    if charge.told_to_end:
        return Ended(at)
    return Died(at, charge.pid, signal=signal.SIGTERM)  # somebody else sent it
