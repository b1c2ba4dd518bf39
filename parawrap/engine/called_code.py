"""The code that a call of a model leads to: what it reads outside of the model, and what it writes.

Code is read by the names in it, as compiled: attributes for what it writes, globals for what it
calls.
"""

from __future__ import annotations

import dis
import random
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property, partialmethod
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch

from parawrap.engine.places import read_slot
from parawrap.errors import ReplicaError
from parawrap.tree import ABSENT

# Attributes through which code may write a parameter, and leave its version alone
_WRITERS = frozenset({"data", "set_"})
# Attributes through which code writes gradients and flags of parameters, which lanes share
_LEARNERS = frozenset({"grad", "backward", "zero_grad", "requires_grad_", "requires_grad"})
# torch.autograd.grad and torch.func.grad return gradients, and write none
_FUNCTIONAL = frozenset({"autograd", "func"})
_LOADS_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")
_LOADS_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME")

# Code of these libraries finds no module of the user's by a global. Their forward is read like any
# other
_LIBRARIES = ("torch", "torchvision", "transformers", "timm")
_CURE = (
    "every lane would use the same one. Make it an attribute of the model, or an argument of "
    "functools.partial"
)


class Writes(NamedTuple):
    """What the code of a model may write besides its own buffers and attributes.

    Attributes:
        weights: True if it may write parameters without a new version.
        gradients: True if it may write gradients, or flags of parameters.
    """

    weights: bool
    gradients: bool


def find_writes(
    classes: Iterable[type],
    functions: Sequence[types.FunctionType],
    methods: Iterable[str],
    paths: Mapping[int, str],
) -> Writes:
    """Read the code that a call leads to, and return what it may write into what lanes share.

    `classes` are those of the objects in the model, `functions` what these hold, `methods` the
    methods that are called, and `paths` the paths of functions by their id. Methods are followed by
    their names, and functions by the globals that name them.

    Raises:
        ReplicaError: If code of the user's finds modules outside of the model.
    """
    by_name = _find_methods(classes)
    waiting: list[types.FunctionType] = []
    for name in ("forward", "__call__", *methods):
        waiting += by_name.get(name, ())
    waiting += functions
    seen = set(waiting)
    own = set(functions)
    weights = gradients = False
    while waiting:
        function = waiting.pop()
        place = paths.get(id(function)) or function.__qualname__
        read = [*_read_globals(function)]
        held = list_captured(function)  # by a decorator, the function that it wraps
        if not _is_of_library(function.__module__):
            for name, value in read:
                _refuse_held(f"{place} uses the global {name!r}", value)
            if function not in own:  # lanes have their own closures of those
                for name, value in held:
                    _refuse_held(f"{place} captures {name!r}", value)
        called = [value for _, value in (*read, *held) if isinstance(value, types.FunctionType)]
        for code in _walk_code(function.__code__):
            weights = weights or not _WRITERS.isdisjoint(code.co_names)
            gradients = gradients or _writes_gradients(code)
            # The class of an object is not known here, so all methods of the name are followed
            for name in code.co_names:
                called += by_name.get(name, ())
        waiting += set(called) - seen
        seen.update(called)
    return Writes(weights, gradients)


def _find_methods(classes: Iterable[type]) -> dict[str, list[types.FunctionType]]:
    """Return the methods of the user's classes, by their names.

    Raises:
        ReplicaError: If a class holds a module.
    """
    found: dict[str, list[types.FunctionType]] = {}
    for cls in classes:
        if _is_of_library(cls.__module__):
            continue
        # A list, here and below, is made in one step: other threads may write
        for name, value in [*vars(cls).items()]:
            _refuse_held(f"the class attribute {cls.__qualname__}.{name}", value)
            found.setdefault(name, []).extend(_unwrap_functions(value))
    return found


def list_captured(function: types.FunctionType) -> list[tuple[str, Any]]:
    """Return what a function holds: its closure, its defaults, and its attributes."""
    contents = map(read_slot, function.__closure__ or ())  # ABSENT for a name without a value yet
    held = [*zip(function.__code__.co_freevars, contents, strict=True)]
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    held += [("a default", part) for part in defaults]
    held += vars(function).items()
    return [(name, part) for name, part in held if part is not ABSENT]


def is_generator(value: Any) -> bool:
    """True for a generator of random numbers, of torch, Python, or numpy."""
    if isinstance(value, (torch.Generator, random.Random)):
        return True
    return type(value).__module__.startswith("numpy.random")  # which may not be installed


def draws_from_generator(values: Sequence[Any]) -> bool:
    """True if a value is a generator of random numbers, or a function that holds one."""
    if any(map(is_generator, values)):
        return True
    functions = [value for value in values if isinstance(value, types.FunctionType)]
    held = chain.from_iterable(map(list_captured, functions))
    return any(is_generator(part) for _, part in held)


def _writes_gradients(code: types.CodeType) -> bool:
    """True if code uses an attribute that writes gradients, or flags of parameters."""
    if _LEARNERS.isdisjoint(code.co_names):
        return False
    before = None  # the name that was read last: in most cases, that of the object
    for step in dis.get_instructions(code):
        name = step.argval
        if step.opname in _LOADS_ATTRIBUTE:
            # A read of the flag `requires_grad` is not a write
            is_functional = name == "grad" and before in _FUNCTIONAL
            if name in _LEARNERS and name != "requires_grad" and not is_functional:
                return True
            before = name
        elif step.opname in _LOADS_GLOBAL:
            if name == "backward":  # of torch.autograd
                return True
            before = name
        elif step.opname in ("STORE_ATTR", "DELETE_ATTR") and name in _LEARNERS:
            return True
    return False


def _refuse_held(what: str, value: Any) -> None:
    """Refuse a value that is a module with tensors, or a container that holds one."""
    parts: Iterable[Any] = [value]
    if isinstance(value, dict):
        parts = [*value.values()]
    elif isinstance(value, (list, tuple, set)):
        parts = [*value]
    for held in parts:
        if not isinstance(held, torch.nn.Module):
            continue
        if next(chain(held.parameters(), held.buffers()), None) is not None:
            msg = f"{what}, which holds a {type(held).__name__}: {_CURE}"
            raise ReplicaError(msg)


def _read_globals(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the globals that a function reads: containers, modules, and functions of users."""
    for code in _walk_code(function.__code__):
        named = {name: function.__globals__.get(name) for name in code.co_names}
        found = {name: value for name, value in named.items() if _is_followed(value)}
        if not found:
            continue  # most code, which is not disassembled
        # Names of attributes are among co_names too
        for name in found.keys() & _find_loaded_globals(code):
            yield name, found[name]


def _is_followed(value: Any) -> bool:
    """True for a global that may be, hold, or find a module."""
    if isinstance(value, types.FunctionType):
        return not _is_of_library(value.__module__)
    return isinstance(value, (torch.nn.Module, dict, list, tuple, set))


def names_of_globals(code: types.CodeType) -> set[str]:
    """Return the names of the globals that code reads, also in its inner functions and classes."""
    return {name for each in _walk_code(code) for name in _find_loaded_globals(each)}


def _find_loaded_globals(code: types.CodeType) -> set[str]:
    return {step.argval for step in dis.get_instructions(code) if step.opname in _LOADS_GLOBAL}


def _walk_code(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code of a function, and that of its inner functions and classes."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _walk_code(constant)


def _unwrap_functions(value: Any) -> list[types.FunctionType]:
    """Return the functions behind an entry of a class, such as a method or a property."""
    found = [getattr(value, "__func__", value)]
    if isinstance(value, property):
        found = [value.fget, value.fset]
    elif isinstance(value, (cached_property, partialmethod)):
        found = [value.func]
    return [each for each in found if isinstance(each, types.FunctionType)]


@cache
def _folders_of_libraries() -> tuple[Path, tuple[Path, ...], tuple[Path, ...]]:
    """Return the folders of parawrap, of the standard library, and of installed packages."""
    paths = sysconfig.get_paths()
    standard = {Path(paths[name]).resolve() for name in ("stdlib", "platstdlib")}
    installed = {Path(paths[name]).resolve() for name in ("purelib", "platlib")}
    installed.add(Path(torch.__file__).resolve().parents[1])
    return Path(__file__).resolve().parents[1], tuple(standard), tuple(installed)


@cache
def _is_library_file(file: str) -> bool:
    """True for a file of the standard library, of parawrap, or of a listed package."""
    path = Path(file).resolve()
    parawrap, standard, installed = _folders_of_libraries()
    if path.is_relative_to(parawrap):
        return True
    for folder in installed:
        if path.is_relative_to(folder):
            return path.relative_to(folder).parts[0].removesuffix(".py") in _LIBRARIES
    return any(map(path.is_relative_to, standard))


def _is_of_library(name: str | None) -> bool:
    """True for a module of a library.

    A file of the user's with the name of a library is not one: the path decides.
    """
    if name == "__main__":
        return False
    module = sys.modules.get(name or "")
    file = getattr(module, "__file__", None)
    if file is None:  # compiled into Python, or no longer imported
        return module is not None and name in sys.builtin_module_names
    return _is_library_file(file)
