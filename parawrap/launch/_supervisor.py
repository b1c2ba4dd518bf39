"""The watch over the ranks of one launch, from their start until the last of them is gone.

What it guarantees: `run` returns in bounded time after the first failure, the end of a time limit or `cancel`, and when it
returns, no process of the launch lives and every descriptor it used is closed.

One thread runs it. `cancel` and `ask_for_stacks` may be called from any other.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from parawrap.launch._outcomes import Died, Ended, Outcome, Parcel, Raised, Returned, first_failure
from parawrap.launch._output import Transcript
from parawrap.launch._platform import Platform
from parawrap.launch._server import STATUS
from parawrap.launch._starters import Started
from parawrap.launch._wire import Message, Wire

__all__ = ["Charge", "Supervisor"]

_PIECE = 1 << 16
_ECHO_WAIT_S = 1.0  # after an echo of a failure, this long for the failure itself
_STACKS_WAIT_S = 1.0
_LAST_WORDS = 2000


@dataclass
class Charge:
    """One rank under watch."""

    rank: int
    wire: Wire
    transcript: Transcript
    started: Started
    outcome: Outcome | None = None
    streams: dict[int, int] = field(default_factory=dict)
    stacks: str | None = None
    told_to_end: bool = False

    @property
    def is_running(self) -> bool:
        """Whether its function has not ended yet, as far as is known."""
        return self.outcome is None


class Supervisor:
    """Watches one launch; lives as long as it does."""

    def __init__(self, platform: Platform, on_loaded: Callable[[Iterable[str]], None]) -> None:
        self._platform = platform
        self._on_loaded = on_loaded
        self._charges: dict[int, Charge] = {}
        self._alive: set[int] = set()
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = os.pipe()
        self._wishes: list[str] = []
        self._access = threading.Lock()
        self._stacks_in = threading.Condition(self._access)
        self._kill_at: float | None = None
        self._end_at: float | None = None
        self._last_sign = time.monotonic()
        self.cancelled = False
        self.timed_out: str | None = None
        self._selector.register(self._woken, selectors.EVENT_READ, self._on_wish)

    # -- from any thread

    def cancel(self) -> None:
        """Have the ranks end."""
        self._wish("cancel")

    def ask_for_stacks(self) -> dict[int, str]:
        """What every thread of every running rank is doing; a rank that gives no answer within a second says so."""
        deadline = time.monotonic() + _STACKS_WAIT_S
        with self._access:
            asked = {rank: charge for rank, charge in self._charges.items() if charge.is_running}
            for charge in asked.values():
                charge.stacks = None
        self._wish("stacks")
        with self._access:
            self._stacks_in.wait_for(
                lambda: all(charge.stacks is not None or not charge.is_running for charge in asked.values()),
                max(0.0, deadline - time.monotonic()),
            )
            return {rank: charge.stacks or _NO_ANSWER for rank, charge in asked.items() if charge.is_running}

    def outcomes(self) -> dict[int, Outcome]:
        """How each rank ended; complete once `run` has returned."""
        return {rank: charge.outcome for rank, charge in self._charges.items() if charge.outcome is not None}

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
        """Take a started rank into charge, before `run`."""
        self._charges[charge.rank] = charge
        self._alive.add(charge.rank)
        self._selector.register(charge.wire, selectors.EVENT_READ, partial(self._on_message, charge))
        self._selector.register(charge.started.status, selectors.EVENT_READ, partial(self._on_status, charge))

    def run(self) -> None:
        """Watch until no rank is left."""
        began = self._last_sign = time.monotonic()
        limit = self._platform.timeout_min
        up_at = None if limit is None else began + 60 * limit
        try:
            while self._alive:
                for key, _ in self._selector.select(self._patience(up_at)):
                    if self._selector.get_map().get(key.fd) is key:  # not closed by one that came before it
                        key.data()
                self._keep_time(up_at)
        finally:
            self._close()

    def end(self) -> None:
        """Have every rank end that still runs; those that have returned and wait for the others may go."""
        if self._kill_at is None:
            self._kill_at = time.monotonic() + self._platform.grace_s
            for rank in self._alive:
                charge = self._charges[rank]
                charge.told_to_end = charge.is_running
                charge.wire.send("end" if charge.is_running else "bye")

    def _patience(self, up_at: float | None) -> float | None:
        """How long nothing may happen until the clock itself makes something happen."""
        hang = self._platform.hang_timeout_s
        silent_at = None if hang is None else self._last_sign + hang
        moments = [each for each in (up_at, silent_at, self._kill_at, self._end_at) if each is not None]
        return max(0.0, min(moments) - time.monotonic()) if moments else None

    def _keep_time(self, up_at: float | None) -> None:
        now = time.monotonic()
        hang = self._platform.hang_timeout_s
        if self._kill_at is not None:
            if now >= self._kill_at:
                self._kill()
        elif self._end_at is not None and now >= self._end_at:
            self.end()
        elif up_at is not None and now >= up_at:
            self._time_out(f"not done after timeout_min={self._platform.timeout_min} minutes")
        elif hang is not None and now >= self._last_sign + hang:
            self._time_out(f"silent for hang_timeout_s={hang} seconds")

    def _time_out(self, reason: str) -> None:
        """Ask every rank what it is doing, then end them."""
        if self.timed_out is None:
            self.timed_out = reason
            for rank in self._alive:
                self._charges[rank].stacks = _NO_ANSWER if self._charges[rank].is_running else None
                self._charges[rank].wire.send("stacks")
            self._end_at = time.monotonic() + _STACKS_WAIT_S

    def _kill(self) -> None:
        self._kill_at = float("inf")
        for rank in self._alive:
            _kill(self._charges[rank].started.pid)

    # -- what happens

    def _on_wish(self) -> None:
        os.read(self._woken, 4096)
        with self._access:
            wishes, self._wishes = self._wishes, []
        if "cancel" in wishes and self._kill_at is None and self._alive:
            self.cancelled = True
            self.end()
        if "stacks" in wishes:
            for rank in self._alive:
                self._charges[rank].wire.send("stacks")

    def _on_message(self, charge: Charge) -> None:
        message = charge.wire.receive()
        if message is None:
            self._hang_up(charge)
        elif message.word == "hello":
            self._listen_to(charge, message.files)
        elif message.word == "alive":
            self._last_sign = time.monotonic()
        elif message.word == "stacks":
            self._on_stacks(charge, message.body)
        else:
            self._on_loaded(message.body.get("loaded", ()))
            self._settle(charge, _outcome_of(message, charge))

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
        with self._access:
            charge.stacks = text
            self._stacks_in.notify_all()
            complete = all(self._charges[rank].stacks not in (None, _NO_ANSWER) for rank in self._alive)
        if self._end_at is not None and self.timed_out is not None and complete:
            self._end_at = time.monotonic()

    def _on_status(self, charge: Charge) -> None:
        """The process is gone. What it said and wrote may still be on its way; what it started may still run."""
        data = os.read(charge.started.status, STATUS.size)
        code = STATUS.unpack(data)[0] if len(data) == STATUS.size else None
        self._selector.unregister(charge.started.status)
        os.close(charge.started.status)
        self._alive.discard(charge.rank)
        _signal(os.killpg, charge.started.pid)
        while charge.wire.fileno() >= 0 and select.select([charge.wire], [], [], 0)[0]:
            self._on_message(charge)
        self._drain(charge)
        charge.transcript.finish()
        if charge.outcome is None:
            self._settle(charge, self._died(charge, code))

    def _drain(self, charge: Charge) -> None:
        """Whatever the pipes still hold. Not until their end: a process that the rank let loose may hold them open."""
        for number, file in list(charge.streams.items()):
            with contextlib.suppress(BlockingIOError):
                while data := os.read(file, _PIECE):
                    charge.transcript.write(number, data)
            self._stop_listening(charge, number)

    def _died(self, charge: Charge, code: int | None) -> Outcome:
        if charge.told_to_end:
            return Ended(time.time())
        return Died(
            time.time(),
            charge.started.pid,
            signal=signal.Signals(-code) if code is not None and code < 0 else None,
            exit_code=code if code is not None and code >= 0 else None,
            last_words=charge.transcript.last_words(_LAST_WORDS),
        )

    def _settle(self, charge: Charge, outcome: Outcome) -> None:
        """Take note of how a rank ended, and see to the others."""
        charge.outcome = outcome
        with self._access:
            self._stacks_in.notify_all()
        self._last_sign = time.monotonic()
        outcomes = self.outcomes()
        first = first_failure(outcomes)
        if first is None:
            if len(outcomes) == len(self._charges) and not any(isinstance(each, Ended) for each in outcomes.values()):
                self.end()
        elif isinstance(echo := outcomes[first], Raised) and echo.is_echo:
            self._end_at = self._end_at or time.monotonic() + _ECHO_WAIT_S
        else:
            self.end()

    def _hang_up(self, charge: Charge) -> None:
        self._selector.unregister(charge.wire)
        charge.wire.close()

    def _close(self) -> None:
        """Leave nothing open, also when the watch itself failed: then the ranks are killed."""
        for rank in self._alive:
            _kill(self._charges[rank].started.pid)
        for charge in self._charges.values():
            if charge.wire.fileno() >= 0:
                self._hang_up(charge)
            for number in list(charge.streams):
                self._stop_listening(charge, number)
        with self._access:
            os.close(self._woken)
            os.close(self._waker)
            self._waker = -1
            self._stacks_in.notify_all()
        self._selector.close()


_NO_ANSWER = "no answer within a second: the rank is in code that lets no Python run"


def _outcome_of(message: Message, charge: Charge) -> Outcome:
    body: dict[str, Any] = message.body
    at = body["at"]
    if message.word == "returned":
        return Returned(at, Parcel(message.files[0]))
    if message.word == "raised":
        return Raised(at, Parcel(message.files[0]), body["summary"], body["traceback"], body["is_echo"])
    if message.word == "left":
        return Died(at, charge.started.pid, exit_code=body["code"], by_sys_exit=True, last_words=body["said"])
    if charge.told_to_end:
        return Ended(at)
    return Died(at, charge.started.pid, signal=signal.SIGTERM)  # somebody else sent it


def _kill(pid: int) -> None:
    """Kill a rank and what it started. The group is its own from its first moment, but for an instant before."""
    _signal(os.killpg, pid)
    _signal(os.kill, pid)


def _signal(send: Callable[[int, int], None], pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        send(pid, signal.SIGKILL)
