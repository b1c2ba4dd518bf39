"""Which of a set of tensors changed since they were last looked at."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from typing import Any

import torch

__all__ = ["Ledger", "lasting"]


def _fingerprint(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Changes whenever the tensor does: its version counter, and where its data lies for ``tensor.data = ...``.

    Data without an address, as on XLA, lies where its storage does. A write through ``tensor.data`` leaves no trace in
    either. An inference tensor has no counter: it never looks the same.
    """
    if tensor.is_inference():
        return (object(),)
    where = (tensor.data_ptr() or tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else 0
    return tensor._version, where, tensor.requires_grad


class Ledger:
    """Tensors, by identity, each with the fingerprint it had when it was entered. Not safe to share between threads."""

    def __init__(self) -> None:
        self._tensors: dict[int, torch.Tensor] = {}
        self._seen: dict[int, tuple[Any, ...]] = {}

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._tensors

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(list(self._tensors.values()))

    def enter(self, tensor: torch.Tensor) -> None:
        """Remember the tensor as it is now."""
        self._tensors[id(tensor)] = tensor
        self._seen[id(tensor)] = _fingerprint(tensor)

    def changed(self) -> list[torch.Tensor]:
        """The tensors that are no longer as they were when they were entered."""
        seen = self._seen
        return [tensor for key, tensor in self._tensors.items() if _fingerprint(tensor) != seen[key]]

    def keep(self, keys: AbstractSet[int]) -> None:
        """Let go of all tensors but those with these ids."""
        for key in set(self._tensors) - keys:
            del self._tensors[key], self._seen[key]


class lasting:  # noqa: N801
    """What is made in this block outlives the call: no graph, and no inference tensor, whatever the caller's modes."""

    def __enter__(self) -> None:
        self._modes = torch.inference_mode(False), torch.no_grad()
        for mode in self._modes:
            mode.__enter__()

    def __exit__(self, *error: object) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)
