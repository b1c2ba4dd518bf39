"""Calls taken apart into leaves, and the extent of each leaf: its row count, or its kind."""

from __future__ import annotations

import datetime as dt
import enum
import numbers
import pathlib
import re
import sys
import types
import uuid
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from parawrap.engine.columns import shape_of
from parawrap.engine.rules.registry import splitter_of
from parawrap.tree import PLAIN, TreeSpec, WholeLeaf, address

# Extents of leaves without rows. All are negative, since a row count may be 0 or more
BROADCAST = -1  # every lane gets the same object
BEYOND = -2  # a tensor with dims, but without the dim of the rows
OBJECT = -3  # of a class that parawrap does not know
EMPTY = -4  # a cache without rows yet: every lane gets a copy
# The extent of an array of another library is this number less the length, such as -105: two plans
# for arrays of two lengths have different keys
ARRAY = -100

# Without strings, which are plain values, and without sets, which have no order
_SEQUENCES = (list, range, deque)
# Values that no lane changes, and a generator: lanes that share one take turns
_SHARED_BY_LANES = (
    *PLAIN,
    numbers.Number,
    enum.Enum,
    slice,
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
    types.EllipsisType,
    dt.date,
    dt.time,
    dt.timedelta,
    uuid.UUID,
    pathlib.PurePath,
    re.Pattern,
    torch.dtype,
    torch.device,
    torch.Size,
    torch.layout,
    torch.memory_format,
    torch.finfo,
    torch.iinfo,
    torch.Generator,
)


class FlatCall(NamedTuple):
    """One call taken apart.

    Attributes:
        leaves: The leaves of ``(args, kwargs)``.
        spec: The containers around them.
        extents: The row count of each leaf, or one of the negative numbers above; empty if the plan
            is made already.
        on_cpu: True if the call has positional plain tensors on the CPU alone.
    """

    leaves: Sequence[Any]
    spec: TreeSpec
    extents: tuple[int, ...] = ()
    on_cpu: bool = False


def address_in_call(path: Sequence[Any]) -> str:
    """Return the address of a value in a call, such as ``args[0]``, from its path."""
    root = "args" if path[0] == 0 else "kwargs"
    return address(root, path[1:])


def extent_of(leaf: Any, dim: int | None) -> int:
    """Return the rows of a leaf on `dim`, or a negative number for its kind."""
    if isinstance(leaf, torch.Tensor):
        if dim is None:
            return BROADCAST
        if -leaf.ndim <= dim < leaf.ndim:
            # Not by `shape`, which a nested tensor does not have
            return _size_of_nested(leaf, dim) if leaf.is_nested else leaf.size(dim)
        return BEYOND if leaf.ndim else BROADCAST
    if isinstance(leaf, WholeLeaf):
        if dim is None:
            return BROADCAST
        rules = splitter_of(leaf.value)
        rows = rules.rows(leaf.value)
        # A list without items has no rows in any lane. An empty cache gets rows in each lane
        return EMPTY if rows == 0 and rules.may_be_empty else rows
    if dim is None or is_plain_value(leaf):
        return BROADCAST
    length = _length_of_array(leaf)
    return OBJECT if length is None else ARRAY - length


def _size_of_nested(tensor: torch.Tensor, dim: int) -> int:
    """Return the size of a nested tensor on `dim`; OBJECT if its parts differ in size there."""
    try:
        size = tensor.size(dim)
    except RuntimeError:  # the strided layout
        return OBJECT
    return size if isinstance(size, int) else OBJECT  # a symbol in the jagged layout


def is_plain_value(leaf: Any) -> bool:
    """True for a value without rows that every lane gets whole, such as a number or a text."""
    return leaf is None or isinstance(leaf, _SHARED_BY_LANES) or _is_numpy_value(leaf)


def _length_of_array(value: Any) -> int | None:
    """Return the length of an array of another library, such as numpy; None for other values."""
    if isinstance(value, (torch.Tensor, WholeLeaf)):
        return None
    shape = shape_of(value)
    return shape[0] if shape else None


def _is_numpy_value(value: Any) -> bool:
    """True for a scalar or a dtype of numpy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.generic, numpy.dtype))


def has_items(value: Any) -> bool:
    """True for a sequence that `in_dims` may cut by item, or an array of another library."""
    # Not by `isinstance` for tuples: a namedtuple is a structure, not a sequence of items
    is_sequence = type(value) is tuple or isinstance(value, _SEQUENCES)
    return is_sequence or _length_of_array(value) is not None
