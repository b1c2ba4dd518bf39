"""The current rank: its place in the world, its device, and its process group."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

import torch

from parawrap._public import public
from parawrap.errors import LaunchError
from parawrap.launch._platform_fields import PlatformFields
from parawrap.launch.inheritance import pass_on_rank, passed_on_rank
from parawrap.processes.preemption import Preemption, RequeueRequested

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@public
@dataclass(frozen=True)
class Rank:
    """One rank's place in its world. Frozen; valid while the function runs.

    Attributes:
        global_rank: The rank's number, from 0 to ``world_size - 1``.
        local_rank: The rank's number on its node, from 0.
        node: The node's number, from 0.
        world_size: The number of ranks.
        device: The device for this rank's tensors. A GPU is already the current CUDA device.
        group: The process group of this rank: all ranks, or its group in ``Platform.ipc_groups``.
            None without a group.
        platform: The launch's platform. Where a launch has started this process, it lacks
            ``upon_finish`` and ``slurm_additional_parameters``.
        restart: The number of earlier attempts.
        preemption: The state behind `should_checkpoint`.

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
    platform: PlatformFields = field(repr=False)
    group: ProcessGroup | None = field(default=None, repr=False)
    restart: int = 0
    preemption: Preemption | None = field(default=None, repr=False, compare=False)

    def should_checkpoint(self) -> bool:
        """True if the launch is about to lose its machines and should save now.

        Call it once per loop iteration.

        It becomes True in the same iteration in every rank, so no rank waits alone in a collective,
        and stays True. Until then, a call sends no message. Afterwards the rank has the platform's
        ``grace_s`` to save and to call `requeue`.

        A cluster's preemption or time limit causes it. `Launch.preempt` simulates it with any
        launcher. If the function runs in your own process (``inline``, torchrun, srun), send
        SIGUSR2 to a rank.

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
        """End this rank.

        The launch restarts with the same arguments once every rank has called this.

        Ranks that do not call it within ``grace_s`` are ended. After the restart,
        ``current_rank().restart`` is one higher. Save everything that the next attempt needs before
        the call. ``finally`` blocks run.
        """
        raise RequeueRequested

    def __getstate__(self) -> dict[str, object]:
        """Leave out what belongs to this process: the process group, and the preemption state."""
        return {
            **vars(self),
            "group": None,
            "preemption": None,
            "platform": self.platform.as_sent(),
        }


_current: Rank | None = None


@public
def current_rank() -> Rank:
    """Return this process's rank. Callable from any thread.

    Raises:
        LaunchError: If this process is not a rank.

    >>> from parawrap import Platform, current_rank, wrapper
    >>> @wrapper(Platform(device="cpu", n_cpus=2))
    ... def double():
    ...     return 2 * current_rank().global_rank
    >>> double()
    RankResults(0, 2)
    """
    rank = find_rank()
    if rank is None:
        msg = (
            "current_rank() was called in a process that is not a rank: call it in a function "
            "decorated with @wrapper(Platform(...)), or call that function with .inline(...) to "
            "run it here as rank 0 of 1"
        )
        raise LaunchError(msg)
    return rank


def find_rank() -> Rank | None:
    """Return the rank of this process; None if it is not a rank.

    A child of multiprocessing, such as a loader worker, has the rank of its parent, without the
    process group.
    """
    # A forked child has `_current` in its memory. Other children unpickle the rank here
    if _current is None:
        pickled = passed_on_rank()
        if pickled is not None:
            become(pickle.loads(pickled))
    return _current


def inside_a_rank() -> bool:
    """True if this process is a rank, or its child of multiprocessing."""
    return find_rank() is not None


def become(rank: Rank) -> None:
    """Make `rank` the current rank."""
    global _current
    # As bytes: a child that does not use its rank need not import parawrap and torch
    pickled = pickle.dumps(rank)
    # One assignment: other threads of the function see the old rank or the new one
    _current = rank
    pass_on_rank(pickled)


@contextmanager
def acting_as(rank: Rank) -> Iterator[None]:
    """Make `rank` the current rank inside the block."""
    global _current
    before, passed_on = _current, passed_on_rank()
    try:
        become(rank)
        yield
    finally:
        _current = before
        pass_on_rank(passed_on)
