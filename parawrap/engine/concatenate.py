"""Put the parts of one output together: tensors, numpy arrays, and numbers."""

from __future__ import annotations

import numbers
import sys
from collections.abc import Sequence
from typing import Any

import torch

from parawrap.engine.join_rules import CURE, SAME, Reduce, refuse

# Tensors and arrays


def concatenate_arrays(parts: Sequence[Any], dim: int) -> Any:
    """Return numpy arrays next to each other along `dim`."""
    if len({other_sizes(part.shape, dim) for part in parts}) > 1:
        refuse(why_no_cat(parts, dim))
    return sys.modules["numpy"].concatenate(parts, axis=dim)


def shapes_of(parts: Sequence[Any]) -> str:
    """Return the shapes for an error."""
    return ", ".join(str(tuple(part.shape)) for part in parts)


def other_sizes(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    """Return the sizes on all dims but one."""
    sizes = list(shape)
    if -len(sizes) <= dim < len(sizes):
        del sizes[dim]
    return tuple(sizes)


def why_no_cat(parts: Sequence[Any], dim: int) -> str:
    """Return why parts cannot be put next to each other, for an error."""
    if len({len(part.shape) for part in parts}) > 1 or not -len(parts[0].shape) <= dim < len(parts[0].shape):
        return f"the shapes {shapes_of(parts)} have no dim {dim} in common. {CURE}"
    if len({other_sizes(part.shape, dim) for part in parts}) == 1:
        return f"torch.cat refused outputs of shape {shapes_of(parts)}. {CURE}"
    return f'the shapes {shapes_of(parts)} differ beyond dim {dim}. join="pad" pads them to the longest. {CURE}'


def pad(parts: Sequence[torch.Tensor], dim: int, value: Any) -> list[torch.Tensor]:
    """Pad every dim except `dim` at its end, to the longest part."""
    dim %= parts[0].ndim
    longest = [max(sizes) for sizes in zip(*(part.shape for part in parts), strict=True)]
    padded = []
    for part in parts:
        missing = [0 if each == dim else longest[each] - part.shape[each] for each in range(part.ndim)]
        ends = [pad for size in reversed(missing) for pad in (0, size)]
        padded.append(torch.nn.functional.pad(part, ends, value=value) if any(missing) else part)
    return padded


def are_of_one_form(parts: Sequence[torch.Tensor], dim: int, device: torch.device) -> bool:
    """True if parts from elsewhere can be written into one tensor: their rows alone differ, and no graph records it."""
    first = parts[0]
    if len(parts) == 1 or all(part.device == device for part in parts):
        return False
    return all(
        type(part) is torch.Tensor
        and not (part.requires_grad and torch.is_grad_enabled())
        and part.is_contiguous()
        and part.dtype == first.dtype
        and other_sizes(part.shape, dim) == other_sizes(first.shape, dim)
        for part in parts
    )


def write_into_one(parts: Sequence[torch.Tensor], dim: int, device: torch.device) -> torch.Tensor:
    """Copy each part once, straight to its place in one tensor on the device."""
    sizes = [part.shape[dim] for part in parts]
    shape = list(parts[0].shape)
    shape[dim] = sum(sizes)
    joined = torch.empty(shape, dtype=parts[0].dtype, device=device)
    for place, part in zip(joined.split(sizes, dim), parts, strict=True):
        place.copy_(part, non_blocking=device.type != "cpu")
    return joined


# Numbers


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
            f"of the vector; {SAME}"
        )
    if reduce == "sum":
        if kind in ("bool", "torch.bool"):
            refuse(
                f"each lane returned one {kind}, which has no sum. Use a function as reduce, such as torch.any, or {SAME}"
            )
        return sum(parts[1:], start=first)
    if reduce == "mean":
        if not _has_mean(first):
            refuse(
                f'each lane returned one {kind} ({list_values(parts)}), which has no mean over lanes. Use reduce="sum" for '
                f'a count, reduce="stack" for one value per lane, or a function of the vector; {SAME}'
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
    """Return the first values, for an error."""
    shown = ", ".join(repr(value)[:60] for value in values[:4])
    return shown + (", ..." if len(values) > 4 else "")
