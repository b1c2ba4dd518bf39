"""Put the parts of one output together: tensors and numbers."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from parawrap.engine.join_rules import SAME, Reduce, refuse

# Tensors


def shapes_of(parts: Sequence[Any]) -> str:
    """Return the shapes for an error."""
    return ", ".join(str(tuple(part.shape)) for part in parts)


def other_sizes(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    """Return the sizes on all dims but one."""
    sizes = list(shape)
    if -len(sizes) <= dim < len(sizes):
        del sizes[dim]
    return tuple(sizes)


def are_alike(parts: Sequence[Any], dim: int) -> bool:
    """True if tensors or arrays have the same sizes on all dims but one."""
    return len({other_sizes(part.shape, dim) for part in parts}) == 1


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
    if all(part.device == device for part in parts):
        return False
    return are_alike(parts, dim) and all(
        type(part) is torch.Tensor and part.is_contiguous() and not (part.requires_grad and torch.is_grad_enabled())
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

    def refuse_number(why: str) -> NoReturn:
        refuse(f"each lane returned one {kind} ({list_values(parts)}), {why}; or {SAME}")

    if reduce is None:
        refuse_number(
            'and no reduction is right for every number. Use reduce="mean" for a mean over rows, "sum" for sums and '
            'counts, "stack" for one value per lane, or a function of the vector; a dict, such as reduce={"key": "mean"}, '
            "for one of several outputs"
        )
    if reduce == "sum":
        if kind in ("bool", "torch.bool"):
            refuse_number("which has no sum. Use a function as reduce, such as torch.any")
        return sum(parts[1:], start=first)
    if reduce == "mean":
        if not _has_mean(first):
            refuse_number(
                'which has no mean over lanes. Use reduce="sum" for a count, reduce="stack" for one value per lane, or a '
                "function of the vector"
            )
        rows = sum(sizes)
        mean = first * (sizes[0] / rows)
        for part, size in zip(parts[1:], sizes[1:], strict=True):
            is_tensor = isinstance(mean, torch.Tensor)
            mean = torch.add(mean, part, alpha=size / rows) if is_tensor else mean + part * (size / rows)
        return mean
    vector = torch.stack(list(parts)) if isinstance(first, torch.Tensor) else torch.tensor(parts)
    return vector if reduce == "stack" else reduce(vector)


def _has_mean(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.is_floating_point() or value.is_complex()
    return isinstance(value, numbers.Complex) and not isinstance(value, numbers.Integral)


def list_values(values: Sequence[Any]) -> str:
    """Return the first values, for an error."""
    shown = ", ".join(repr(value)[:60] for value in values[:4])
    return shown + (", ..." if len(values) > 4 else "")
