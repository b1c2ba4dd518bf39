"""How ranks end, which of several failures is the one to tell, and the exception that tells it.

A failure of one rank soon fails the others: their collectives break. Those echoes may even be heard before the failure
itself. The one to tell is the earliest that is no echo; only where all are echoes, the earliest of them.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from parawrap.errors import LaunchError, RankDiedError
from parawrap.launch._failures import add_note
from parawrap.launch._packing import unpack
from parawrap.launch._results import RankResults

__all__ = ["Died", "Ended", "Failure", "Outcome", "Parcel", "Raised", "Returned", "error_of", "first_failure", "values_of"]

_TOLD_AT_MOST = 8
_LAST_WORDS = 2000


Signal = signal.Signals | int


class Parcel:
    """A value that a rank sent, still packed. Opened once; closed with whoever holds it."""

    def __init__(self, file: int) -> None:
        self._file: int | None = file

    def open(self) -> Any:
        """The value."""
        assert self._file is not None, "opened twice"
        try:
            return unpack(self._file)
        finally:
            self.close()

    def close(self) -> None:
        """Let go of it unopened."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __del__(self) -> None:
        self.close()


@dataclass(frozen=True)
class Returned:
    """The function returned."""

    at: float
    value: Parcel


@dataclass(frozen=True)
class Raised:
    """The function raised."""

    at: float
    error: Parcel
    summary: str
    traceback: str
    is_echo: bool


@dataclass(frozen=True)
class Died:
    """The process ended without a result: killed by a signal, by ``sys.exit``, or in C code."""

    at: float
    pid: int
    signal: Signal | None = None
    exit_code: int | None = None
    by_sys_exit: bool = False
    last_words: str = ""

    @classmethod
    def of(cls, code: int | None, *, at: float, pid: int, last_words: str) -> Died:
        """From how the process ended: an exit code, or minus the number of a signal; None where nobody knows."""
        if code is not None and code < 0:
            return cls(at, pid, signal=_signal(-code), last_words=last_words)
        return cls(at, pid, exit_code=code, last_words=last_words)

    @property
    def summary(self) -> str:
        """What happened, as the end of a sentence that begins with the rank."""
        if self.signal is not None:
            return f"was killed by {getattr(self.signal, 'name', f'signal {self.signal}')}"
        if self.by_sys_exit:
            return f"left by sys.exit({self.exit_code}) and returned nothing"
        if self.exit_code is None:
            return "is gone, and nobody knows how it ended"
        return f"left with exit code {self.exit_code} and returned nothing"


@dataclass(frozen=True)
class Ended:
    """The launch told it to end before it was done."""

    at: float


def _signal(number: int) -> Signal:
    """By its name, where it has one: most real-time signals have none."""
    try:
        return signal.Signals(number)
    except ValueError:
        return number


Failure = Raised | Died
Outcome = Returned | Raised | Died | Ended


def first_failure(outcomes: Mapping[int, Outcome]) -> int | None:
    """The rank whose failure is to be told; None where none failed."""
    failures = {rank: each for rank, each in outcomes.items() if isinstance(each, (Raised, Died))}
    return min(failures, key=lambda rank: (_is_echo(failures[rank]), failures[rank].at, rank), default=None)


def _is_echo(failure: Failure) -> bool:
    return isinstance(failure, Raised) and failure.is_echo


def values_of(outcomes: Mapping[int, Outcome], world_size: int) -> RankResults[Any] | BaseException:
    """What the ranks returned, or why that cannot be had."""
    values = []
    for rank in range(world_size):
        outcome = outcomes[rank]
        assert isinstance(outcome, Returned), outcome
        try:
            values.append(outcome.value.open())
        except Exception as error:  # noqa: BLE001 (a class of the user's that cannot be made here)
            error.add_note(f"this happened while the result of rank {rank} of {world_size} was being unpacked")
            return error
    return RankResults(values)


def error_of(rank: int, outcomes: Mapping[int, Outcome], world_size: int) -> BaseException:
    """The exception to raise for a rank that failed: its own, or RankDiedError; with notes on where, and on the others."""
    failure, place = outcomes[rank], f"(node 0, {socket.gethostname()})"
    if isinstance(failure, Raised):
        error = _opened(failure, rank)
        if failure.is_echo and (returned := _that_returned(outcomes)):
            add_note(error, returned)
        add_note(error, f"raised in rank {rank} of {world_size} {place}; there:\n{_indented(failure.traceback)}")
    else:
        assert isinstance(failure, Died)
        msg = f"rank {rank} of {world_size} {failure.summary} {place}, process {failure.pid}"
        error = RankDiedError(msg, rank=rank, signal=failure.signal, exit_code=failure.exit_code)
        if failure.last_words:
            error.add_note(f"the last that rank {rank} wrote:\n{_indented(failure.last_words[-_LAST_WORDS:])}")
        if failure.signal is signal.SIGKILL:
            error.add_note("nobody here sent that signal: a kernel out of memory does, and so does kill -9")
    for note in _on_others(rank, outcomes, failure):
        add_note(error, note)
    return error


def _opened(failure: Raised, rank: int) -> BaseException:
    try:
        error: BaseException = failure.error.open()
    except Exception as reason:  # noqa: BLE001 (a class of the user's that cannot be made here)
        return LaunchError(f"rank {rank} raised {failure.summary}; that exception cannot be rebuilt here: {reason!r}")
    return error


def _on_others(rank: int, outcomes: Mapping[int, Outcome], failure: Failure) -> list[str]:
    """One note on what the other ranks did, in rank order, and what that may mean."""
    said = []
    for other, outcome in sorted(outcomes.items()):
        if other != rank and isinstance(outcome, Raised):
            said.append(f"rank {other} raised {outcome.summary}")
        elif other != rank and isinstance(outcome, Died):
            said.append(f"rank {other} {outcome.summary}")
    more = len(said) - _TOLD_AT_MOST
    return ["then: " + "; ".join(said[:_TOLD_AT_MOST]) + (f"; and {more} more" if more > 0 else "")] if said else []


def _that_returned(outcomes: Mapping[int, Outcome]) -> str | None:
    """A note on ranks that others may have waited for in vain."""
    returned = [str(rank) for rank, outcome in sorted(outcomes.items()) if isinstance(outcome, Returned)]
    if not returned:
        return None
    ranks = f"rank {returned[0]} had" if len(returned) == 1 else f"ranks {', '.join(returned)} had"
    return f"{ranks} returned already: in a collective, every rank of the group has to take part"


def _indented(text: str) -> str:
    return "\n".join("  | " + line for line in text.splitlines())
