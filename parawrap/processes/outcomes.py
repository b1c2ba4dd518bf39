"""How ranks end a call, which of several failures is reported, and the exception for it.

When a rank fails, the collectives of the other ranks raise errors. These are called echoes, and may
arrive before the original failure. The earliest failure that is not an echo is reported. If all are
echoes, the earliest echo is.
"""

from __future__ import annotations

import contextlib
import dis
import os
import re
import signal
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from parawrap.backends import user_frames
from parawrap.errors import (
    LaunchCancelledError,
    LaunchError,
    LaunchTimeoutError,
    RankDiedError,
    add_note,
)
from parawrap.processes.packing import restore
from parawrap.processes.pickling import Packed, ValuePickler, pack, unpack
from parawrap.processes.torch_groups import has_had_groups

_MOST_NAMED = 8  # ranks in a message: more would not fit a line
# Exceptions that are causes or contexts of another. They may form a circle. A guess that no test
# has contradicted
_LONGEST_CHAIN = 20

# Messages of gloo, NCCL, and the store about a lost connection to another rank
_ECHO = re.compile(
    r"connection (was )?(closed|reset|refused)|connection closed by peer|broken pipe|"
    r"remote process exited|"
    r"socket closed|failed to recv|nccl .*(abort|remote)|peer .*(closed|exited)",
    re.IGNORECASE,
)

_CPP_LINE = re.compile(r"\[\S+\.(cc|cpp|h):\d+\]")  # such as [pair.cc:534]
# Of the code of torch that communicates between ranks
_TORCH_FOLDERS = tuple(
    str(Path(str(module.__file__)).parent)
    for module in (dist, torch.autograd, torch.nn.parallel)  # backward of DistributedDataParallel
)
_RAISING = ("RAISE_VARARGS", "RERAISE")  # the instructions of a ``raise``

Signal = signal.Signals | int  # an int if Python has no name for it, as for real-time signals


# -- the exception of a rank, on its way to the launching process


class _ExceptionPickler(ValuePickler):
    replaces = True


def pack_exception(error: BaseException) -> Packed:
    """Pickle an exception, with descriptions in place of parts that cannot be pickled.

    If it cannot be rebuilt, pickle a LaunchError instead.
    """
    with contextlib.suppress(Exception):  # classes may raise anything
        packed = pack(error, type(error).__qualname__, _ExceptionPickler)
        # What can be rebuilt here can be rebuilt in the launching process: it has the same code, or
        # gets the class by value
        if type(unpack(packed.to_bytes())) is type(error):
            return packed
    return pack(
        LaunchError(f"an exception that cannot be pickled: {summary_of(error)}"), "the exception"
    )


def summary_of(error: BaseException) -> str:
    """Return the line of the traceback that names the exception."""
    name = type(error).__qualname__
    try:
        lines = [line.strip() for line in traceback.format_exception_only(error)]
    except Exception as reason:  # noqa: BLE001 (attributes of the class may raise anything)
        return f"{name}, which cannot be described: {type(reason).__name__}"
    # A SyntaxError has lines of source before this line, and notes follow it
    for line in lines:
        named, _, _ = line.partition(":")
        if named.endswith(name):
            return line
    return lines[0]


def traceback_of(error: BaseException) -> str:
    """Return the traceback as text, from its first frame outside parawrap on, if there is one."""
    trace = user_frames(error.__traceback__) or error.__traceback__
    try:
        return "".join(traceback.format_exception(type(error), error, trace)).rstrip()
    except Exception:  # noqa: BLE001 (as in `summary_of`)
        return "".join((*traceback.format_tb(trace), summary_of(error)))


def is_echo(error: BaseException) -> bool:
    """True if the exception, or a cause of it, reports a lost connection to another rank.

    Errors of the user's code may have the same words. So only an exception that torch has raised is
    an echo, and only if this process has had a process group.
    """
    if not has_had_groups():
        return False
    link: BaseException | None = error
    for _ in range(_LONGEST_CHAIN):
        if link is None:
            return False
        if isinstance(link, (RuntimeError, dist.DistError)):
            text = summary_of(link)
            if _ECHO.search(text) and _is_raised_by_torch(link, text):
                return True
        # The exception that Python would show next
        if link.__cause__ is not None:
            link = link.__cause__
        else:
            link = None if link.__suppress_context__ else link.__context__
    return False


def _is_raised_by_torch(error: BaseException, text: str) -> bool:
    """True if code of torch that communicates between ranks has raised the exception.

    Errors of the store and of NCCL have classes of their own. Those of gloo are a plain
    RuntimeError, whose text names a line of C++ code. The innermost frame is one of torch, or, for
    a wait in C++ (``work.wait()``), that of its caller. There the instruction that raised is a
    call, and not a ``raise``.
    """
    is_of_gloo = type(error) is RuntimeError and _CPP_LINE.search(text)
    if not (is_of_gloo or isinstance(error, dist.DistError)):
        return False
    trace = error.__traceback__
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    if code.co_filename.startswith(_TORCH_FOLDERS):
        return True
    return dis.opname[code.co_code[trace.tb_lasti]] not in _RAISING


# -- outcomes


@dataclass(frozen=True)
class Returned:
    """The function returned."""

    at: float  # a time by `time.time`, as in all outcomes
    value: memoryview | bytes = field(repr=False)  # the block with the value
    # where the value is in the block; None if the block is a whole `Packed`, as in files of Slurm
    item: Any = field(default=None, repr=False)
    summary: ClassVar[str] = "returned"

    def load(self) -> Any:
        """Unpickle the value. Raises what its classes raise."""
        if self.item is None:
            return unpack(self.value)
        return restore(self.item, memoryview(self.value))


@dataclass(frozen=True)
class Raised:
    """The function raised."""

    at: float
    summary: str  # the line of the traceback that names the exception
    traceback: str
    is_echo: bool
    error: bytes = field(repr=False)  # the exception, from `pack_exception`


@dataclass(frozen=True)
class Died:
    """The process ended without an answer: by a signal, ``sys.exit``, C code, or with its node."""

    at: float
    pid: int
    code: int | None  # the exit code, or the negative number of a signal; None if it is unknown
    by_sys_exit: bool = False  # the function called ``sys.exit``
    last_words: str = ""  # the end of its output, or the text of ``sys.exit``
    lost_with: str = ""  # the thing with which the process was lost, such as its node

    @property
    def signal(self) -> Signal | None:
        """The signal that killed the process, or None."""
        # The argument of `sys.exit` may be negative too
        if self.code is None or self.code >= 0 or self.by_sys_exit:
            return None
        return _signal(-self.code)

    @property
    def summary(self) -> str:
        """How the rank died, to complete a sentence that starts with the rank's name."""
        if self.by_sys_exit:
            return f"called sys.exit({self.code}) and returned nothing"
        if self.code is not None and self.code < 0:
            return exit_text(self.code)
        if self.lost_with:
            return f"was lost with {self.lost_with}"
        if self.code is None:
            return "ended with an unknown exit code"
        return f"exited with code {self.code} and returned nothing"


@dataclass(frozen=True)
class Requeued:
    """The function requested a restart of the launch."""

    at: float
    summary: ClassVar[str] = "requested a restart"


@dataclass(frozen=True)
class Ended:
    """The rank was ended, or its call was interrupted, before the function had ended."""

    at: float
    summary: ClassVar[str] = "was ended"


Outcome = Returned | Raised | Died | Requeued | Ended


def outcome_of(error: BaseException) -> Raised | Died:
    """Return the outcome of a function that has raised this exception."""
    if not isinstance(error, SystemExit):
        packed = pack_exception(error).to_bytes()
        return Raised(time.time(), summary_of(error), traceback_of(error), is_echo(error), packed)
    # As in an interpreter: None is the code 0. Another object is printed, and the code is 1
    code, said = error.code, ""
    if not (code is None or isinstance(code, int)):
        code, said = 1, str(code)
    return Died(time.time(), os.getpid(), code or 0, by_sys_exit=True, last_words=said)


def exit_text(code: int) -> str:
    """Describe how a process ended, from its exit code or a negative signal number."""
    if code >= 0:
        return f"exited with code {code}"
    number = _signal(-code)
    return f"was killed by {getattr(number, 'name', f'signal {number}')}"


def _signal(number: int) -> Signal:
    """Return the enum member of a signal, or the number if it has no name."""
    try:
        return signal.Signals(number)
    except ValueError:
        return number


def first_failure(outcomes: Mapping[int, Outcome]) -> int | None:
    """Return the rank to report as failed, or None if no rank failed.

    If a rank exited to be restarted, the echoes of its exit do not count as failures.
    """
    is_to_restart = any(isinstance(each, Requeued) for each in outcomes.values())
    # True for an echo, a time, and a rank: the least of these tuples is reported
    failures: list[tuple[bool, float, int]] = []
    for rank, outcome in outcomes.items():
        if not isinstance(outcome, (Raised, Died)):
            continue
        is_an_echo = counts_as_echo(outcome)
        if is_to_restart and is_an_echo:
            continue
        # False is less than True. The clocks of all nodes are nearly the same; on Slurm, `at` is a
        # number that the ranks count together
        failures.append((is_an_echo, outcome.at, rank))
    if not failures:
        return None
    _, _, first = min(failures)
    return first


def counts_as_echo(outcome: Outcome) -> bool:
    """True if an outcome is the consequence of another rank's end."""
    # A death is never an echo: the process cannot say why it ended
    return isinstance(outcome, Raised) and outcome.is_echo


# -- the results of a call, or its error


@dataclass(frozen=True)
class Ending:
    """How a call of ranks ended."""

    outcomes: Mapping[int, Outcome]  # by rank, as all mappings here
    # the node and host: ``"node 0, worker-17"``
    places: Mapping[int, str] = field(default_factory=dict)
    history: Sequence[str] = ()  # how earlier attempts ended, and other notes for the error
    stacks: Mapping[int, str] = field(default_factory=dict)  # at a time limit or a deadlock
    timed_out: str = ""  # the time limit that ended the call; empty for none
    # the line of user code at which the rank was seen last; empty without a time limit
    last_lines: Mapping[int, str] = field(default_factory=dict)
    deadlocked: bool = False  # True: its ranks waited for ranks that do not take part
    cancelled: bool = False  # True: it has no results, whatever the outcomes are
    lost: str = ""  # another reason why the ranks had to be ended; empty for none
    error: OSError | None = None  # why this process could not take an answer
    has_output: bool = False  # True if a rank wrote output during the call
    regroups: bool = False  # True if the ranks form new process groups before their next call

    @classmethod
    def of_cancelled(cls) -> Ending:
        """Return the ending of a launch, or a call, that was cancelled: no outcome matters."""
        return cls({}, cancelled=True)

    @property
    def was_aborted(self) -> bool:
        """True if something else than an outcome of a rank ended the call."""
        return bool(self.cancelled or self.timed_out or self.deadlocked or self.lost or self.error)

    @property
    def is_success(self) -> bool:
        """True if every rank returned and nothing else ended the call."""
        return not self.was_aborted and all(
            isinstance(each, Returned) for each in self.outcomes.values()
        )

    @property
    def is_uneven(self) -> bool:
        """True unless all ranks have returned, or all have raised the same error, and no echo."""
        outcomes = list(self.outcomes.values())
        if all(isinstance(each, Returned) for each in outcomes):
            return False
        raised = {each.summary for each in outcomes if isinstance(each, Raised)}
        are_raised = all(isinstance(each, Raised) and not each.is_echo for each in outcomes)
        return not (are_raised and len(raised) == 1)


def values_of(name: str, ending: Ending, ranks: Sequence[int], world_size: int) -> list[Any]:
    """Return the value of each of these ranks.

    Raises:
        BaseException: The exception of the rank that failed first, or another error that says how
            the call ended.
    """
    if ending.cancelled:
        msg = f"the launch of {name} was cancelled: it has no results"
        raise LaunchCancelledError(msg)
    failed = first_failure(ending.outcomes)
    unanswered = [each for each in ranks if not isinstance(ending.outcomes.get(each), Returned)]
    error: BaseException | None = ending.error
    if ending.timed_out or ending.deadlocked:
        error = _error_with_stacks(name, ending)
    elif failed is not None:
        error = error_of(failed, ending.outcomes, world_size, ending.places.get(failed, ""))
        if ending.lost:
            add_note(error, f"the ranks were ended: {ending.lost}")
    elif error is None and unanswered:
        error = LaunchError(
            ending.lost or f"rank {unanswered[0]} of {name} ended without an answer"
        )
    if error is not None:
        for note in ending.history:
            add_note(error, note)
        raise error
    values = []
    for rank in ranks:
        outcome = ending.outcomes[rank]
        assert isinstance(outcome, Returned)
        try:
            values.append(outcome.load())
        except Exception as reason:
            add_note(
                reason, f"raised while the result of rank {rank} of {world_size} was unpickled"
            )
            raise
    return values


def error_of(
    rank: int, outcomes: Mapping[int, Outcome], world_size: int, place: str
) -> BaseException:
    """Return the exception to raise for a failed rank.

    Its notes name the rank, its place, and the other failed ranks.
    """
    failure = outcomes[rank]
    if isinstance(failure, Raised):
        returned = [each for each in sorted(outcomes) if isinstance(outcomes[each], Returned)]
        error = _rebuild_error(rank, failure, returned)
        add_note(
            error,
            f"raised in rank {rank} of {world_size} ({place}), with this traceback:\n"
            f"{_indent(failure.traceback)}",
        )
    else:
        assert isinstance(failure, Died)
        error = _error_of_death(rank, failure, world_size, place)
    others = []
    for other, outcome in sorted(outcomes.items()):
        if other == rank:
            continue
        if isinstance(outcome, Raised):
            others.append(f"rank {other} raised {outcome.summary}")
        elif isinstance(outcome, Died):
            others.append(f"rank {other} {outcome.summary}")
    if others:
        add_note(error, f"other failed ranks: {_first_of(others)}")
    return error


def _rebuild_error(rank: int, failure: Raised, returned: Sequence[int]) -> BaseException:
    """Return the exception of a rank, or a LaunchError in its place."""
    try:
        error: BaseException = unpack(failure.error)
    except Exception as reason:  # noqa: BLE001 (the user's class may fail here)
        error = LaunchError(
            f"rank {rank} raised {failure.summary}; its exception cannot be rebuilt here: "
            f"{reason!r}"
        )
    # A LaunchError already says why the connection was lost: see `_outcome_of` in rank_process.py
    if not failure.is_echo or not returned or isinstance(error, LaunchError):
        return error
    who = "rank" if len(returned) == 1 else "ranks"
    # The traceback in the note has the error of the connection. Python would show a cause first
    return LaunchError(
        f"{who} {', '.join(map(str, returned))} had returned already: in a collective, every rank "
        f"of the group has to take part. Rank {rank} waited in one"
    )


def _error_of_death(rank: int, failure: Died, world_size: int, place: str) -> RankDiedError:
    """Return the error for a rank whose process has ended."""
    process = f", process {failure.pid}" if failure.pid else ""
    msg = f"rank {rank} of {world_size} {failure.summary} ({place}){process}"
    code = None if failure.signal is not None else failure.code
    error = RankDiedError(msg, rank=rank, signal=failure.signal, exit_code=code)
    if failure.last_words:
        error.add_note(f"the last output of rank {rank}:\n{_indent(failure.last_words)}")
    if failure.signal is signal.SIGKILL:
        error.add_note(
            "parawrap did not send SIGKILL: the kernel does if memory runs out, and so does kill -9"
        )
    return error


def _error_with_stacks(name: str, ending: Ending) -> LaunchError:
    """Return the error of a call that was ended at a time limit or in a deadlock."""
    stacks = "\n".join(f"rank {rank}:\n{text}" for rank, text in sorted(ending.stacks.items()))
    if ending.timed_out:
        where = f": {describe_lines(ending.last_lines)}" if ending.last_lines else ""
        msg = f"{name} was {ending.timed_out}; its ranks were ended{where}. Their stacks:\n{stacks}"
        return LaunchTimeoutError(msg, stacks=dict(ending.stacks))
    returned = ", ".join(
        str(rank) for rank, outcome in ending.outcomes.items() if isinstance(outcome, Returned)
    )
    if returned:
        how = f"rank(s) {returned} have returned, and all others wait"
    else:
        how = "the ranks that were called wait"
    msg = (
        f"{name} is deadlocked: {how} in torch.distributed. In a collective, every rank of the "
        f"group has to take part. Stacks of the waiting ranks:\n{stacks}"
    )
    return LaunchError(msg)


def describe_lines(lines: Mapping[int, str]) -> str:
    """Say at which line of user code each rank is."""
    return _first_of([f"rank {rank} at {line}" for rank, line in sorted(lines.items())])


def _first_of(texts: Sequence[str]) -> str:
    """Join the first texts about ranks, and say how many more there are."""
    shown = "; ".join(texts[:_MOST_NAMED])
    if len(texts) <= _MOST_NAMED:
        return shown
    return f"{shown}; and {len(texts) - _MOST_NAMED} more"


def _indent(text: str) -> str:
    return "\n".join("  | " + line for line in text.splitlines())
