"""Which of a set of tensors changed since they were entered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter, eq, is_

import torch

__all__ = ["Ledger", "lasting"]

_requires_grad, _dtype, _version = attrgetter("requires_grad"), attrgetter("dtype"), attrgetter("_version")


class Ledger:
    """Tensors, and the memory, dtype, and version that each of them had.

    An alias of each tensor keeps its memory from being used again, so that equal memory means the same memory. A write
    through ``tensor.data`` changes neither memory nor version. Versions are kept of the tensors that are copied.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], copied: Iterable[torch.Tensor]) -> None:
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
        self._versions = [*map(_version, self._copied)]

    def same_form(self) -> bool:
        """True if every tensor has the memory, the dtype, and the ``requires_grad`` that it had."""
        return (
            _have_memory_of(self._strided, self._aliases)
            and [*map(_requires_grad, self._tensors)] == self._grads
            and all(map(is_, map(_dtype, self._tensors), self._dtypes))
        )

    def unwritten(self) -> bool:
        """True if every copied tensor has the version that it had."""
        return not self.unversioned and [*map(_version, self._copied)] == self._versions

    def written(self) -> list[torch.Tensor]:
        """The copied tensors with another version, and those without versions: they were made in inference mode."""
        now = map(_version, self._copied)
        same = map(eq, now, self._versions)
        return self.unversioned + [tensor for tensor, intact in zip(self._copied, same, strict=True) if not intact]

    def moved(self) -> list[torch.Tensor]:
        """The tensors with other memory than they had."""
        pairs = zip(self._strided, self._aliases, strict=True)
        return [tensor for tensor, alias in pairs if not _have_memory_of([tensor], [alias])]

    def enter_versions(self) -> None:
        """Take the versions of now."""
        self._versions = [*map(_version, self._copied)]


def _have_memory_of(tensors: Sequence[torch.Tensor], aliases: Sequence[torch.Tensor]) -> bool:
    try:
        return all(map(torch.Tensor.is_set_to, tensors, aliases))
    except RuntimeError:  # on another device
        return False


def _can_be_compared(tensor: torch.Tensor, alias: torch.Tensor) -> bool:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return False
    return not tensor.is_quantized and tensor.is_set_to(alias)


class lasting:  # noqa: N801
    """Inside the block, new tensors have no graph and are not inference tensors, whatever the caller's modes."""

    def __enter__(self) -> None:
        self._modes = torch.inference_mode(False), torch.no_grad()
        for mode in self._modes:
            mode.__enter__()

    def __exit__(self, *error: object) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)
