"""Columns: the values of all lanes at one place of an output, with one value per lane.

This file has predicates of their kinds, sizes, and equality, and writes them in words for errors.
It changes no value.
"""

from __future__ import annotations

import numbers
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from parawrap.tree import WholeLeaf, tensors_in

_MOST_LISTED = 4  # values in an error: enough to see how they differ
_MOST_CHARACTERS = 60  # of each of them

# Kinds of values


def shape_of(value: object) -> tuple[int, ...] | None:
    """Return the shape of a tensor or an array; None for a nested tensor and any other value."""
    try:
        shape = getattr(value, "shape", None)
    except Exception:  # noqa: BLE001 -- a nested tensor, or a property of the user's, may raise
        return None
    # A class of the user may have a method, or anything else, under this name.
    if not isinstance(shape, tuple) or not all(isinstance(size, int) for size in shape):
        return None
    return tuple(shape)


def is_number(value: Any) -> bool:
    """True for Python numbers, 0-d tensors, and the scalars of other libraries."""
    if isinstance(value, torch.Tensor):
        return value.ndim == 0
    return isinstance(value, numbers.Number) or shape_of(value) == ()


def is_array(value: Any) -> bool:
    """True for an array of numpy."""
    numpy = sys.modules.get("numpy")  # a script that has arrays has imported it
    return numpy is not None and isinstance(value, numpy.ndarray)


def is_array_like(value: Any) -> bool:
    """True for arrays and tensors, also nested tensors, which have no shape."""
    return isinstance(value, torch.Tensor) or shape_of(value) is not None


def are_tensors(column: Sequence[Any]) -> bool:
    """True for tensors, also of subclasses."""
    return all(isinstance(value, torch.Tensor) for value in column)


def are_numbers(column: Sequence[Any]) -> bool:
    """True if each lane returned a number."""
    return all(map(is_number, column))


def have_dims(column: Sequence[Any]) -> bool:
    """True for tensors or arrays with dims."""
    return all(map(shape_of, column))  # an empty shape is false


# Sizes


def sizes_on(column: Sequence[Any], dim: int) -> list[int]:
    """Return the size of each part on a dim; an empty list if a part does not have the dim."""
    try:
        return [part.shape[dim] for part in column]
    except IndexError:
        return []


def are_auxiliary(items: Sequence[Any], siblings: Mapping[Any, Any]) -> bool:
    """True if the items of a list are dicts like the `aux_outputs` of DETR.

    Each tensor in them has the key and the shape of a tensor next to the list, in `siblings`.
    """
    for item in items:
        if not isinstance(item, Mapping) or not item:
            return False
        for key, value in item.items():
            other: Any = siblings.get(key)
            if not are_tensors([value, other]) or value.shape != other.shape:
                return False
    return True


# Equality


def are_all_equal(column: Sequence[Any]) -> bool:
    """True if all lanes returned equal values."""
    return all(_are_equal(column[0], value) for value in column[1:])


def _are_equal(one: Any, other: Any) -> bool:
    """Compare two values; those of registered classes by their tensors.

    Two NaNs are equal. A value whose comparison raises an error equals no other.
    """
    try:
        if isinstance(one, WholeLeaf):
            return _have_equal_tensors(one.value, other.value)
        if isinstance(one, torch.Tensor):
            if one.shape != other.shape or one.dtype != other.dtype:
                return False
            other = other.to(one.device)
            if torch.equal(one, other):
                return True
            # `equal` finds two NaNs different
            return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
        if is_array(one):
            # By value, not by bytes: those of an array of objects are addresses
            has_nan = one.dtype.kind in "fc"  # floats and complex numbers
            is_same = sys.modules["numpy"].array_equal(one, other, equal_nan=has_nan)
            return one.dtype == other.dtype and bool(is_same)
        if one is other:
            return True
        if type(one) is not type(other):
            return False
        are_nan = one != one and other != other  # NaN alone differs from itself
        return bool(one == other or are_nan)
    except Exception:  # noqa: BLE001 -- `==` may be a method of the user's class
        return False


def _have_equal_tensors(one: Any, other: Any) -> bool:
    """Compare objects by the tensors in them; objects without tensors by ``==``."""
    tensors, others = [*tensors_in(one)], [*tensors_in(other)]
    if not tensors:
        return bool(one == other)
    return len(tensors) == len(others) and all(map(_are_equal, tensors, others))


# Texts for errors


def write_code(entry: Any) -> str:
    """Return an entry as Python code."""
    if isinstance(entry, dict):
        items = [f"{write_code(key)}: {write_code(each)}" for key, each in entry.items()]
        return f"{{{', '.join(items)}}}"
    if isinstance(entry, tuple):
        items = [write_code(each) for each in entry]
        comma = "," if len(items) == 1 else ""
        return f"({', '.join(items)}{comma})"
    if isinstance(entry, str):
        needs_escapes = '"' in entry or "\\" in entry
        # `str`, since a subclass may have another repr
        return repr(str(entry)) if needs_escapes else f'"{entry}"'
    if callable(entry):
        name = getattr(entry, "__name__", type(entry).__name__)
        return f"torch.{name}" if getattr(torch, name, None) is entry else str(name)
    return repr(entry)


def list_values(values: Sequence[Any]) -> str:
    """Return the first values, for an error."""
    shown = ", ".join(repr(value)[:_MOST_CHARACTERS] for value in values[:_MOST_LISTED])
    return f"{shown}, ..." if len(values) > _MOST_LISTED else shown


def describe_column(column: Sequence[Any]) -> str:
    """Return the values of the lanes in words: shapes of arrays, and other values as they are."""
    if not all(map(is_array_like, column)):
        return list_values(column)
    return f"shapes {', '.join(str(shape_of(value)) for value in column)}"
