"""A call of ranks: its state, and when its ranks count as hanging, or ignore an interrupt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from parawrap.processes.members import Member
from parawrap.processes.outcomes import Outcome
from parawrap.processes.output import Transcript
from parawrap.processes.script_globals import PackedCall
from parawrap.processes.settings import ChangedSettings


@dataclass
class Halt:
    """An interrupt of the ranks that still run a call."""

    by_user: bool
    has_broken: bool = False  # connections between the ranks were closed


@dataclass
class Call:
    """One call of a function on some ranks, and its state. Times are by the monotonic clock."""

    name: str  # of the function
    ranks: Sequence[int]  # that call it; the others take the globals that come with it
    packed: PackedCall | None = None  # None once it was sent
    changes: ChangedSettings | None = None  # of the script's settings, for ranks that stay
    transcripts: Mapping[int, Transcript] = field(default_factory=dict)  # get a copy of the output
    is_cancelled: bool = False  # it is to have no results
    outcomes: dict[int, Outcome] = field(default_factory=dict)  # of the ranks that have ended it
    # ranks that get its globals, and have not answered
    others: set[int] = field(default_factory=set)
    number: int = 0  # from 1, once it was sent; that of the set-up stays 0, which is `SET_UP`
    generation: int | None = None  # of the process groups that the ranks join before it
    unloaded: set[int] = field(default_factory=set)  # ranks that did not unpickle it
    error: OSError | None = None  # why this process could not take an answer
    halt: Halt | None = None
    is_deadlocked: bool = False  # its ranks waited for ranks that do not take part
    has_hint: bool = False  # that a rank is idle was logged
    began_at: float = 0.0
    departed_at: float = 0.0  # when a rank last ended the call; at first, when the call began
    last_sign: float = 0.0  # when a rank last wrote output, made progress, or ended the call
    looked_at: float = 0.0  # when the pool last looked at the ranks

    @property
    def has_begun(self) -> bool:
        """True once it was sent to the ranks."""
        return self.number > 0


def reason_of_hang(
    call: Call, running: Sequence[Member], members: Sequence[Member], hang_s: float, now: float
) -> str:
    """Return why a call counts as hanging after `hang_s`; an empty text if it does not.

    A rank that computes makes progress, unless others wait for it in a collective: then only
    output shows that it is not in an endless loop.
    """
    if now - call.last_sign >= hang_s:
        return "no rank wrote output or made progress"
    written_at = max(call.began_at, *(member.wrote_at for member in members))
    waits_s = max((each.looked.waits_s for each in running if each.looked), default=0.0)
    if waits_s >= hang_s and now - written_at >= hang_s:
        return "no rank wrote output, and ranks waited for others in a collective"
    return ""


def describe_idleness(member: Member, now: float) -> str:
    """Say how long a rank idles, and where."""
    if member.looked is None:
        return f"rank {member.rank} does not answer"
    idle_s = now - member.looked_at + member.looked.idle_s
    return f"rank {member.rank} idle for {idle_s:.0f} s at {member.looked.line}"


def ignores_halt(member: Member, number: int, halt: Halt) -> bool:
    """True for a rank that does not stop although it could.

    Others run C code, which is waited for, unless it waits in a group whose connections cannot be
    found.
    """
    if member.looked is None:
        return False
    has_caught_it = member.looked.interrupted == number
    waits_for_others = member.looked.waits_s > 0
    return has_caught_it or (halt.has_broken and waits_for_others)
