"""Put the values of all lanes at one place together: tensors, arrays, and numbers."""

from __future__ import annotations

import numbers
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from parawrap.engine.columns import list_values
from parawrap.engine.join_rules import Reduce, refuse

_NO_SUM = "which has no sum"

# Tensors and arrays


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
    dims = range(parts[0].ndim)
    row_dim = dim % parts[0].ndim
    longest = [max(part.shape[each] for part in parts) for each in dims]
    padded = []
    for part in parts:
        ends: list[int] = []
        for each in reversed(dims):  # torch takes the padding of the last dim first
            missing = 0 if each == row_dim else longest[each] - part.shape[each]
            ends += [0, missing]  # before the dim, and after it
        is_short = any(ends)
        padded.append(torch.nn.functional.pad(part, ends, value=value) if is_short else part)
    return padded


def are_of_one_form(parts: Sequence[torch.Tensor], dim: int, device: torch.device) -> bool:
    """True if parts can be copied straight into one tensor on the device.

    Their dtypes are equal: `Joiner` refuses others.
    """
    if all(part.device == device for part in parts):
        return False  # torch.cat copies each part once too
    if not are_alike(parts, dim):
        return False
    records = torch.is_grad_enabled()
    for part in parts:
        # A copy would lose a subclass
        if type(part) is not torch.Tensor or not part.is_contiguous():
            return False
        # Autograd refuses a write into one of the views that `split` returns
        if records and part.requires_grad:
            return False
    return True


def write_into_one(parts: Sequence[torch.Tensor], dim: int, device: torch.device) -> torch.Tensor:
    """Copy each part once, straight to its place in one tensor on the device."""
    sizes = [part.shape[dim] for part in parts]
    shape = list(parts[0].shape)
    shape[dim] = sum(sizes)
    joined = torch.empty(shape, dtype=parts[0].dtype, device=device)
    # A copy to the CPU that does not block may end after the caller has read the tensor. Copies to
    # other devices are queued on this stream, which `PlacedCall` has noted as a user of the parts
    may_return_early = device.type != "cpu"
    for view, part in zip(joined.split(sizes, dim), parts, strict=True):
        view.copy_(part, non_blocking=may_return_early)
    return joined


def concatenate_arrays(parts: Sequence[Any], dim: int) -> Any:
    """Return arrays of numpy next to each other along `dim`."""
    numpy = sys.modules["numpy"]  # a script that has arrays has imported it
    # Only the function of `ma` keeps masks
    library = numpy.ma if isinstance(parts[0], numpy.ma.MaskedArray) else numpy
    return library.concatenate(parts, axis=dim)


def fits(value: Any, dtype: torch.dtype) -> bool:
    """True if a value can be stored in a dtype without a change."""
    try:
        return bool(torch.full((), value, dtype=dtype).item() == value)
    except (OverflowError, RuntimeError, TypeError, ValueError):
        return False


# Numbers


def reduce_numbers(parts: Sequence[Any], sizes: Sequence[int], reduce: Reduce | None) -> Any:
    """Return one value from the numbers of the lanes.

    `sizes` are the row counts of the shards, by which a mean weighs the numbers.
    """
    first = parts[0]
    kind = str(first.dtype) if isinstance(first, torch.Tensor) else type(first).__name__

    def refuse_number(why: str) -> NoReturn:
        refuse(why, returned=f"one {kind} each ({list_values(parts)})")

    if reduce is None:
        refuse_number("and no reduction is right for every number")
    if reduce == "sum":
        if kind in ("bool", "torch.bool"):  # the sum of True and True would be 2
            refuse_number(_NO_SUM)
        try:
            # Not from 0: the sum has the type and the device of the first number
            return sum(parts[1:], start=first)
        except TypeError:  # an object that only looks like a number
            refuse_number(_NO_SUM)
    if reduce == "mean":
        if not _has_mean(first):
            refuse_number("which has no mean over lanes")
        return _weighted_mean(parts, sizes)
    try:
        if isinstance(first, torch.Tensor):
            vector = torch.stack(list(parts))
        else:
            vector = torch.tensor(parts)
    except (RuntimeError, TypeError, ValueError):
        refuse_number("which torch cannot put into a tensor")
    if reduce == "stack":
        return vector
    return reduce(vector)


def _weighted_mean(parts: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Return the mean of numbers, each weighted by the rows of its shard."""
    if len(parts) == 1:
        return parts[0]  # also of zero rows, by which the weight below would divide
    rows = sum(sizes)
    mean = parts[0] * (sizes[0] / rows)
    for part, size in zip(parts[1:], sizes[1:], strict=True):
        weight = size / rows
        if isinstance(mean, torch.Tensor):
            mean = torch.add(mean, part, alpha=weight)  # without a tensor for the product
        else:
            mean = mean + part * weight  # `+=` may write into an object of the user's type
    return mean


def _has_mean(value: Any) -> bool:
    """True for floats and complex numbers. The mean of integers would be of another type."""
    if isinstance(value, torch.Tensor):
        return value.is_floating_point() or value.is_complex()
    return isinstance(value, numbers.Complex) and not isinstance(value, numbers.Integral)
