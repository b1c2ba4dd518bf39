"""The code that a call of a model leads to: what it reads outside of the model, and whether it may write shared weights."""

from __future__ import annotations

import dis
import random
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from parawrap.engine.holdings import ABSENT, read_slot
from parawrap.errors import ReplicaError

_LIBRARIES = frozenset({"torch", "torchvision", "transformers", "timm", "parawrap"})
_WRITERS = frozenset({"data", "set_"})  # attributes through which code may write a parameter without a new version
_CURE = "every lane would use the same one. Make it an attribute of the model, or an argument of functools.partial"


def may_write_weights(
    classes: Iterable[type],
    functions: Sequence[types.FunctionType],
    methods: Iterable[str],
    paths: Mapping[int, str],
) -> bool:
    """Read the code that a call leads to. Return True if it names ``data`` or ``set_``: it may write shared weights.

    `classes` are those of the objects in the model, `functions` what these hold, `methods` the methods that are called, and
    `paths` the paths of functions by their id. Methods are followed by their names, and functions by the globals that name
    them.

    Raises:
        ReplicaError: If code of the user's finds modules outside of the model.
    """
    by_name: dict[str, list[types.FunctionType]] = {}
    for cls in classes:
        for name, value in [*vars(cls).items()] if not _is_of_library(cls.__module__) else ():
            _refuse_held(f"the class attribute {cls.__qualname__}.{name}", value)
            by_name.setdefault(name, []).extend(_functions(value))
    called = [each for name in ("forward", "__call__", *methods) for each in by_name.get(name, ())]
    waiting = [*called, *functions]
    seen, own, writes = set(waiting), set(functions), False
    while waiting:
        function = waiting.pop()
        place = paths.get(id(function)) or function.__qualname__
        outside = [(f"{place} uses the global {name!r}", value) for name, value in _read_globals(function)]
        called = [value for _, value in outside if isinstance(value, types.FunctionType)]
        if function not in own:  # lanes have their own closures of those
            outside += [(f"{place} captures {name!r}", value) for name, value in captured(function)]
        for what, value in outside if not _is_of_library(function.__module__) else ():
            _refuse_held(what, value)
        for code in _codes(function.__code__):
            writes = writes or not _WRITERS.isdisjoint(code.co_names)
            called += [each for name in code.co_names for each in by_name.get(name, ())]
        waiting += set(called) - seen
        seen.update(called)
    return writes


def captured(function: types.FunctionType) -> list[tuple[str, Any]]:
    """Return what a function holds: its closure, its defaults, and its attributes."""
    cells = zip(function.__code__.co_freevars, map(read_slot, function.__closure__ or ()), strict=True)
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    held = [*cells, *(("a default", part) for part in defaults), *vars(function).items()]
    return [(name, part) for name, part in held if part is not ABSENT]


def is_generator(value: Any) -> bool:
    """True for a generator of random numbers, of torch, Python, or numpy."""
    return isinstance(value, (torch.Generator, random.Random)) or type(value).__module__.startswith("numpy.random")


def draws_from_generator(values: Sequence[Any]) -> bool:
    """True if a value is a generator of random numbers, or a function that holds one."""
    held = (part for value in values if isinstance(value, types.FunctionType) for _, part in captured(value))
    return any(map(is_generator, chain(values, held)))


def _refuse_held(what: str, value: Any) -> None:
    """Refuse a value that is a module with tensors, or a container that holds one."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple, set)) else [value]
    for held in parts:
        if isinstance(held, torch.nn.Module) and next(chain(held.parameters(), held.buffers()), None) is not None:
            msg = f"{what}, which holds a {type(held).__name__}: {_CURE}"
            raise ReplicaError(msg)


def _read_globals(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the globals that a function reads, if they hold modules or are functions of the user's."""
    for code in _codes(function.__code__):
        found = {name: value for name in code.co_names if _is_followed(value := function.__globals__.get(name))}
        loaded = _find_loaded_globals(code) if found else set()  # names of attributes are among co_names too
        for name in found.keys() & loaded:
            yield name, found[name]


def _is_followed(value: Any) -> bool:
    if isinstance(value, types.FunctionType):
        return not _is_of_library(value.__module__)
    return isinstance(value, (torch.nn.Module, dict, list, tuple, set))


def names_of_globals(code: types.CodeType) -> set[str]:
    """Return the names of the globals that code reads, also in its inner functions and classes."""
    return {name for each in _codes(code) for name in _find_loaded_globals(each)}


def _find_loaded_globals(code: types.CodeType) -> set[str]:
    return {step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _functions(value: Any) -> list[types.FunctionType]:
    """Return the functions behind an entry of a class: of a method, a static method, a property."""
    found = [value.fget, value.fset] if isinstance(value, property) else [getattr(value, "__func__", value)]
    return [each for each in found if isinstance(each, types.FunctionType)]


def _is_of_library(module: str | None) -> bool:
    root = (module or "").partition(".")[0]
    return root in _LIBRARIES or root in sys.stdlib_module_names - {"__main__"}
