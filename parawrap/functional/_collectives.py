"""The place of this process among the ranks, and the exchange of objects between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from parawrap.errors import GatherError, PlatformError
from parawrap.launch import Platform, current_rank, inside_a_rank
from parawrap.tree import is_dense

T = TypeVar("T")


def group_size() -> int:
    """Return the number of ranks in the process group; 1 without a group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def find_place(global_rank: int | None = None, platform: Platform | None = None) -> tuple[int, int]:
    """Return the global rank and the number of ranks.

    By default, they are those of this process. A platform sets the number.
    """
    here = current_rank() if inside_a_rank() else None
    if platform is not None:
        world_size = platform.world_size
    elif here is not None:
        world_size = here.world_size
    else:
        world_size = group_size()
    if global_rank is not None:
        return global_rank, world_size
    if here is not None:
        return here.global_rank, world_size
    if world_size > 1 and dist.is_initialized():  # as under torchrun
        return dist.get_rank(), world_size
    return 0, world_size


def require_group(helper: str) -> int:
    """Return the number of ranks in the process group, for a helper that exchanges values.

    Raises:
        PlatformError: If there are several ranks, but no process group.
    """
    # Without a group, `group_size` is 1, and a helper would take this rank's values for all values
    ranks = current_rank().world_size if inside_a_rank() else 1
    if ranks > 1 and group_size() == 1:
        msg = (
            f"{helper} exchanges values between {ranks} ranks, but there is no process group: "
            "ipc_groups=None forms none, and destroy_process_group ends it. Leave ipc_groups out "
            "of Platform, and the group as it is"
        )
        raise PlatformError(msg)
    return group_size()


def is_whole(tensor: torch.Tensor) -> bool:
    """True for a dense tensor that is not a shard of a tensor, such as those of ``fully_shard``."""
    return is_dense(tensor) and not hasattr(tensor, "full_tensor")


def gather_objects(value: T) -> list[T]:
    """Return every rank's value, in rank order. torch pickles them."""
    if group_size() == 1:
        return [value]
    found: list[Any] = [None] * group_size()  # torch fills the list
    dist.all_gather_object(found, value)
    return found


def check_equal(helper: str, descriptions: Sequence[str | None], cure: str) -> None:
    """Raise GatherError if two ranks describe their values differently.

    `descriptions` are in rank order. The values of a rank with None do not count.
    """
    described = [(rank, each) for rank, each in enumerate(descriptions) if each is not None]
    for rank, description in described:
        first, expected = described[0]  # not before the loop: the list may be empty
        if description != expected:
            found = f"rank {first} has {expected}, but rank {rank} has {description}"
            msg = f"{helper}: the ranks' values differ: {found}. {cure}"
            raise GatherError(msg)
