"""What tensors need where a device has streams: a way over that does not hold up the host, and memory that stays theirs.

A caching allocator hands a freed block out again on the stream that took it, at once, also while another stream still
works on it. `record_use` tells it of that other stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from parawrap.backends._registry import backend_of
from parawrap.tree import Opaque

__all__ = ["bring", "bring_into", "device_of", "record_use"]

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
    staged = _staged(tensor, device)
    return staged.to(device, non_blocking=_may_be_queued(staged, device))


def bring_into(target: torch.Tensor, tensor: torch.Tensor) -> None:
    """Write the tensor into one on another device, as `bring` would bring it there."""
    _record(tensor)
    staged = _staged(tensor, target.device)
    target.copy_(staged, non_blocking=_may_be_queued(staged, target.device))


def device_of(leaf: Any) -> torch.device | None:
    """Where a leaf of a value lies; None for one that lies nowhere, a number say."""
    tensors = _tensors(leaf)
    return tensors[0].device if tensors else None


def record_use(leaves: Iterable[Any]) -> None:
    """Keep the memory of these tensors, once let go of, until what the thread has queued on its streams by then is done."""
    for leaf in leaves:
        for tensor in _tensors(leaf):
            _record(tensor)


def _tensors(leaf: Any) -> Sequence[torch.Tensor]:
    if isinstance(leaf, torch.Tensor):
        return (leaf,)
    packed = leaf.value if isinstance(leaf, Opaque) else None
    return [part for part in packed if isinstance(part, torch.Tensor)] if isinstance(packed, PackedSequence) else ()


def _record(tensor: torch.Tensor) -> None:
    if tensor.device.type in ("cpu", "meta"):
        return
    parts = getattr(tensor, "__tensor_flatten__", None)
    if parts is not None:  # a wrapper: its memory is that of the tensors in it
        record_use(getattr(tensor, name) for name in parts()[0])
    elif tensor.is_nested:
        record_use(tensor.unbind())
    elif tensor.layout is torch.sparse_coo:
        record_use((tensor._indices(), tensor._values()))
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
        and not (tensor.is_pinned() and _is_dense(tensor))
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() or (tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last))


def _staged(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return backend_of(device.type).pinned(tensor) if _wants_staging(tensor) else tensor


def _may_be_queued(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether a copy may be left to the device: what it reads must stay, or have been read by the time the call returns."""
    if device.type == "cpu":
        return False
    return tensor.device.type != "cpu" or backend_of(device.type).takes_pageable_at_once or tensor.is_pinned()
