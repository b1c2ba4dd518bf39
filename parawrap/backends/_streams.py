"""What tensors need where a device has streams: a way over that does not hold up the host, and memory that stays theirs.

A caching allocator hands a freed block out again on the stream that took it, at once, also while another stream still
works on it. `record_use` tells it of that other stream.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from parawrap.backends._registry import backend_of
from parawrap.tree import Opaque

__all__ = ["bring", "record_use"]

_STAGED_FROM = 64 << 10
"""Bytes. Up to here CUDA takes pageable memory over before the copy itself is done, and returns (CUDA Runtime API, "API
synchronization behavior"); beyond, the host waits for the stream."""


def bring(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on that device, itself if it is there. A copy to the CPU is waited for; one to an accelerator is queued.

    What lies in the host's pageable memory goes through pinned memory, which the device reads while the host goes on.
    """
    if tensor.device == device:
        return tensor
    if device.type == "cpu":
        return tensor.to(device)
    if tensor.device.type != "cpu":
        _record(tensor)  # the stream that reads it may not be the one that took its memory
    staged = backend_of(device.type).pinned(tensor) if _wants_staging(tensor) else tensor
    return staged.to(device, non_blocking=True)


def record_use(leaves: Iterable[Any]) -> None:
    """Keep the memory of these tensors, once let go of, until what the thread has queued on its streams by then is done."""
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            _record(leaf)
        elif isinstance(leaf, Opaque) and isinstance(leaf.value, PackedSequence):
            _record(leaf.value.data)


def _record(tensor: torch.Tensor) -> None:
    if tensor.device.type == "cpu":
        return
    parts = getattr(tensor, "__tensor_flatten__", None)
    if parts is not None:  # a wrapper: its memory is that of the tensors in it
        record_use(getattr(tensor, name) for name in parts()[0])
    elif tensor.layout is torch.strided:
        stream = backend_of(tensor.device.type).stream(tensor.device)
        if stream is not None:
            tensor.record_stream(stream)  # type: ignore[arg-type]


def _wants_staging(tensor: torch.Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.nbytes > _STAGED_FROM
        and not (tensor.requires_grad and torch.is_grad_enabled())  # pinning is no step of a graph
        and not tensor.is_pinned()
    )
