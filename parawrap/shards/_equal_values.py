"""Compare the values that lanes returned."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch

__all__ = ["equal_values", "is_array"]


def is_array(value: Any) -> bool:
    """True for an array of numpy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def equal_values(one: Any, other: Any) -> bool:
    """Equality by value. Two NaNs are equal; values that cannot be compared are not."""
    if one is other:
        return True
    try:
        if isinstance(one, torch.Tensor):
            return _equal_tensors(one.detach(), other.detach())
        if is_array(one):
            numpy = sys.modules["numpy"]
            return one.dtype == other.dtype and bool(numpy.array_equal(one, other, equal_nan=one.dtype.kind in "fc"))
        if isinstance(one, float) and isinstance(other, float) and math.isnan(one) and math.isnan(other):
            return True
        return type(one) is type(other) and bool(one == other)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return False


def _equal_tensors(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    other = other.to(one.device)
    if torch.equal(one, other):
        return True
    is_inexact = one.is_floating_point() or one.is_complex()
    return is_inexact and bool(((one == other) | (one.isnan() & other.isnan())).all())
