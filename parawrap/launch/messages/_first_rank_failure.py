"""How ranks end, which of several failures is reported, and the exception for it.

When a rank fails, the collectives of the other ranks break. These follow-up errors are called echoes, and may arrive before
the original failure. The earliest failure that is not an echo is reported; if all are echoes, the earliest echo.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from parawrap.errors import LaunchError, RankDiedError, add_note
from parawrap.launch._rank_results import RankResults
from parawrap.launch.messages._last_words import LAST_WORDS
from parawrap.launch.messages._pack_exception import summary_of
from parawrap.launch.messages._pickle_values import memory_file, unpack
from parawrap.launch.messages._private_files import open_private

__all__ = [
    "Died",
    "Ended",
    "Failure",
    "Outcome",
    "Packed",
    "PackedValue",
    "Raised",
    "Requeued",
    "Returned",
    "error_of",
    "exit_text",
    "first_rank_failure",
    "make_collective_error",
    "values_of",
]

_MOST_NAMED = 8  # ranks in a message: more would not fit a line
_PIECE = 1 << 24  # bytes in memory while a file is copied
_TIMED_OUT = re.compile(
    r"timed out (after )?waiting|collective operation timeout", re.IGNORECASE
)  # of gloo, NCCL, and stores


Signal = signal.Signals | int


class Packed(Protocol):
    """A pickled value from a rank."""

    def open(self) -> Any:
        """Return the value. May be called again before `close`, for example after a Ctrl-C."""

    def close(self) -> None:
        """Release its memory."""


class PackedValue:
    """A pickled value from a rank, in an open file or at a path."""

    def __init__(self, file: int | Path) -> None:
        self._file: int | None = file if isinstance(file, int) else None
        self._path = file if isinstance(file, Path) else None

    def open(self) -> Any:
        """Return the value. May be called again before `close`, for example after a Ctrl-C."""
        if self._path is not None and self._file is None:  # copied: some file systems cannot remove a mapped file
            file = memory_file("parcel")
            try:
                with open_private(self._path) as packed, open(file, "wb", closefd=False) as copy:
                    shutil.copyfileobj(packed, copy)
            except BaseException:
                os.close(file)
                raise
            self._file = file
        assert self._file is not None, "closed"
        return unpack(self._file)

    def put(self, path: Path) -> PackedValue:
        """Write the value to a file at this path for another process. Return the new parcel, and close this one."""
        if self._file is None:  # it has a path already
            return self
        with path.open("wb") as out:
            size = os.fstat(self._file).st_size
            while out.tell() < size:
                out.write(os.pread(self._file, _PIECE, out.tell()))
        self.close()
        return PackedValue(path)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __del__(self) -> None:
        self.close()


@dataclass(frozen=True)
class Returned:
    """The function returned."""

    at: float
    value: Packed
    summary: ClassVar[str] = "returned"


@dataclass(frozen=True)
class Raised:
    """The function raised."""

    at: float
    error: Packed
    summary: str
    traceback: str
    is_echo: bool


@dataclass(frozen=True)
class Died:
    """The process ended without a result: by a signal, by ``sys.exit``, by an exit in C code, or with its node."""

    at: float
    pid: int
    signal: Signal | None = None
    exit_code: int | None = None
    by_sys_exit: bool = False
    last_words: str = ""
    lost_with: str = ""

    @classmethod
    def of(cls, code: int | None, *, at: float, pid: int, last_words: str, lost_with: str = "") -> Died:
        """Make an outcome from an exit code or a negative signal number. None means unknown."""
        if code is not None and code < 0:
            return cls(at, pid, signal=_signal(-code), last_words=last_words)
        return cls(at, pid, exit_code=code, last_words=last_words, lost_with=lost_with)

    @classmethod
    def by_exit(cls, error: SystemExit, *, pid: int) -> Died:
        """Make an outcome from the exception of ``sys.exit``."""
        given = error.code
        code = given if isinstance(given, int) else int(given is not None)
        said = "" if given is None or isinstance(given, int) else str(given)
        return cls(time.time(), pid, exit_code=code, by_sys_exit=True, last_words=said)

    @property
    def summary(self) -> str:
        """How the rank died, to complete a sentence that starts with the rank's name."""
        if self.signal is not None:
            return _describe_kill(self.signal)
        if self.by_sys_exit:
            return f"called sys.exit({self.exit_code}) and returned nothing"
        if self.lost_with:
            return f"was lost with {self.lost_with}"
        if self.exit_code is None:
            return "ended with an unknown exit code"
        return f"exited with code {self.exit_code} and returned nothing"


@dataclass(frozen=True)
class Requeued:
    """The function requested a restart of the launch."""

    at: float
    summary: ClassVar[str] = "requested a restart"


@dataclass(frozen=True)
class Ended:
    """The launch ended the rank before its function had ended."""

    at: float
    summary: ClassVar[str] = "was ended"


def exit_text(code: int) -> str:
    """Describe how a process ended, from its exit code or a negative signal number."""
    return _describe_kill(_signal(-code)) if code < 0 else f"exited with code {code}"


def _describe_kill(number: Signal) -> str:
    return f"was killed by {getattr(number, 'name', f'signal {number}')}"


def _signal(number: int) -> Signal:
    """Return the enum member of a signal, or the number if it has no name, like most real-time signals."""
    try:
        return signal.Signals(number)
    except ValueError:
        return number


Failure = Raised | Died
Outcome = Returned | Raised | Died | Requeued | Ended


def first_rank_failure(outcomes: Mapping[int, Outcome]) -> int | None:
    """Return the rank to report as failed, or None if no rank failed.

    If a rank exited to be restarted, the echoes of its exit do not count as failures.
    """
    failures = {rank: each for rank, each in outcomes.items() if isinstance(each, (Raised, Died))}
    if any(isinstance(each, Requeued) for each in outcomes.values()):
        failures = {rank: each for rank, each in failures.items() if not _is_echo(each)}
    return min(failures, key=lambda rank: (_is_echo(failures[rank]), failures[rank].at, rank), default=None)


def _is_echo(failure: Failure) -> bool:
    return isinstance(failure, Raised) and failure.is_echo


def values_of(outcomes: Mapping[int, Outcome], ranks: Sequence[int], world_size: int) -> RankResults[Any] | BaseException:
    """Return the results of these ranks, or the error if one of them cannot be unpickled."""
    values = []
    for rank in ranks:
        outcome = outcomes[rank]
        assert isinstance(outcome, Returned), outcome
        try:
            values.append(outcome.value.open())
        except Exception as error:  # noqa: BLE001 (the user's class may fail here)
            add_note(error, f"raised while the result of rank {rank} of {world_size} was unpickled")
            return error
    return RankResults(values)


def error_of(rank: int, outcomes: Mapping[int, Outcome], world_size: int, place: str) -> BaseException:
    """Return the exception to raise for a failed rank. Its notes name the rank, its place, and the other failed ranks.

    Args:
        rank: The rank that failed.
        outcomes: The outcomes of all ranks that have ended.
        world_size: The number of ranks.
        place: The node and host of the rank, such as ``"node 0, worker-17"``.
    """
    failure = outcomes[rank]
    if isinstance(failure, Raised):
        error = _open_failure(failure, rank)
        returned = [each for each, outcome in sorted(outcomes.items()) if isinstance(outcome, Returned)]
        if failure.is_echo and returned:
            error = make_collective_error(rank, returned, error)
        if _TIMED_OUT.search(failure.summary):
            add_note(error, "Platform(ipc_timeout_min=...) sets how many minutes a collective waits for other ranks")
        add_note(
            error, f"raised in rank {rank} of {world_size} ({place}), with this traceback:\n{_indent(failure.traceback)}"
        )
    else:
        assert isinstance(failure, Died)
        msg = f"rank {rank} of {world_size} {failure.summary} ({place}){f', process {failure.pid}' if failure.pid else ''}"
        error = RankDiedError(msg, rank=rank, signal=failure.signal, exit_code=failure.exit_code)
        if failure.last_words:
            error.add_note(f"the last output of rank {rank}:\n{_indent(failure.last_words[-LAST_WORDS:])}")
        if failure.signal is signal.SIGKILL:
            error.add_note("parawrap did not send SIGKILL: the kernel does if memory runs out, and so does kill -9")
    for note in _on_others(rank, outcomes, failure):
        add_note(error, note)
    return error


def make_collective_error(rank: int, returned: Sequence[int], error: BaseException) -> LaunchError:
    """Return an error that says that a collective broke because other ranks had returned. Its cause is `error`."""
    named = f"rank {returned[0]}" if len(returned) == 1 else f"ranks {', '.join(map(str, returned))}"
    msg = (
        f"{named} had returned already: in a collective, every rank of the group has to take part. Rank {rank} waited in "
        f"one and raised {summary_of(error)}"
    )
    explained = LaunchError(msg)
    explained.__cause__ = error
    return explained


def _open_failure(failure: Raised, rank: int) -> BaseException:
    try:
        error: BaseException = failure.error.open()
    except Exception as reason:  # noqa: BLE001 (the user's class may fail here)
        return LaunchError(f"rank {rank} raised {failure.summary}; this process cannot rebuild the exception: {reason!r}")
    return error


def _on_others(rank: int, outcomes: Mapping[int, Outcome], failure: Failure) -> list[str]:
    """Return a note on how the other ranks failed, in rank order. Empty if no other rank failed."""
    said = []
    for other, outcome in sorted(outcomes.items()):
        if other != rank and isinstance(outcome, Raised):
            said.append(f"rank {other} raised {outcome.summary}")
        elif other != rank and isinstance(outcome, Died):
            said.append(f"rank {other} {outcome.summary}")
    more = len(said) - _MOST_NAMED
    return (
        ["other failed ranks: " + "; ".join(said[:_MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")]
        if said
        else []
    )


def _indent(text: str) -> str:
    return "\n".join("  | " + line for line in text.splitlines())
