"""Which part of a value keeps it from being sent: the search that turns "cannot pickle" into an address."""

from __future__ import annotations

import functools
import inspect
import reprlib
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

__all__ = ["culprit"]

_MOST_STEPS = 50
_ATOMS = (str, bytes, int, float, complex, bool, type(None), types.ModuleType, type)


def culprit(value: Any, address: str, refusal: Callable[[Any], Exception | None]) -> tuple[str, Any, Exception | None]:
    """The innermost part that cannot be sent: its address, itself, and why. An empty address: its keys are addresses.

    >>> import threading
    >>> place, _, _ = culprit({"steps": [1, threading.Lock()]}, "args[0]", lambda v: None if v == 1 else TypeError())
    >>> place
    "args[0]['steps'][1]"
    """
    reason, seen = None, {id(value)}
    for _ in range(_MOST_STEPS):
        for part, place in _parts(value, address):
            if id(part) not in seen and not isinstance(part, _ATOMS) and (found := refusal(part)) is not None:
                value, address, reason = part, place, found
                seen.add(id(part))
                break
        else:
            break
    return address, value, reason


def _parts(value: Any, address: str) -> Iterator[tuple[Any, str]]:
    """What a pickle of this value would hold, as far as it can be told from outside."""
    if isinstance(value, Mapping):
        for key, part in list(value.items()):
            yield part, f"{address}[{reprlib.repr(key)}]" if address else str(key)
            yield key, f"the key {reprlib.repr(key)} of {address}"
    elif isinstance(value, (list, tuple)):
        for i, part in enumerate(value):
            yield part, f"{address}[{i}]"
    elif isinstance(value, (set, frozenset)):
        for part in value:
            yield part, f"a member of {address}"
    elif isinstance(value, functools.partial):
        yield value.func, f"{address}.func"
        yield value.args, f"{address}.args"
        yield value.keywords, f"{address}.keywords"
    elif isinstance(value, types.MethodType):
        yield value.__self__, f"{address}.__self__"
        yield value.__func__, f"{address}.__func__"
    elif isinstance(value, types.FunctionType):
        yield from _parts_of_function(value, address)
    for name, part in list(getattr(value, "__dict__", {}).items()):
        yield part, f"{address}.{name}"
    for name in _slots(value):
        if hasattr(value, name):
            yield getattr(value, name), f"{address}.{name}"


def _parts_of_function(function: types.FunctionType, address: str) -> Iterator[tuple[Any, str]]:
    captured = inspect.getclosurevars(function)
    for name, part in captured.nonlocals.items():
        yield part, f"the variable {name!r} that {address} captures"
    for name, part in captured.globals.items():
        yield part, f"the global {name!r} that {address} uses"
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.default is not parameter.empty:
            yield parameter.default, f"the default of {address}'s parameter {name!r}"


def _slots(value: Any) -> Iterator[str]:
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        yield from (slots,) if isinstance(slots, str) else slots
