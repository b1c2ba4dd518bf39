"""Count the rows of a leaf of a call, or say why it has none."""

from __future__ import annotations

import array
import collections
import datetime as dt
import enum
import numbers
import pathlib
import re
import sys
import types
import uuid
from typing import Any

import torch

from parawrap.shards._register_split import splitter_of
from parawrap.tree import WholeLeaf

__all__ = ["BEYOND", "EMPTY", "FIXED", "FOREIGN", "NESTED", "NUMBER", "NUMBERS", "OBJECT", "extent_of", "has_items"]

# Values of `extent_of` for leaves without rows.
BROADCAST = -1
NUMBER = -2  # a 0-d tensor or a number
BEYOND = -3  # a tensor with dims, but without the dim of the rows
FIXED = -4  # another value that cannot follow the rows and has no state: every lane gets the same object
OBJECT = -5  # of a class that parawrap does not know
EMPTY = -6  # a cache without rows yet: every lane gets a copy
NESTED = -7  # a nested tensor of the strided layout, which torch cannot split
FOREIGN = -100  # and below, by its length: an array of another library
NUMBERS = (int, float, bool, complex, torch.dtype, torch.device, torch.Generator)
_SEQUENCES = (list, range, array.array, collections.deque, collections.UserList)
_FIXED = (
    str,
    bytes,
    enum.Enum,
    slice,
    type,
    types.EllipsisType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
    numbers.Number,
    pathlib.PurePath,
    dt.date,
    dt.time,
    dt.timedelta,
    dt.tzinfo,
    re.Pattern,
    uuid.UUID,
    torch.Size,
    torch.layout,
    torch.memory_format,
    torch.finfo,
    torch.iinfo,
)


def _length_of_array(value: Any) -> int | None:
    shape = None if isinstance(value, (torch.Tensor, WholeLeaf)) else getattr(value, "shape", None)
    return shape[0] if isinstance(shape, tuple) and shape and isinstance(shape[0], int) else None


def _is_numpy_value(value: Any) -> bool:
    """True for a scalar or a dtype of numpy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.generic, numpy.dtype))


def has_items(value: Any) -> bool:
    """True for a sequence that `in_dims` may cut by item, or an array of another library."""
    return type(value) is tuple or isinstance(value, _SEQUENCES) or _length_of_array(value) is not None


def extent_of(leaf: Any, dim: int | None) -> int:
    """The rows of a leaf on `dim`, or a negative number for its kind."""
    if isinstance(leaf, torch.Tensor):
        if dim is not None and leaf.is_nested and leaf.layout is torch.strided:
            return NESTED
        if dim is not None and -leaf.ndim <= dim < leaf.ndim:
            return leaf.size(dim) if leaf.is_nested else leaf.shape[dim]
        if dim is None:
            return BROADCAST
        return BEYOND if leaf.ndim else NUMBER
    if isinstance(leaf, WholeLeaf):
        if dim is None:
            return BROADCAST
        rules = splitter_of(leaf.value)
        rows = rules.rows(leaf.value)
        return EMPTY if rows == 0 and rules.update is not None else rows
    if leaf is None:
        return BROADCAST
    if isinstance(leaf, NUMBERS):
        return NUMBER
    if isinstance(leaf, _FIXED) or dim is None or _is_numpy_value(leaf):
        return FIXED
    length = _length_of_array(leaf)
    return OBJECT if length is None else FOREIGN - length
