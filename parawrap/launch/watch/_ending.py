"""The end of a launch, and the results or the error that follow from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parawrap.errors import LaunchCancelledError, LaunchError, LaunchTimeoutError
from parawrap.launch._platform import Platform
from parawrap.launch._results import RankResults
from parawrap.launch.parcels._failures import add_note
from parawrap.launch.parcels._outcomes import Outcome, Raised, Returned, error_of, first_failure, values_of

__all__ = ["Ending", "verdict"]


@dataclass(frozen=True)
class Ending:
    """The end of a launch. Frozen. Its results can be unpacked once.

    Attributes:
        outcomes: how each rank of the last attempt ended.
        hosts: the names of the nodes, in their order.
        history: how the earlier attempts ended.
        stacks: of the ranks when their time was up.
        cancelled: True if it was cancelled.
        timed_out: the time limit that ended it.
        stuck: True if it was ended because its ranks waited for ranks that had returned.
        broken: the reason why ranks could not be started.
        requeued: True if the ranks left for a restart by the cluster.
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

    def close(self) -> None:
        """Close the results and exceptions that were not unpacked."""
        for outcome in self.outcomes.values():
            if isinstance(outcome, Returned):
                outcome.value.close()
            elif isinstance(outcome, Raised):
                outcome.error.close()

    @property
    def is_success(self) -> bool:
        """True if every rank has returned, and nothing else ended the launch."""
        given_up = self.cancelled or self.timed_out or self.stuck or self.broken
        return not given_up and all(isinstance(each, Returned) for each in self.outcomes.values())


def verdict(name: str, platform: Platform, ending: Ending) -> RankResults[Any] | BaseException:
    """Return the results of a function's ranks, or the exception to raise instead."""
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
