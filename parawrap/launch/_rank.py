"""The rank that a process is: its place in the world, for the function that runs in it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

import torch

from parawrap.errors import LaunchError
from parawrap.launch._platform import Platform
from parawrap.launch.ranks._preemption import Preemption, RequeueWanted

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["IN_RANK", "Rank", "being", "below_a_rank", "current_rank", "inside_a_rank"]


@dataclass(frozen=True)
class Rank:
    """One rank's place in its world. Frozen; valid while the function runs.

    Attributes:
        global_rank: from 0 to ``world_size - 1``.
        local_rank: the same within the node.
        node: the node's number.
        world_size: the number of ranks.
        device: the device of this rank's tensors. On GPUs it is the current device already.
        group: this rank's process group: of the whole world, or its own of ``Platform.ipc_groups``; None if it is in none.
        platform: of the launch, without ``upon_finish`` and ``slurm_additional_parameters``.
        restart: the number of earlier attempts.
        preemption: the rank's side of the agreement on when to save; see `should_checkpoint`.

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
    preemption: Preemption | None = field(default=None, repr=False, compare=False)

    def should_checkpoint(self) -> bool:
        """True if the launch is about to lose its machines, and it is time to save. Call it once per turn of a loop.

        It becomes True at the same turn in every rank, so no rank is left waiting in a collective, and stays True. Until
        then a call sends nothing. From then on, ``grace_s`` of the platform is left to save and to call `requeue`.

        Preemption and time limits of clusters cause it. `Launch.preempt` rehearses it with any launcher. If the function
        runs in your own process (``inline``, torchrun, srun), the signal SIGUSR2 to a rank does.

        >>> import json, pathlib
        >>> from parawrap import Platform, current_rank, wrapper
        >>> @wrapper(Platform(device="cpu", n_cpus=1))
        ... def count_to(goal, path):
        ...     done = json.loads(path.read_text()) if path.exists() else 0
        ...     for step in range(done, goal):
        ...         if current_rank().should_checkpoint():
        ...             path.write_text(json.dumps(step))
        ...             current_rank().requeue()
        ...     return goal
        >>> count_to(3, pathlib.Path("count.json"))
        RankResults(3)
        """
        return self.preemption is not None and self.preemption.is_due()

    def requeue(self) -> NoReturn:
        """End this rank, and restart the launch with the same arguments once every rank has called this.

        Ranks that have not within ``grace_s`` are ended. After the restart ``current_rank().restart`` is one higher. The
        function must have saved all that it needs to continue. ``finally`` blocks run.
        """
        raise RequeueWanted

    def __getstate__(self) -> dict[str, object]:
        """Leave out the process group and the line to the launch, which belong to this process."""
        return {**vars(self), "group": None, "preemption": None}


IN_RANK = "PARAWRAP_IN_RANK"
"""A variable with the process id of a rank. A child of a rank inherits RANK too, and differs in its process id."""

_current: Rank | None = None


def current_rank() -> Rank:
    """Return the rank that this process is, in any thread.

    Raises:
        LaunchError: If this process is not a rank.

    >>> from parawrap import Platform, current_rank, wrapper
    >>> @wrapper(Platform(device="cpu", n_cpus=2))
    ... def double():
    ...     return 2 * current_rank().global_rank
    >>> double()
    RankResults(0, 2)
    """
    if _current is None:
        msg = (
            "current_rank() was called in a process that is not a rank: call it within a function decorated by "
            "@wrapper(Platform(...)), or run that function by .inline(...) to be rank 0 of 1 here"
        )
        raise LaunchError(msg)
    return _current


def below_a_rank() -> bool:
    """True if this process is a descendant of a rank."""
    return os.environ.get(IN_RANK, str(os.getpid())) != str(os.getpid())


def inside_a_rank() -> bool:
    """True if this process is a rank."""
    return _current is not None


class being:  # noqa: N801 (reads as a verb: with being(rank))
    """Be this rank inside the block. Not a generator: those set attributes on exceptions that pass."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def __enter__(self) -> Rank:
        global _current
        self._before, _current = _current, self._rank
        return self._rank

    def __exit__(self, *_: object) -> None:
        global _current
        _current = self._before
