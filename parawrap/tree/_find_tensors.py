"""Find the tensors inside objects of any class."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import torch

__all__ = ["tensors_in"]

_SEALED = (str, bytes, int, float, complex, type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield every tensor that `value` holds in attributes, slots, and containers, at any depth, each once.

    Functions, classes, and Python modules are not searched.
    """
    seen: dict[int, object] = {}
    waiting: list[Any] = [value]
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, _SEALED):
            continue
        seen[id(each)] = each
        if isinstance(each, torch.Tensor):
            yield each
        else:
            waiting += _list_held(each)


def _list_held(value: Any) -> list[Any]:
    """The items and attributes of one object."""
    held: list[Any] = []
    if isinstance(value, Mapping):
        held += value.values()
    elif isinstance(value, (list, tuple, deque, AbstractSet)):
        held += value
    elif isinstance(value, types.MethodType):
        held.append(value.__self__)
    held += getattr(value, "__dict__", {}).values()
    names = (name for cls in type(value).__mro__ for name in _slots(cls))
    return held + [getattr(value, name) for name in names if hasattr(value, name)]


def _slots(cls: type) -> list[str]:
    """Return the names of the slots of a class; those of private names as Python stores them."""
    slots = cls.__dict__.get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    is_private = [name.startswith("__") and not name.endswith("__") for name in names]
    prefix = f"_{cls.__name__.lstrip('_')}"
    return [prefix + name if private else name for name, private in zip(names, is_private, strict=True)]
