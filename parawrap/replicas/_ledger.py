"""The tensors of a target at one moment, and whether they were written or moved since.

The checks run before every call, so they read addresses and versions in C. They use public operations, and versions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from operator import attrgetter, eq, is_

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from parawrap.replicas._batched_copies import lasting
from parawrap.replicas._private_names import buffers_of, version_of

__all__ = ["Ledger", "buffers_written_unseen", "may_be_written_unseen", "with_other_buffers"]

_requires_grad, _dtype = attrgetter("requires_grad"), attrgetter("dtype")

_optimizer_steps = 0


@cache
def _count_optimizer_steps() -> None:
    """Count the steps of all optimizers: fused ones write parameters and leave their versions alone."""

    def count(*_: object) -> None:
        global _optimizer_steps
        _optimizer_steps += 1

    register_optimizer_step_post_hook(count)


class Ledger:
    """Tensors, and the memory, dtype, and version that each of them had.

    An alias of each tensor keeps its memory from being used again, so that equal memory means the same memory. A write
    through ``tensor.data`` changes neither memory nor version. Versions are kept of the tensors that are copied.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], copied: Iterable[torch.Tensor]) -> None:
        _count_optimizer_steps()
        with lasting():
            pairs = [(tensor, tensor.detach()) for tensor in tensors]
        strided = [(tensor, alias) for tensor, alias in pairs if _can_be_compared(tensor, alias)]
        self._strided = [tensor for tensor, _ in strided]
        self._aliases = [alias for _, alias in strided]
        self._tensors = list(tensors)
        self._grads = [*map(_requires_grad, tensors)]
        self._dtypes = [*map(_dtype, tensors)]
        copied = list(copied)
        self.unversioned = [tensor for tensor in copied if tensor.is_inference()]
        self._copied = [tensor for tensor in copied if not tensor.is_inference()]
        self.enter_versions()

    def same_form(self) -> bool:
        """True if every tensor has the memory, the dtype, and the ``requires_grad`` that it had."""
        try:
            return (
                all(map(torch.Tensor.is_set_to, self._strided, self._aliases))
                and [*map(_requires_grad, self._tensors)] == self._grads
                and all(map(is_, map(_dtype, self._tensors), self._dtypes))
            )
        except RuntimeError:  # from is_set_to: a tensor is on another device
            return False

    def unwritten(self) -> bool:
        """True if every copied tensor has the version that it had."""
        return not (self.unversioned or self._suspects) and [*map(version_of, self._copied)] == self._versions

    @property
    def has_seen_steps(self) -> bool:
        """True if an optimizer made a step since `enter_versions`. Any copied tensor may have changed then."""
        return self._steps != _optimizer_steps

    def suspect(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count these copied tensors as written until `enter_versions`, whatever their versions."""
        self._suspects.update((id(tensor), tensor) for tensor in tensors)

    def written(self) -> list[torch.Tensor]:
        """The copied tensors with another version, the suspects, and tensors of inference mode, which have no versions."""
        now = map(version_of, self._copied)
        same = map(eq, now, self._versions)
        written = [tensor for tensor, intact in zip(self._copied, same, strict=True) if not intact]
        return [*self.unversioned, *self._suspects.values(), *written]

    def moved(self) -> list[torch.Tensor]:
        """The tensors with other memory than they had."""
        pairs = zip(self._strided, self._aliases, strict=True)
        return [tensor for tensor, alias in pairs if tensor.device != alias.device or not tensor.is_set_to(alias)]

    def enter_versions(self) -> None:
        """Take the versions of now."""
        self._steps = _optimizer_steps
        self._suspects: dict[int, torch.Tensor] = {}
        self._versions = [*map(version_of, self._copied)]


def may_be_written_unseen(module: torch.nn.Module, buffer: torch.Tensor) -> bool:
    """True if a forward pass may write the buffer without advancing its version.

    The kernels of batch and instance norm do so in train mode, and so do writes through ``.data``, for instance of the
    codebook of a VQ-VAE.
    """
    return getattr(module, "training", False) and buffer.ndim > 0 and buffer.is_floating_point()


def buffers_written_unseen(modules: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
    """Return the buffers of modules that a forward pass may write without advancing their versions."""
    pairs = ((module, buffer) for module in modules for buffer in buffers_of(module).values())
    return [buffer for module, buffer in pairs if buffer is not None and may_be_written_unseen(module, buffer)]


def with_other_buffers(written: Iterable[torch.Tensor], modules: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
    """Add the other buffers of each module that has a written buffer.

    Batch norm writes its statistics in C++ and leaves their versions alone; only that of its count of batches advances.
    """
    found = {id(tensor): tensor for tensor in written}
    for module in modules:
        buffers = [buffer for buffer in buffers_of(module).values() if buffer is not None]
        if any(id(buffer) in found for buffer in buffers):
            found |= {id(buffer): buffer for buffer in buffers}
    return [*found.values()]


def _can_be_compared(tensor: torch.Tensor, alias: torch.Tensor) -> bool:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return False
    return not tensor.is_quantized and tensor.is_set_to(alias)
