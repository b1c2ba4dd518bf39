"""How a launch ended: all that is known of it as one value, and what that gives whoever asks for the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parawrap.errors import LaunchCancelledError, LaunchError, LaunchTimeoutError
from parawrap.launch._platform import Platform
from parawrap.launch._results import RankResults
from parawrap.launch.parcels._failures import add_note
from parawrap.launch.parcels._outcomes import Outcome, Returned, error_of, first_failure, values_of

__all__ = ["Ending", "verdict"]


@dataclass(frozen=True)
class Ending:
    """The end of a launch. Frozen; what its ranks returned is opened once.

    Attributes:
        outcomes: how each rank of the last attempt ended.
        hosts: the names of the nodes, in their order.
        history: how the attempts before the last one ended.
        stacks: what ranks were doing when their time was up.
        cancelled: whether it was cancelled.
        timed_out: which time limit ended it.
        stuck: whether it was ended because its ranks waited for such as had returned.
        broken: why ranks could not be started.
        requeued: whether the ranks left to be started anew by somebody else.
    """

    outcomes: Mapping[int, Outcome]
    hosts: Sequence[str] = ()
    history: Sequence[str] = ()
    stacks: Mapping[int, str] | None = None
    cancelled: bool = False
    timed_out: str | None = None
    stuck: bool = False
    broken: str | None = None
    requeued: bool = False

    @property
    def is_success(self) -> bool:
        """Whether every rank has returned, and nothing else ended it."""
        given_up = self.cancelled or self.timed_out or self.stuck or self.broken
        return not given_up and all(isinstance(each, Returned) for each in self.outcomes.values())


def verdict(name: str, platform: Platform, ending: Ending) -> RankResults[Any] | BaseException:
    """What the ranks of this function returned, or the exception that tells why that cannot be had."""
    world_size = platform.world_size
    if ending.cancelled:
        return LaunchCancelledError(f"the launch of {name} was cancelled: it has no results")
    if ending.timed_out is not None:
        return _timeout_error(name, ending)
    if ending.stuck:
        return _stuck_error(name, ending)
    failed = first_failure(ending.outcomes)
    if failed is None and (ending.broken is not None or len(ending.outcomes) < world_size):
        return LaunchError(ending.broken or f"only {len(ending.outcomes)} of {world_size} ranks of {name} ever began")
    if failed is None:
        return values_of(ending.outcomes, world_size)
    node = failed // platform.ranks_per_node
    error = error_of(failed, ending.outcomes, world_size, f"node {node}, {ending.hosts[node]}")
    for attempt in ending.history:
        add_note(error, attempt)
    return error


def _stuck_error(name: str, ending: Ending) -> LaunchError:
    returned = ", ".join(str(rank) for rank, outcome in ending.outcomes.items() if isinstance(outcome, Returned))
    msg = (
        f"{name} can get no further: rank(s) {returned} have returned, and all others wait in torch.distributed. In a "
        f"collective, every rank of the group has to take part. What they were doing:\n{_told(ending)}"
    )
    return LaunchError(msg)


def _timeout_error(name: str, ending: Ending) -> LaunchTimeoutError:
    stacks = dict(ending.stacks or {})
    returned = sorted(set(ending.outcomes) - set(stacks))
    msg = f"{name} was {ending.timed_out}; its ranks were ended. What they were doing:\n{_told(ending)}"
    error = LaunchTimeoutError(msg, stacks=stacks)
    if returned:
        error.add_note(f"these ranks had ended before: {', '.join(map(str, returned))}")
    return error


def _told(ending: Ending) -> str:
    return "\n".join(f"rank {rank}:\n{text}" for rank, text in sorted((ending.stacks or {}).items()))
