"""Join the numbers that lanes return."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import torch

from parawrap.shards._join_rules import Reduce, refuse

__all__ = ["is_number", "list_values", "reduce_numbers"]


def is_number(value: Any) -> bool:
    """True for Python numbers, 0-d tensors, and the scalars of other libraries."""
    if isinstance(value, torch.Tensor):
        return value.ndim == 0
    return isinstance(value, numbers.Number) or getattr(value, "shape", None) == ()


def reduce_numbers(parts: Sequence[Any], sizes: Sequence[int], reduce: Reduce | None) -> Any:
    """One value from the numbers of the lanes. The mean weighs each shard by its rows, as a mean over rows does."""
    first = parts[0]
    kind = str(first.dtype) if isinstance(first, torch.Tensor) else type(first).__name__
    if reduce is None:
        refuse(
            f"each lane returned one {kind} ({list_values(parts)}), and no reduction is right for every number. Use "
            'reduce="mean" for a mean over rows, "sum" for sums and counts, "stack" for one value per lane, or a function '
            "of the vector; out_dims=None for a value that is the same in every lane"
        )
    if reduce == "sum":
        if kind in ("bool", "torch.bool"):
            refuse(f"each lane returned one {kind}, which has no sum. Use a function as reduce, torch.any say")
        return sum(parts[1:], start=first)
    if reduce == "mean":
        if not _has_mean(first):
            refuse(
                f'each lane returned one {kind} ({list_values(parts)}), which has no mean over lanes. Use reduce="sum" for '
                'a count, reduce="stack" for one value per lane, or a function of the vector'
            )
        return _average(parts, sizes)
    vector = torch.stack(list(parts)) if isinstance(first, torch.Tensor) else torch.tensor(parts)
    return vector if reduce == "stack" else reduce(vector)


def _has_mean(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.is_floating_point() or value.is_complex()
    return isinstance(value, numbers.Complex) and not isinstance(value, numbers.Integral)


def _average(parts: Sequence[Any], sizes: Sequence[int]) -> Any:
    rows = sum(sizes)
    mean = parts[0] * (sizes[0] / rows)
    for part, size in zip(parts[1:], sizes[1:], strict=True):
        mean = torch.add(mean, part, alpha=size / rows) if isinstance(part, torch.Tensor) else mean + part * (size / rows)
    return mean


def list_values(values: Sequence[Any]) -> str:
    shown = ", ".join(repr(value)[:60] for value in values[:4])
    return shown + (", ..." if len(values) > 4 else "")
