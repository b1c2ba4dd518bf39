"""The names of the script that ranks get although the function does not use them: for `eval`, `torch.load`, and others.

Ranks get definitions, and values of a few small objects. A name that leads to other objects stays behind, because
their data may be large, and their pickling may have effects.
"""

from __future__ import annotations

import dis
import enum
import functools
import logging
import re
import sys
import types
import typing
from collections.abc import Iterable
from pathlib import PurePath
from typing import Any

import torch

from parawrap.launch.messages._pickle_definitions import is_found_by_name

__all__ = ["globals_used_by", "may_read_names", "names_of_script"]

_READERS = frozenset({"eval", "exec", "globals", "vars"})

# Guesses: settings of scripts are smaller, and copies of smaller data take no noticeable time.
_MOST_PARTS = 1000
_MOST_PARTS_OF_SCRIPT = 20_000  # about 20 ms
_LONGEST_TEXT = 1 << 14  # characters; longer texts are data, not names

_ATOMS = (type(None), bool, int, float, complex, torch.dtype, torch.device)
_SHARED = (types.ModuleType, logging.Logger, re.Pattern, PurePath, types.BuiltinFunctionType, types.MethodDescriptorType)
_SLOTS = (types.WrapperDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType)
_LIGHT = (*_ATOMS, *_SHARED, *_SLOTS)
_OF_TYPES = ("typing", "types", "dataclasses")
_CACHED: Any = type(functools.cache(len))


def names_of_script() -> tuple[dict[str, Any], dict[str, str]]:
    """Return the names of ``__main__`` to send with their values, and the others with the reason."""
    sent, unsent = {}, {}
    survey = _NameSearch()
    for name, value in list(vars(sys.modules["__main__"]).items()):
        if name.startswith("_") or isinstance(value, types.ModuleType):
            continue
        reason = survey.reason_to_stay(value, name)
        if reason is None:
            sent[name] = value
        else:
            unsent[name] = reason
    return sent, unsent


def may_read_names(code: types.CodeType) -> bool:
    """True if a function with this code may use any name of the script."""
    return "__subclasses__" in code.co_names or not _READERS.isdisjoint(globals_used_by(code))


@functools.lru_cache(maxsize=4096)
def globals_used_by(code: types.CodeType) -> frozenset[str]:
    mine = {each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"}
    inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return frozenset(mine).union(*map(globals_used_by, inner))


class _NameSearch:
    """Decides which values of the script are light. Looks at each part once, and at a bounded number of parts."""

    def __init__(self) -> None:
        self._light: dict[int, Any] = {}  # with the parts themselves, so that no other object gets their ids
        self._steps = 0

    def reason_to_stay(self, value: Any, name: str) -> str | None:
        """Return the reason why a value is not sent; None if all its parts are light."""
        pending, seen = [(value, name)], dict[int, Any]()
        while pending:
            part, owner = pending.pop()
            if id(part) in self._light or id(part) in seen:
                continue
            seen[id(part)] = part
            self._steps += 1
            if self._steps > _MOST_PARTS_OF_SCRIPT:
                return "the script has too many definitions"
            found = _parts(part, owner)
            if found is None:
                return _describe(part, owner)
            if len(seen) > _MOST_PARTS:
                return f"{name!r} uses more than {_MOST_PARTS} other objects"
            pending += found
        self._light |= seen
        return None


def _describe(part: Any, name: str) -> str:
    if isinstance(part, (str, bytes, list, tuple, set, frozenset, dict)):
        return f"{name!r} is large"
    return f"{name!r} holds a {type(part).__qualname__}, and only definitions and small values are sent"


def _parts(value: Any, name: str) -> Iterable[tuple[Any, str]] | None:
    """Return the parts of a light value with names. None if it is not light."""
    parts: Iterable[Any]
    if isinstance(value, (str, bytes)):
        return () if len(value) <= _LONGEST_TEXT else None
    if isinstance(value, (list, tuple, set, frozenset, dict)) and len(value) > _MOST_PARTS:
        return None
    if isinstance(value, _LIGHT) or type(value).__module__ in _OF_TYPES:
        return ()
    if isinstance(value, (type, types.FunctionType, _CACHED)) and is_found_by_name(value):
        return ()
    if isinstance(value, types.FunctionType):
        return _parts_of_function(value, name)
    if isinstance(value, type):
        parts = (*value.__bases__, *(part for key, part in vars(value).items() if key != "_abc_impl"))
    elif isinstance(value, (list, tuple, set, frozenset)):
        parts = value
    elif isinstance(value, dict):
        parts = (*value, *value.values())
    elif isinstance(value, (staticmethod, classmethod, _CACHED)):
        parts = (value.__wrapped__,)
    elif isinstance(value, property):
        parts = (value.fget, value.fset, value.fdel)
    elif isinstance(value, functools.cached_property):
        parts = (value.func,)
    elif isinstance(value, functools.partial):
        parts = (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, typing.NewType):
        parts = (value.__supertype__,)
    elif isinstance(value, enum.Enum):
        parts = (type(value), value.value)
    else:
        return None
    return [(part, name) for part in parts]


def _parts_of_function(function: types.FunctionType, name: str) -> Iterable[tuple[Any, str]]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents, name
        except ValueError:  # an unassigned variable
            continue
    for part in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *vars(function).values()):
        yield part, name
    for used in globals_used_by(function.__code__) & function.__globals__.keys():
        yield function.__globals__[used], used
