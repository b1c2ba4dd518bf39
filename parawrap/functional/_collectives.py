"""The size of the process group, the device of its collectives, and an exchange of bytes without pickles."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from parawrap.errors import PlatformError
from parawrap.launch import current_rank, inside_a_rank

__all__ = ["collective_device", "exchange", "exchange_texts", "group_size", "require_group", "text_of", "to_bytes"]


def group_size() -> int:
    """Return the number of ranks in the process group; 1 without a group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


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


def exchange_texts(text: str) -> list[str]:
    """Return every rank's text, in rank order. The texts are sent as bytes."""
    data = to_bytes(text)
    lengths = exchange(torch.tensor([data.numel()], device="cpu"), [1] * group_size())
    return [text_of(part) for part in exchange(data, [int(length) for length in lengths])]


def to_bytes(text: str) -> Tensor:
    """Return the UTF-8 bytes of any string as a uint8 tensor."""
    data = text.encode("utf-8", "surrogatepass")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8, device="cpu")


def text_of(data: Tensor) -> str:
    """Return the string of a contiguous uint8 tensor on the CPU."""
    return ctypes.string_at(data.data_ptr(), data.numel()).decode("utf-8", "surrogatepass") if data.numel() else ""
