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
        relative: The difference, divided by the largest value of the same output, or by the
            largest value of all gradients.
        exceeds_rounding: True if a tensor differs by more than rounding explains.
    """

    absolute: float
    relative: float
    exceeds_rounding: bool = False

    def __str__(self) -> str:
        return f"{self.absolute:.1e} ({self.relative:.1e})" if self.absolute else "0"


def rounding_of(dtype: torch.dtype) -> float:
    """Return the largest relative difference that rounding explains; 0 for integers.

    The square root of the machine epsilon means that half of the digits agree.
    """
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    return math.sqrt(torch.finfo(dtype).eps)


def largest_of(tensors: Sequence[torch.Tensor]) -> float:
    """Return the largest finite magnitude in tensors on the CPU, or 0 without one."""
    largest = 0.0
    for tensor in tensors:
        if tensor.numel():  # torch refuses the maximum of no values
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
        ours: Tensors, on any device.
        plain: The tensors of the plain way, to compare them with.
        largest: The value that differences are divided by; by default the largest value of the same
            tensor in `plain`.
    """
    if list(map(_shape_and_dtype, ours)) != list(map(_shape_and_dtype, plain)):
        return Difference(math.inf, math.inf, exceeds_rounding=True)
    absolute, relative, exceeds_rounding = Difference(0.0, 0.0)
    for our_tensor, plain_tensor in zip(ours, plain, strict=True):
        found = _compare_pair(our_tensor, plain_tensor, largest)
        absolute = max(absolute, found.absolute)
        relative = max(relative, found.relative)
        exceeds_rounding |= found.exceeds_rounding
    return Difference(absolute, relative, exceeds_rounding)


def _shape_and_dtype(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _compare_pair(
    our_tensor: torch.Tensor, plain_tensor: torch.Tensor, largest: float | None
) -> Difference:
    """Return the difference of two tensors of one shape and dtype."""
    ours = our_tensor.cpu().to_dense()
    plain = plain_tensor.cpu().to_dense()
    our_values = _as_double(ours)
    plain_values = _as_double(plain)
    rounding = rounding_of(ours.dtype)
    if rounding == 0:
        is_same = ours == plain
        # Large integers that differ may be one number in float64. They differ by at least 1
        least_gap = 1.0
    else:
        both_nan = our_values.isnan() & plain_values.isnan()
        is_same = (our_values == plain_values) | both_nan
        least_gap = 0.0
    if is_same.all():
        return Difference(0.0, 0.0)
    # A single NaN, or an infinity next to a number, counts as an infinite gap
    gaps = (our_values - plain_values).abs().nan_to_num(math.inf, math.inf)
    # Equal infinities have the gap NaN, but are the same
    gaps = gaps.clamp(min=least_gap).masked_fill(is_same, 0.0)
    gap = float(gaps.max())
    # The gap is divided by the largest value, and not by the value at the same place, which may be
    # so near 0 that rounding looks large
    scale = largest_of([plain]) if largest is None else largest
    relative = gap / scale if scale else math.inf
    return Difference(gap, relative, relative > rounding)


def _as_double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
