"""The code that a call of a model leads to, and its writes into objects that lanes share.

The compiled code of each function has the names of attributes and globals. An attribute such as
``data`` shows a possible write. A global shows which further functions are called, and which
modules outside of the model are used.
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
# Instructions of Python's compiled code
_LOADS_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")
_LOADS_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME")

# Globals in the code of these libraries lead to no module of the user's, so they are not read
_LIBRARIES = ("torch", "torchvision", "transformers", "timm")
_CURE = (
    "every lane would use the same one. Make it an attribute of the model, or an argument of "
    "functools.partial"
)


class SharedWrites(NamedTuple):
    """The possible writes of a model's code into the parameters, which lanes share.

    Attributes:
        weights: True if the code may write parameters, and leave their versions alone.
        gradients: True if the code may write gradients, or flags of parameters.
    """

    weights: bool
    gradients: bool


def find_writes(
    classes: Iterable[type],
    functions: Sequence[types.FunctionType],
    methods: Iterable[str],
    paths: Mapping[int, str],
) -> SharedWrites:
    """Read the code that a call leads to, and return its possible writes into the parameters.

    `classes` are those of the objects in the model, `functions` the functions in the model,
    `methods` the methods that calls enter besides forward, and `paths` the paths of functions by
    their id.

    Raises:
        ReplicaError: If code of the user's uses modules outside of the model.
    """
    methods_of_name = _find_methods(classes)
    waiting: list[types.FunctionType] = []
    for name in ("forward", "__call__", *methods):
        waiting += methods_of_name.get(name, ())
    waiting += functions
    seen = set(waiting)
    in_model = set(functions)
    weights = gradients = False
    while waiting:
        function = waiting.pop()
        where = paths.get(id(function)) or function.__qualname__
        read = [*_read_globals(function)]
        captured = list_captured(function)  # of a decorated method, the function itself
        if not _is_of_library(function.__module__):
            for name, value in read:
                _refuse_module(f"{where} uses the global {name!r}", value)
            if function not in in_model:  # each lane has its own copies of these closures
                for name, value in captured:
                    _refuse_module(f"{where} captures {name!r}", value)
        values = [value for _, value in (*read, *captured)]
        called = [value for value in values if isinstance(value, types.FunctionType)]
        for code in _walk_code(function.__code__):
            weights = weights or not _WRITERS.isdisjoint(code.co_names)
            gradients = gradients or _writes_gradients(code)
            # Code does not show the class of an object, so all methods of the name count as called
            for name in code.co_names:
                called += methods_of_name.get(name, ())
        waiting += set(called) - seen
        seen.update(called)
    return SharedWrites(weights, gradients)


def _find_methods(classes: Iterable[type]) -> dict[str, list[types.FunctionType]]:
    """Return the methods of the user's classes by their names, also those of properties.

    Raises:
        ReplicaError: If a class holds a module.
    """
    found: dict[str, list[types.FunctionType]] = {}
    for cls in classes:
        if _is_of_library(cls.__module__):
            continue
        # A list, here and below, is made in one step: other threads may write
        for name, value in [*vars(cls).items()]:
            _refuse_module(f"the class attribute {cls.__qualname__}.{name}", value)
            found.setdefault(name, []).extend(_unwrap_functions(value))
    return found


def list_captured(function: types.FunctionType) -> list[tuple[str, Any]]:
    """Return the names and the values in the closure, the defaults, and the attributes."""
    contents = map(read_slot, function.__closure__ or ())
    captured = [*zip(function.__code__.co_freevars, contents, strict=True)]
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    captured += [("a default", value) for value in defaults]
    captured += vars(function).items()
    # ABSENT stands for a captured name that has no value yet
    return [(name, value) for name, value in captured if value is not ABSENT]


def is_generator(value: Any) -> bool:
    """True for a generator of random numbers, of torch, Python, or numpy."""
    if isinstance(value, (torch.Generator, random.Random)):
        return True
    # By name: numpy may not be installed
    return type(value).__module__.startswith("numpy.random")


def draws_from_generator(values: Sequence[Any]) -> bool:
    """True if a value is a generator of random numbers, or a function that holds one."""
    if any(map(is_generator, values)):
        return True
    functions = [value for value in values if isinstance(value, types.FunctionType)]
    captured = chain.from_iterable(map(list_captured, functions))
    return any(is_generator(value) for _, value in captured)


def _writes_gradients(code: types.CodeType) -> bool:
    """True if code uses an attribute that writes gradients, or flags of parameters."""
    if _LEARNERS.isdisjoint(code.co_names):
        return False
    last_name = None  # that was read; of an attribute, in most cases the name of the object
    for step in dis.get_instructions(code):
        name = step.argval
        if step.opname in _LOADS_ATTRIBUTE:
            is_functional = name == "grad" and last_name in _FUNCTIONAL
            only_reads = is_functional or name == "requires_grad"
            if name in _LEARNERS and not only_reads:
                return True
            last_name = name
        elif step.opname in _LOADS_GLOBAL:
            if name == "backward":  # of torch.autograd
                return True
            last_name = name
        elif step.opname in ("STORE_ATTR", "DELETE_ATTR") and name in _LEARNERS:
            return True
    return False


def _refuse_module(what: str, value: Any) -> None:
    """Refuse a value that is a module with tensors, or a container that holds one.

    `what` begins the message: the code, and how it leads to the value.
    """
    parts: Iterable[Any] = [value]
    if isinstance(value, dict):
        parts = [*value.values()]
    elif isinstance(value, (list, tuple, set)):
        parts = [*value]
    for part in parts:
        if not isinstance(part, torch.nn.Module):
            continue
        first_tensor = next(chain(part.parameters(), part.buffers()), None)
        if first_tensor is not None:
            msg = f"{what}, which holds a {type(part).__name__}: {_CURE}"
            raise ReplicaError(msg)


def _read_globals(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the globals that a function reads: containers, modules, and functions of users."""
    for code in _walk_code(function.__code__):
        values = {name: function.__globals__.get(name) for name in code.co_names}
        found = {name: value for name, value in values.items() if _is_followed(value)}
        if not found:
            continue  # so most code is not disassembled, which takes long
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
    found = [getattr(value, "__func__", value)]  # of a static method, or a class method
    if isinstance(value, property):
        found = [value.fget, value.fset]
    elif isinstance(value, (cached_property, partialmethod)):
        found = [value.func]
    return [each for each in found if isinstance(each, types.FunctionType)]


class _Folders(NamedTuple):
    """The folders of parawrap, of the standard library, and of installed packages."""

    parawrap: Path
    standard: set[Path]
    installed: set[Path]


@cache
def _find_folders() -> _Folders:
    paths = sysconfig.get_paths()
    standard = {Path(paths[name]).resolve() for name in ("stdlib", "platstdlib")}
    installed = {Path(paths[name]).resolve() for name in ("purelib", "platlib")}
    installed.add(Path(torch.__file__).resolve().parents[1])
    return _Folders(Path(__file__).resolve().parents[1], standard, installed)


@cache
def _is_library_file(file: str) -> bool:
    """True for a file of the standard library, of parawrap, or of a package in `_LIBRARIES`."""
    path = Path(file).resolve()
    folders = _find_folders()
    if path.is_relative_to(folders.parawrap):
        return True
    # Before the standard library: its folder may hold the folder of the installed packages
    for folder in folders.installed:
        if path.is_relative_to(folder):
            package = path.relative_to(folder).parts[0]
            return package.removesuffix(".py") in _LIBRARIES
    return any(map(path.is_relative_to, folders.standard))


def _is_of_library(name: str | None) -> bool:
    """True if the Python module of this name belongs to a library.

    The path of its file decides, since a file of the user's may have the name of a library.
    """
    if name == "__main__":
        return False
    module = sys.modules.get(name or "")
    file = getattr(module, "__file__", None)
    if file is None:  # compiled into Python, or no longer imported
        return module is not None and name in sys.builtin_module_names
    return _is_library_file(file)
