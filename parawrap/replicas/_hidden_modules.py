"""Modules that code reaches without the target holding them: globals, class attributes, closures of methods.

Every lane would run the original of such a module, so they are refused.
"""

from __future__ import annotations

import dis
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from parawrap.errors import ReplicaError
from parawrap.replicas._parts import Kind
from parawrap.replicas._survey import Survey

__all__ = ["names_of_globals", "refuse_hidden"]

_CURE = "every lane would use the same one. Make it an attribute of the model, or an argument of functools.partial"
_NOT_CALLED = frozenset({"__init__", "__new__", "__init_subclass__", "__setstate__", "__deepcopy__"})
_LIBRARIES = frozenset({"torch", "torchvision", "transformers", "timm", "parawrap"})


def refuse_hidden(survey: Survey) -> None:
    """Refuse functions and classes of a target that reach modules with tensors in ways that cannot be copied.

    Raises:
        ReplicaError: If there is one. The message names the function or class and the module.
    """
    known: set[type] = set()
    for node in survey.nodes.values():
        if node.kind is Kind.FUNCTION and _is_of_user(node.value):
            _refuse_globals(node.value, node.path, follows=True)
        elif node.kind in (Kind.INSTANCE, Kind.MODULE):
            known.update(type(node.value).__mro__)
    for cls in known:
        if not _is_of_library(cls.__module__):
            _refuse_class(cls)


def _refuse_class(cls: type) -> None:
    for name, value in list(vars(cls).items()):
        if _has_tensors(value):
            msg = f"the class attribute {cls.__qualname__}.{name} is a {_name(value)}: {_CURE}"
            raise ReplicaError(msg)
        for function in _functions(value) if name not in _NOT_CALLED else ():
            _refuse_globals(function, function.__qualname__, follows=False)  # methods call too much to follow
            for free, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
                for held in _find_held(_content(cell)):
                    msg = f"{function.__qualname__} captures {free!r}, which holds a {_name(held)}: {_CURE}"
                    raise ReplicaError(msg)


def _refuse_globals(function: types.FunctionType, place: str, *, follows: bool) -> None:
    """Refuse modules among the globals of a function; if it `follows`, also those of the functions that it calls."""
    seen = {function}
    waiting = [(function, place)]
    while waiting:
        each, place = waiting.pop()
        for name, value in _globals_of(each):
            if not isinstance(value, types.FunctionType):
                held = _find_held(value)[0]
                msg = f"{place or each.__qualname__} uses the global {name!r}, which holds a {_name(held)}: {_CURE}"
                raise ReplicaError(msg)
            if follows and value not in seen:
                seen.add(value)
                waiting.append((value, value.__qualname__))


def _globals_of(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the globals that a function reads, if they hold modules or are functions of the user's."""
    for code in _codes(function.__code__):
        found = {name: function.__globals__.get(name) for name in code.co_names}
        found = {name: value for name, value in found.items() if _find_held(value) or _is_of_user(value)}
        loaded = _find_loaded_globals(code) if found else set()  # names of attributes are among co_names too
        for name in found.keys() & loaded:
            yield name, found[name]


def names_of_globals(code: types.CodeType) -> set[str]:
    """Return the names of the globals that code reads, also in its inner functions and classes."""
    return {name for each in _codes(code) for name in _find_loaded_globals(each)}


def _find_loaded_globals(code: types.CodeType) -> set[str]:
    return {step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}


def _is_of_user(value: Any) -> bool:
    return isinstance(value, types.FunctionType) and not _is_of_library(value.__module__)


def _is_of_library(module: str | None) -> bool:
    root = (module or "").partition(".")[0]
    return root in _LIBRARIES or root in sys.stdlib_module_names - {"__main__"}


def _name(value: Any) -> str:
    return type(value).__name__


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _functions(value: Any) -> Iterable[types.FunctionType]:
    """The functions behind an entry of a class: of a method, a static method, a property."""
    found = [value.fget, value.fset] if isinstance(value, property) else [getattr(value, "__func__", value)]
    return [each for each in found if isinstance(each, types.FunctionType)]


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _find_held(value: Any) -> list[Any]:
    """The modules with tensors that a value is, or that it holds if it is a container."""
    if isinstance(value, dict):
        return [each for each in value.values() if _has_tensors(each)]
    if isinstance(value, list | tuple | set):
        return [each for each in value if _has_tensors(each)]
    return [value] if _has_tensors(value) else []


def _has_tensors(value: Any) -> bool:
    if not isinstance(value, torch.nn.Module):
        return False
    return next(value.parameters(), None) is not None or next(value.buffers(), None) is not None
