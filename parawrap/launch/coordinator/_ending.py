"""How a launch ended, and the results or the error to report for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parawrap.errors import LaunchCancelledError, LaunchError, LaunchTimeoutError, add_note
from parawrap.launch._platform import Platform
from parawrap.launch._rank_results import RankResults
from parawrap.launch.coordinator._rank_times import RankTimes
from parawrap.launch.messages._first_rank_failure import Outcome, Raised, Returned, error_of, first_rank_failure, values_of

__all__ = ["Ending", "results_or_error"]


@dataclass(frozen=True)
class Ending:
    """How a launch ended. Frozen. Its results can be unpickled once.

    Attributes:
        outcomes: How each rank of the last attempt ended.
        hosts: The hostnames of the nodes, by node number.
        history: How the earlier attempts ended.
        stacks: The stacks of the ranks when a time limit was reached.
        cancelled: True if the launch was cancelled.
        timed_out: The time limit that ended the launch.
        stuck: True if the launch was ended because its ranks waited for ranks that had returned.
        broken: The reason why ranks could not be started.
        requeued: True if the ranks exited to be restarted by the cluster.
        times: When the phases of each rank began, in all attempts.
        refused: For a call: the error of a payload that could not be sent to the ranks.
        lost: For a call: the reason why its ranks had to be ended.
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
    times: Sequence[RankTimes] = ()
    refused: Exception | None = None
    lost: str | None = None

    def close(self) -> None:
        """Close the files of results and exceptions."""
        for outcome in self.outcomes.values():
            if isinstance(outcome, Returned):
                outcome.value.close()
            elif isinstance(outcome, Raised):
                outcome.error.close()

    @property
    def is_success(self) -> bool:
        """True if every rank returned and nothing else ended the launch."""
        given_up = self.cancelled or self.timed_out or self.stuck or self.broken
        return not given_up and all(isinstance(each, Returned) for each in self.outcomes.values())


def results_or_error(
    name: str, platform: Platform, ending: Ending, ranks: Sequence[int] | None = None
) -> RankResults[Any] | BaseException:
    """Return the results of these ranks, by default of all, or the exception to raise instead."""
    world_size = platform.world_size
    ranks = range(world_size) if ranks is None else ranks
    if ending.refused is not None:
        return ending.refused
    if ending.cancelled:
        return LaunchCancelledError(f"the launch of {name} was cancelled: it has no results")
    if ending.timed_out is not None:
        return _timeout_error(name, ending)
    if ending.stuck:
        return _stuck_error(name, ending)
    failed = first_rank_failure(ending.outcomes)
    if failed is None and (ending.broken or ending.lost or len(ending.outcomes) < len(ranks)):
        why = ending.broken or ending.lost
        return LaunchError(why or f"only {len(ending.outcomes)} of {world_size} ranks of {name} started")
    if failed is None:
        return values_of(ending.outcomes, ranks, world_size)
    node = failed // platform.ranks_per_node
    error = error_of(failed, ending.outcomes, world_size, f"node {node}, {ending.hosts[node]}")
    for attempt in ending.history:
        add_note(error, attempt)
    if ending.lost is not None:
        add_note(error, f"the ranks were ended: {ending.lost}")
    return error


def _stuck_error(name: str, ending: Ending) -> LaunchError:
    returned = ", ".join(str(rank) for rank, outcome in ending.outcomes.items() if isinstance(outcome, Returned))
    how = f"rank(s) {returned} have returned, and all others wait" if returned else "the ranks that were called wait"
    msg = (
        f"{name} is deadlocked: {how} in torch.distributed. In a "
        f"collective, every rank of the group has to take part. Stacks of the waiting ranks:\n{_stacks_of(ending)}"
    )
    return LaunchError(msg)


def _timeout_error(name: str, ending: Ending) -> LaunchTimeoutError:
    stacks = dict(ending.stacks or {})
    returned = sorted(set(ending.outcomes) - set(stacks))
    msg = f"{name} was {ending.timed_out}; its ranks were ended. Their stacks:\n{_stacks_of(ending)}"
    error = LaunchTimeoutError(msg, stacks=stacks)
    if returned:
        error.add_note(f"these ranks had ended before the time limit: {', '.join(map(str, returned))}")
    return error


def _stacks_of(ending: Ending) -> str:
    return "\n".join(f"rank {rank}:\n{text}" for rank, text in sorted((ending.stacks or {}).items()))
