"""Differences between tensors, and how much of them rounding explains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch


class Difference(NamedTuple):
    """The greatest difference from the plain way.

    Attributes:
        absolute: The difference itself.
        relative: The difference in relation to the largest value of the same output, or to the
            largest value of all gradients.
        exceeds_rounding: True if a tensor differs by more than rounding explains.
    """

    absolute: float
    relative: float
    exceeds_rounding: bool = False

    def __str__(self) -> str:
        return f"{self.absolute:.1e} ({self.relative:.1e})" if self.absolute else "0"


def rounding_of(dtype: torch.dtype) -> float:
    """Return the largest relative difference that rounding explains.

    Half of the digits of a number agree then. Integers must be equal.
    """
    has_rounding = dtype.is_floating_point or dtype.is_complex
    return torch.finfo(dtype).eps ** 0.5 if has_rounding else 0.0


def largest_of(tensors: Sequence[torch.Tensor]) -> float:
    """Return the largest finite magnitude in tensors on the CPU, or 0 without one."""
    largest = 0.0
    for tensor in tensors:
        if tensor.numel():
            values = _as_double(tensor.to_dense()).abs().nan_to_num(0.0, posinf=0.0)
            largest = max(largest, float(values.max()))
    return largest


def difference(
    ours: Sequence[torch.Tensor],
    plain: Sequence[torch.Tensor],
    *,
    largest: float | None = None,
) -> Difference:
    """Return the greatest difference, infinite if shapes, dtypes, or positions of NaNs differ.

    Args:
        ours: Tensors.
        plain: The tensors to compare them with.
        largest: The value that differences are in relation to; by default the largest value of the
            same tensor in `plain`.
    """
    if [*map(_shape_and_dtype, ours)] != [*map(_shape_and_dtype, plain)]:
        return Difference(math.inf, math.inf, exceeds_rounding=True)
    greatest = Difference(0.0, 0.0)
    for our_tensor, plain_tensor in zip(ours, plain, strict=True):
        found = _compare_pair(our_tensor, plain_tensor, largest)
        greatest = Difference(
            max(greatest.absolute, found.absolute),
            max(greatest.relative, found.relative),
            greatest.exceeds_rounding or found.exceeds_rounding,
        )
    return greatest


def _shape_and_dtype(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _compare_pair(
    our_tensor: torch.Tensor, plain_tensor: torch.Tensor, largest: float | None
) -> Difference:
    """Return the difference of two tensors of one shape and dtype."""
    ours, plain = our_tensor.cpu().to_dense(), plain_tensor.cpu().to_dense()
    our_values, plain_values = _as_double(ours), _as_double(plain)
    rounding = rounding_of(ours.dtype)
    if rounding == 0:
        # Large integers that differ may be one number in float64. Their gap is then at least 1
        is_same, least_gap = ours == plain, 1.0
    else:
        both_nan = our_values.isnan() & plain_values.isnan()
        is_same, least_gap = (our_values == plain_values) | both_nan, 0.0
    if is_same.all():
        return Difference(0.0, 0.0)
    # One NaN, or an infinity next to a number, is an infinite gap
    gaps = (our_values - plain_values).abs().nan_to_num(math.inf, math.inf)
    # Equal infinities have the gap NaN above, and are the same
    gap = float(gaps.clamp(min=least_gap).masked_fill(is_same, 0.0).max())
    # Not the value at the same place: one near 0 would make rounding look large
    scale = largest_of([plain]) if largest is None else largest
    relative = gap / scale if scale else math.inf
    return Difference(gap, relative, relative > rounding)


def _as_double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
