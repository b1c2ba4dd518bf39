"""Copy tensors between devices without blocking the host, and keep their memory as long as needed.

torch's allocator gives the memory of a freed tensor at once to the next tensor of the stream that
allocated it, even while another stream still reads the memory. `record_use` tells the allocator of
the other stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from parawrap._private_names import indices_of, values_of
from parawrap.backends._backend_registry import backend_of
from parawrap.tree import WholeLeaf, tensors_in

# Bytes. From pageable memory, CUDA queues a copy of at most this size, and the host goes on. With a
# larger copy, the host waits for the stream (CUDA Runtime API, "API synchronization behavior")
_LARGEST_QUEUED = 64 << 10


def transfer(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the tensor on `device`; the same object if it is already on it.

    A copy to the CPU blocks. A copy to an accelerator is queued where that is safe. Large pageable
    tensors are copied to pinned memory first, which the device reads while the host goes on.
    """
    if tensor.device == device:
        return tensor
    if device.type == "cpu":
        return tensor.to(device)
    _record(tensor)  # the current stream, which reads it, may not be the one that allocated it
    source, may_be_queued = _find_source(tensor, device)
    return source.to(device, non_blocking=may_be_queued)


def transfer_into(target: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy `tensor` into `target` on another device, in the same way as `transfer`."""
    _record(tensor)
    source, may_be_queued = _find_source(tensor, target.device)
    target.copy_(source, non_blocking=may_be_queued)


def device_of(leaf: Any) -> torch.device | None:
    """Return the device of a leaf; None if the leaf has no device, such as a number."""
    tensors = _tensors(leaf)
    return tensors[0].device if tensors else None


def record_use(leaves: Iterable[Any]) -> None:
    """Keep the memory of tensors, once they are freed, until the thread's current streams are done.

    A leaf may be of any class; only tensors count.
    """
    for leaf in leaves:
        for tensor in _tensors(leaf):
            _record(tensor)


def _tensors(leaf: Any) -> Sequence[torch.Tensor]:
    """Return the tensors in a leaf."""
    if isinstance(leaf, torch.Tensor):
        return (leaf,)
    return [*tensors_in(leaf.value)] if isinstance(leaf, WholeLeaf) else ()


def _record(tensor: torch.Tensor) -> None:
    """Tell the allocator that the thread's current stream uses a tensor."""
    if tensor.device.type in ("cpu", "meta"):  # no streams
        return
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:  # a wrapper subclass: the inner tensors own the memory
        names, _ = flatten()
        record_use(getattr(tensor, name) for name in names)
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


def _find_source(tensor: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, bool]:
    """Return the source of a copy, and True if the copy to the device may be queued.

    A copy may be queued if no later write of the caller can change the source before it is read.
    The source of a large tensor on the CPU is its copy in pinned memory.
    """
    # The host may read a copy on the CPU as soon as the call returns
    if device.type == "cpu":
        return tensor, False
    # Between two accelerators, the stream orders the copy before later writes of the source
    if tensor.device.type != "cpu":
        return tensor, True
    backend = backend_of(device.type)
    has_graph = tensor.requires_grad and torch.is_grad_enabled()  # autograd does not record pinning
    is_large = tensor.layout is torch.strided and tensor.nbytes > _LARGEST_QUEUED
    if is_large and not has_graph:
        is_channels_last = tensor.ndim == 4 and tensor.is_contiguous(
            memory_format=torch.channels_last
        )
        # Otherwise, torch would first copy a pinned view with gaps into pageable memory
        is_dense = is_channels_last or tensor.is_contiguous()
        if not is_dense or not tensor.is_pinned():
            tensor = backend.pin(tensor)
    # Some backends have read pageable memory by the time that a non-blocking copy returns
    may_queue = backend.takes_pageable_at_once or tensor.is_pinned()
    return tensor, may_queue
