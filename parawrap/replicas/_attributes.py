"""The attributes of instances, in their ``__dict__`` and in their slots."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["CopyOf", "Part", "attributes_of", "clear_attributes", "fill_attributes", "has_slots", "slots_of"]

Part = tuple[Any, Any]
"""A key, and the value that the object holds under it."""
CopyOf = Callable[[Any], Any]

_SLOTS: dict[type, tuple[tuple[str, Any], ...]] = {}


def slots_of(cls: type) -> tuple[tuple[str, Any], ...]:
    """The names and descriptors of the slots of a Python class."""
    if cls not in _SLOTS:
        own = (vars(base).items() for base in cls.__mro__ if "__slots__" in vars(base))
        members = types.MemberDescriptorType
        _SLOTS[cls] = tuple((name, value) for items in own for name, value in items if isinstance(value, members))
    return _SLOTS[cls]


def attributes_of(value: Any) -> Sequence[Part]:
    """The attributes of an instance, in its dict and in its slots."""
    own = getattr(value, "__dict__", None)
    found: list[Part] = [*own.items()] if isinstance(own, dict) and own is not value else []
    for name, slot in slots_of(type(value)):
        try:
            found.append((name, slot.__get__(value)))
        except AttributeError:
            continue
    return found


def has_slots(cls: type) -> bool:
    """True if instances keep attributes in slots."""
    return bool(slots_of(cls))


def clear_attributes(value: Any) -> None:
    """Delete all attributes of an instance."""
    getattr(value, "__dict__", {}).clear()
    for _, slot in slots_of(type(value)):
        with contextlib.suppress(AttributeError):
            slot.__delete__(value)


def fill_attributes(value: Any, copy: Any, copy_of: CopyOf) -> None:
    own = getattr(value, "__dict__", None)
    if isinstance(own, dict) and own and own is not value:
        vars(copy).update({name: copy_of(part) for name, part in own.items()})
    for _, slot in slots_of(type(value)):
        try:
            part = slot.__get__(value)
        except AttributeError:
            continue
        slot.__set__(copy, copy_of(part))
