"""Which of a set of tensors changed since they were last looked at."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["Ledger", "lasting"]


def _fingerprint(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Changes whenever the tensor does: its version counter, and its storage and place in it for ``tensor.data = ...``.

    A write through ``tensor.data`` leaves no trace in either. An inference tensor has no counter: it never looks the same.
    """
    if tensor.is_inference():
        return (object(),)
    if tensor.layout is not torch.strided:
        return tensor._version, tensor.requires_grad
    return tensor._version, tensor.untyped_storage()._cdata, tensor.data_ptr(), tensor.requires_grad


class Ledger:
    """Tensors, by identity, each with the fingerprint it had when it was entered. Not safe to share between threads.

    The storages that they had are known by weak references, so that no later one can pass for one of them.
    """

    def __init__(self) -> None:
        self._tensors: dict[int, torch.Tensor] = {}
        self._seen: dict[int, tuple[Any, ...]] = {}
        self._storages: dict[int, StorageWeakRef] = {}

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._tensors

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(list(self._tensors.values()))

    def enter(self, tensor: torch.Tensor) -> None:
        """Remember the tensor as it is now."""
        self._tensors[id(tensor)] = tensor
        self._seen[id(tensor)] = _fingerprint(tensor)
        if tensor.layout is torch.strided:
            self._storages[id(tensor)] = StorageWeakRef(tensor.untyped_storage())

    def changed(self) -> list[torch.Tensor]:
        """The tensors that are no longer as they were when they were entered."""
        seen = self._seen
        return [tensor for key, tensor in self._tensors.items() if _fingerprint(tensor) != seen[key]]

    def keep(self, keys: AbstractSet[int]) -> None:
        """Let go of all tensors but those with these ids."""
        for key in set(self._tensors) - keys:
            del self._tensors[key], self._seen[key]
            self._storages.pop(key, None)


class lasting:  # noqa: N801
    """What is made in this block outlives the call: no graph, and no inference tensor, whatever the caller's modes."""

    def __enter__(self) -> None:
        self._modes = torch.inference_mode(False), torch.no_grad()
        for mode in self._modes:
            mode.__enter__()

    def __exit__(self, *error: object) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)
