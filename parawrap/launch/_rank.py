"""Who a rank is: what a function finds out about its place in the world while it runs."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from parawrap.errors import LaunchError
from parawrap.launch._platform import Platform

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["IN_RANK", "Rank", "being", "below_a_rank", "current_rank", "inside_a_rank"]


@dataclass(frozen=True)
class Rank:
    """One rank's place in its world. Frozen; lives as long as the function that runs in the rank.

    Attributes:
        global_rank: from 0 to ``world_size - 1``.
        local_rank: the same within the node.
        node: the node's number.
        world_size: how many ranks there are in all.
        device: where this rank's tensors go; on GPUs it is the current device already.
        group: the process group of ``Platform.ipc_groups`` that this rank is in; None where it is in none.
        platform: what the launch was started with, but for ``upon_finish``.
        restart: how often the group was started anew before.

    >>> from parawrap import Platform, current_rank, wrapper
    >>> @wrapper(Platform(device="cpu", n_cpus=2))
    ... def place():
    ...     rank = current_rank()
    ...     return rank.global_rank, rank.world_size, str(rank.device)
    >>> place()
    RankResults((0, 2, 'cpu'), (1, 2, 'cpu'))
    """

    global_rank: int
    local_rank: int
    node: int
    world_size: int
    device: torch.device
    platform: Platform = field(repr=False)
    group: ProcessGroup | None = field(default=None, repr=False)
    restart: int = 0

    def __getstate__(self) -> dict[str, object]:
        """A process group stays with its process."""
        return {**vars(self), "group": None}


IN_RANK = "PARAWRAP_IN_RANK"
"""The variable by which a process that a rank starts knows that it is no rank, though it has inherited RANK and so on."""

_current: Rank | None = None


def current_rank() -> Rank:
    """The rank that this process is; whichever thread asks.

    Raises:
        LaunchError: this process is no rank.

    >>> from parawrap import Platform, current_rank, wrapper
    >>> @wrapper(Platform(device="cpu", n_cpus=2))
    ... def double():
    ...     return 2 * current_rank().global_rank
    >>> double()
    RankResults(0, 2)
    """
    if _current is None:
        msg = (
            "current_rank() was called in a process that is no rank: call it within a function decorated by "
            "@wrapper(Platform(...)), or run that function by .inline(...) to be rank 0 of 1 here"
        )
        raise LaunchError(msg)
    return _current


def below_a_rank() -> bool:
    """Whether this process was started by a rank, or by a process that was."""
    return os.environ.get(IN_RANK, str(os.getpid())) != str(os.getpid())


def inside_a_rank() -> bool:
    """Whether this process is a rank."""
    return _current is not None


class being:  # noqa: N801 (reads as a verb: with being(rank))
    """Be this rank for as long as the block lasts. No generator: those set attributes on exceptions that pass."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def __enter__(self) -> Rank:
        global _current
        self._before, _current = _current, self._rank
        return self._rank

    def __exit__(self, *_: object) -> None:
        global _current
        _current = self._before
