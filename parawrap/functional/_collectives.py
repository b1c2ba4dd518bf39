"""The place of this process in the process group, the device of its collectives, and exchanges without pickles."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from parawrap.errors import PlatformError
from parawrap.launch import Platform, current_rank, inside_a_rank

__all__ = ["collective_device", "exchange", "exchange_json", "find_difference", "find_place", "group_size", "require_group"]

T = TypeVar("T")


def group_size() -> int:
    """Return the number of ranks in the process group; 1 without a group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def find_place(global_rank: int | None = None, platform: Platform | None = None) -> tuple[int, int]:
    """Return the global rank and the number of ranks; by default those of this rank."""
    here = current_rank() if inside_a_rank() else None
    world_size = platform.world_size if platform else here.world_size if here else group_size()
    if global_rank is None:
        global_rank = here.global_rank if here else dist.get_rank() if world_size > 1 and dist.is_initialized() else 0
    return global_rank, world_size


def require_group(helper: str) -> int:
    """Return the number of ranks in the process group, for a helper that exchanges values.

    Raises:
        PlatformError: If there are several ranks, but no process group.
    """
    ranks = current_rank().world_size if inside_a_rank() else 1
    if ranks > 1 and group_size() == 1:
        msg = (
            f"{helper} exchanges values between {ranks} ranks, but ipc_groups=None forms no process group. "
            "Leave ipc_groups out of Platform."
        )
        raise PlatformError(msg)
    return group_size()


def collective_device() -> torch.device:
    """Return a device with a backend in the process group: the CPU if possible."""
    kinds = [entry.partition(":")[0] for entry in dist.get_backend_config().split(",")]
    if "cpu" in kinds:
        return torch.device("cpu")
    here = current_rank().device if inside_a_rank() else torch.device(kinds[0])
    return here if here.type in kinds else torch.device(kinds[0])


def exchange(data: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Return every rank's 1-d tensor, on the CPU, in rank order.

    Args:
        data: This rank's tensor. All ranks have the same dtype.
        sizes: The length of each rank's tensor, the same list on every rank.
    """
    longest = max(sizes)
    if longest == 0:
        return [data.new_empty(0, device="cpu") for _ in sizes]
    where = collective_device()
    padded = torch.zeros(longest, dtype=data.dtype, device=where)
    padded[: data.numel()] = data.to(where)
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    return [part[:size].cpu() for part, size in zip(parts, sizes, strict=True)]


def exchange_json(value: T) -> list[T]:
    """Return every rank's JSON value, in rank order. Nothing is unpickled. Strings may have lone surrogates."""
    text = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    texts = [text] if group_size() == 1 else _exchange_bytes(text)
    return [json.loads(each.decode("utf-8", "surrogatepass")) for each in texts]


def _exchange_bytes(data: bytes) -> list[bytearray]:
    sizes = [int(size) for size in exchange(torch.tensor([len(data)], device="cpu"), [1] * group_size())]
    found = []
    for part in exchange(torch.frombuffer(bytearray(data), dtype=torch.uint8), sizes):
        memory = bytearray(part.numel())
        torch.frombuffer(memory, dtype=torch.uint8).copy_(part)
        found.append(memory)
    return found


def find_difference(lists: Sequence[Sequence[str]]) -> tuple[int, str, str] | None:
    """Compare the ranks' lists with that of rank 0.

    Returns:
        The first rank with another list, an item that only rank 0 has, and an item that only this rank has. None without
        a difference.
    """
    first = lists[0]
    for rank, other in enumerate(lists):
        if other != first:
            here = next((item for item in first if item not in other), "nothing else")
            there = next((item for item in other if item not in first), "nothing else")
            return rank, here, there
    return None
