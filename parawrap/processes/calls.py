"""A call of ranks: its state, and the rules by which its ranks hang, or ignore an interrupt."""

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

    by_user: bool  # by Ctrl-C or `Launch.cancel`. False after a failure, or in a deadlock
    has_broken: bool = False  # True once the connections between the ranks were closed


@dataclass
class Call:
    """One call of a function on some ranks, and its state. Times are by the monotonic clock."""

    name: str  # of the function
    ranks: Sequence[int]  # that run the function
    packed: PackedCall | None = None  # the pool sends it, and then sets None
    # of the script's settings since the last call; None without changes
    changes: ChangedSettings | None = None
    # by rank: these get a copy of the output, for the handle of this call
    transcripts: Mapping[int, Transcript] = field(default_factory=dict)
    is_cancelled: bool = False  # True: its caller gets LaunchCancelledError, whatever ranks answer
    outcomes: dict[int, Outcome] = field(default_factory=dict)  # of the ranks that have ended it
    # ranks that get its globals without running the function, and have not answered yet
    others: set[int] = field(default_factory=set)
    number: int = 0  # from 1, once it was sent. The set-up keeps 0, which is `SET_UP`
    # of the process groups that the ranks join before the call; None keeps the groups they have
    generation: int | None = None
    unloaded: set[int] = field(default_factory=set)  # ranks that did not unpickle the call
    error: OSError | None = None  # why this process could not take an answer
    halt: Halt | None = None  # None until the call is interrupted
    is_deadlocked: bool = False  # True: its ranks waited for ranks that do not take part
    has_hint: bool = False  # True once the log has the hint about an idle rank
    began_at: float = 0.0
    departed_at: float = 0.0  # when a rank last ended the call; at first, when the call began
    last_sign: float = 0.0  # when a rank last wrote output, made progress, or ended the call
    looked_at: float = 0.0  # when the pool last looked at the ranks

    @property
    def has_begun(self) -> bool:
        """True once the call was sent to the ranks."""
        return self.number > 0


def reason_of_hang(
    call: Call, running: Sequence[Member], members: Sequence[Member], hang_s: float, now: float
) -> str:
    """Return why a call counts as hanging after `hang_s`; an empty text if it does not.

    A rank that computes makes progress. But if others wait for it in a collective, it may be in an
    endless loop: then only output counts.
    """
    if now - call.last_sign >= hang_s:
        return "no rank wrote output or made progress"
    written_at = max(call.began_at, *[member.wrote_at for member in members])
    is_silent = now - written_at >= hang_s
    does_one_wait = any(each.looked and each.looked.waits_s >= hang_s for each in running)
    if is_silent and does_one_wait:
        return "no rank wrote output, and ranks waited for others in a collective"
    return ""


def describe_idleness(member: Member, now: float) -> str:
    """Return a text that says how long a rank idles, and at which line."""
    if member.looked is None:
        return f"rank {member.rank} does not answer"
    idle_s = now - member.looked_at + member.looked.idle_s
    return f"rank {member.rank} idle for {idle_s:.0f} s at {member.looked.line}"


def ignores_halt(member: Member, number: int, halt: Halt) -> bool:
    """True if a rank goes on after an interrupt of call `number` that could have stopped it.

    Either its function has caught the exception, or it waits for other ranks although their
    connections were closed, for example because `break_links` has not found them. Any other rank
    runs C code, which an exception cannot interrupt: the pool waits for it.
    """
    if member.looked is None:  # it has not answered since the call began
        return False
    has_caught_it = member.looked.interrupted == number
    waits_in_spite = halt.has_broken and member.looked.waits_s > 0
    return has_caught_it or waits_in_spite
