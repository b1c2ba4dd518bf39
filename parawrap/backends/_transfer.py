"""Copy tensors between devices without blocking the host, and keep their memory as long as needed.

A caching allocator reuses a freed block at once for the stream that allocated it, even while
another stream still reads the block. `record_use` reports the other stream to the allocator.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from parawrap._private_names import indices_of, values_of
from parawrap.backends._backend_registry import backend_of
from parawrap.tree import WholeLeaf, tensors_in

_STAGED_FROM = 64 << 10
"""Size in bytes.

CUDA stages a pageable copy of at most this size and returns before the copy is done. For a larger
copy the host waits for the stream (CUDA Runtime API, "API synchronization behavior").
"""


def transfer(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the tensor on `device`; the same object if it is already on it.

    A copy to the CPU blocks. A copy to an accelerator is queued where that is safe: large pageable
    tensors are copied to pinned memory first, which the device reads while the host continues.
    """
    if tensor.device == device:
        return tensor
    if device.type == "cpu":
        return tensor.to(device)
    if tensor.device.type != "cpu":
        _record(tensor)  # the reading stream may differ from the allocating stream
    staged, may_be_queued = _stage(tensor, device)
    return staged.to(device, non_blocking=may_be_queued)


def transfer_into(target: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy `tensor` into `target` on another device, in the same way as `transfer`."""
    _record(tensor)
    staged, may_be_queued = _stage(tensor, target.device)
    target.copy_(staged, non_blocking=may_be_queued)


def device_of(leaf: Any) -> torch.device | None:
    """Return the device of a leaf; None if the leaf has no device, such as a number."""
    tensors = _tensors(leaf)
    return tensors[0].device if tensors else None


def record_use(leaves: Iterable[Any]) -> None:
    """Keep the memory of freed tensors until the thread's current streams finish their work."""
    for leaf in leaves:
        for tensor in _tensors(leaf):
            _record(tensor)


def _tensors(leaf: Any) -> Sequence[torch.Tensor]:
    if isinstance(leaf, torch.Tensor):
        return (leaf,)
    return [*tensors_in(leaf.value)] if isinstance(leaf, WholeLeaf) else ()


def _record(tensor: torch.Tensor) -> None:
    if tensor.device.type in ("cpu", "meta"):  # no streams
        return
    parts = getattr(tensor, "__tensor_flatten__", None)
    if parts is not None:  # a wrapper subclass: the inner tensors own the memory
        record_use(getattr(tensor, name) for name in parts()[0])
    elif tensor.is_nested:
        record_use(tensor.unbind())
    elif tensor.layout is torch.sparse_coo:
        # The private methods of a tensor: the public ones refuse one that is not coalesced
        read_indices, read_values = indices_of(tensor), values_of(tensor)
        record_use((read_indices(), read_values()))
    elif tensor.layout is torch.strided:
        stream = backend_of(tensor.device.type).stream(tensor.device)
        if stream is not None:
            tensor.record_stream(stream)


def _stage(tensor: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, bool]:
    """Return the source of a copy, and True if the copy to the device may be queued.

    It may if the source stays unchanged, or has been read when the call returns. A large tensor on
    the CPU is copied to pinned memory first.
    """
    # The host reads a copy to the CPU at once
    if device.type == "cpu":
        return tensor, False
    # Between two accelerators: the stream orders the copy and later writes of the source
    if tensor.device.type != "cpu":
        return tensor, True
    backend = backend_of(device.type)
    has_graph = tensor.requires_grad and torch.is_grad_enabled()  # autograd does not record pinning
    is_large = tensor.layout is torch.strided and tensor.nbytes > _STAGED_FROM
    if is_large and not has_graph:
        is_channels_last = tensor.ndim == 4 and tensor.is_contiguous(
            memory_format=torch.channels_last
        )
        # A pinned view with gaps too: torch would make its dense copy in pageable memory
        is_dense = is_channels_last or tensor.is_contiguous()
        if not (is_dense and tensor.is_pinned()):
            tensor = backend.pin(tensor)
    return tensor, backend.takes_pageable_at_once or tensor.is_pinned()
