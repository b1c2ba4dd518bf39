"""Calls taken apart, and the extent of each leaf: its row count, or its kind."""

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

from parawrap.engine.rules.registry import splitter_of
from parawrap.tree import TreeSpec, WholeLeaf

CALL_ROOTS = ("args", "kwargs")
"""How the addresses of a call's leaves begin."""

# Extents of leaves without rows
BROADCAST = -1  # every lane gets the same object
BEYOND = -3  # a tensor with dims, but without the dim of the rows
OBJECT = -4  # of a class that parawrap does not know
EMPTY = -5  # a cache without rows yet: every lane gets a copy
ARRAY = -100  # and below, by its length: an array of another library

_SEQUENCES = (list, range, deque)
_VALUES = (
    *(int, float, str, bytes, numbers.Number, enum.Enum, slice, type, types.EllipsisType, pathlib.PurePath, re.Pattern),
    *(types.FunctionType, types.BuiltinFunctionType, types.ModuleType, dt.date, dt.time, dt.timedelta, uuid.UUID),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, torch.finfo, torch.iinfo, torch.Generator),
)


class FlatCall(NamedTuple):
    """One call taken apart: its leaves, its structure, and each leaf's extent, which is its row count or says its kind.

    `on_cpu` is True for a call of positional tensors on the CPU, and nothing else.
    """

    leaves: Sequence[Any]
    spec: TreeSpec
    extents: tuple[int, ...] = ()
    on_cpu: bool = False


def extent_of(leaf: Any, dim: int | None) -> int:
    """Return the rows of a leaf on `dim`, or a negative number for its kind."""
    if isinstance(leaf, torch.Tensor):
        if dim is None:
            return BROADCAST
        if -leaf.ndim <= dim < leaf.ndim:
            return leaf.size(dim)  # a nested tensor has no shape
        return BEYOND if leaf.ndim else BROADCAST
    if isinstance(leaf, WholeLeaf):
        if dim is None:
            return BROADCAST
        rules = splitter_of(leaf.value)
        rows = rules.rows(leaf.value)
        return EMPTY if rows == 0 and rules.update is not None else rows
    if dim is None or leaf is None or isinstance(leaf, _VALUES) or _is_numpy_value(leaf):
        return BROADCAST
    length = _length_of_array(leaf)
    return OBJECT if length is None else ARRAY - length


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
