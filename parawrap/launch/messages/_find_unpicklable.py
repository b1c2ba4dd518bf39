"""Find the part of a value that cannot be pickled, and its address."""

from __future__ import annotations

import functools
import inspect
import pickle
import reprlib
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from parawrap.launch._private_names import REGISTERED_BY_MODULES

__all__ = ["RefusedError", "find_unpicklable"]

_MOST_STEPS = 50  # levels of nesting; deeper paths are useless in a message
_ATOMS = (str, bytes, int, float, complex, bool, type(None))
_PLACES = ("the result", "the function")

Part = tuple[Any, str]


class RefusedError(pickle.PicklingError):
    """Raised for an object that must not be sent as a whole, so that its parts do not matter."""

    def __init__(self, value: object, why: str) -> None:
        super().__init__(why)
        self.place = id(value)  # not the value: its memory would stay as long as the exception


def find_unpicklable(
    value: Any, address: str, refusal: Callable[[Any], Exception | None]
) -> tuple[str, Any, Exception | None]:
    """Return the address of the innermost part that cannot be pickled, the part itself, and its exception.

    If `address` is empty, the keys of `value` are addresses.

    >>> import threading
    >>> refusal = lambda value: None if value == 1 else TypeError()
    >>> place, _, _ = find_unpicklable({"steps": [1, threading.Lock()]}, "args[0]", refusal)
    >>> place
    "args[0]['steps'][1]"
    """
    reason: Exception | None = None
    seen = {id(value)}
    for _ in range(_MOST_STEPS):
        if isinstance(reason, RefusedError) and reason.place == id(value):
            break
        for part, place in _parts(value, address):
            if id(part) not in seen and not isinstance(part, _ATOMS) and (found := refusal(part)) is not None:
                value, address, reason = part, place, found
                seen.add(id(part))
                break
        else:
            break
    return address, value, reason


def _parts(value: Any, address: str) -> Iterator[Part]:
    """Yield the parts that pickling this value would pickle, as far as they are accessible."""
    if isinstance(value, Mapping):
        for key, part in list(value.items()):
            yield part, _within(address, f"[{reprlib.repr(key)}]") if address else str(key)
            yield key, f"the key {reprlib.repr(key)} of {address}"
    elif isinstance(value, (list, tuple)):
        for i, part in enumerate(value):
            yield part, _within(address, f"[{i}]")
    elif isinstance(value, (set, frozenset)):
        for part in value:
            yield part, f"a member of {address}"
    elif isinstance(value, types.MethodType):
        yield value.__self__, _within(address, ".__self__")
        yield value.__func__, _within(address, ".__func__")
    elif isinstance(value, types.FunctionType):
        yield from _parts_of_function(value, address)
    elif isinstance(value, types.ModuleType):  # a module that cannot be imported is pickled by value
        for name, part in list(vars(value).items()):
            yield part, _within(address, f".{name}")
    if isinstance(value, functools.partial):
        yield value.func, _within(address, ".func")
        yield value.args, _within(address, ".args")
        yield value.keywords, _within(address, ".keywords")
    elif isinstance(value, type):
        for name, part in list(vars(value).items()):
            yield part, _within(address, f".{name}")
    elif not isinstance(value, types.FunctionType):
        yield from _parts_of_reduction(value, address)


def _within(address: str, step: str) -> str:
    """Append a step to an address. If the address is a phrase, put the step in front: ``.x of the state of ...``."""
    first, of, rest = address.partition(" of the ")
    if of and first.startswith(("[", ".")):
        return f"{first}{step}{of}{rest}"
    is_phrase = address.startswith(("the ", "a member ", "an argument ")) and not address.startswith(_PLACES)
    return f"{step} of {address}" if is_phrase else address + step


def _parts_of_function(function: types.FunctionType, address: str) -> Iterator[Part]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield cell.cell_contents, f"the variable {name!r} captured by {address}"
        except ValueError:  # an unassigned variable
            continue
    for name in _names_in(function.__code__):
        if name in function.__globals__:
            yield function.__globals__[name], f"the global {name!r} used by {address}"
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.default is not parameter.empty:
            yield parameter.default, f"the default of {address}'s parameter {name!r}"
    for name, part in vars(function).items():
        yield part, _within(address, f".{name}")


def _names_in(code: types.CodeType) -> set[str]:
    """Return the names that a function's code looks up, including its inner functions."""
    inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return set(code.co_names).union(*(_names_in(each) for each in inner))


def _parts_of_reduction(value: Any, address: str) -> Iterator[Part]:
    """Yield the parts of a value's ``__reduce_ex__``."""
    try:
        reduction = value.__reduce_ex__(4)
    except Exception:  # noqa: BLE001 (the value itself cannot be pickled, so it is the innermost part)
        return
    if isinstance(reduction, str):
        return
    _, arguments, state, items, pairs = (*reduction, *[None] * 3)[:5]
    for part in arguments or ():
        if isinstance(part, dict) and part.keys() == getattr(value, "__dict__", {}).keys():
            yield from _parts_of_state(part, address)
        elif part is not type(value):
            yield part, f"an argument that makes {address}"
    for each in state if isinstance(state, tuple) else (state,):
        yield from _parts_of_state(each, address)
    for i, part in enumerate(items or ()):
        yield part, _within(address, f"[{i}]")
    for key, part in pairs or ():
        yield part, _within(address, f"[{reprlib.repr(key)}]")


def _parts_of_state(state: Any, address: str) -> Iterator[Part]:
    if not isinstance(state, dict):
        yield state, f"the state of {address}"
        return
    for name, part in state.items():
        if name in REGISTERED_BY_MODULES and isinstance(part, dict):
            for child, value in part.items():
                yield value, _within(address, f"[{child}]" if child.isdecimal() else f".{child}")
        else:
            yield part, _within(address, f".{name}")
