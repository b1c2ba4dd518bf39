"""Pickle what decorators make of the script's functions by value. pickle would send them by name, or not at all.

Ranks do not run the script, so they do not find its definitions by name.
"""

from __future__ import annotations

import enum
import functools
import sys
import types
import typing
from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

import torch

from parawrap.launch.messages._find_unpicklable import RefusedError
from parawrap.launch.messages._importable_modules import is_importable

__all__ = ["is_found_by_name", "reduce_class", "reduce_definition"]

_CACHED: Any = type(functools.cache(len))
_DISPATCHING = functools.singledispatch(len).__code__  # type: ignore[attr-defined]
_COMPILED = "compile_wrapper"  # the name of the function that torch.compile returns
_TYPE_PARAMETERS: Any = (typing.ParamSpec, typing.TypeVarTuple)
_OPERATOR: Any = vars(torch.library)["CustomOpDef"]  # its stubs lack the class
_BASES, _NAMESPACE = 2, 3  # positions in the arguments of cloudpickle's constructor of classes
_CURE = "define it in a module, and import it from there, or make it inside the function that is launched"


def is_found_by_name(value: Any) -> bool:
    """True if other processes find this definition under its name in a module."""
    name = getattr(value, "__module__", None)
    if not isinstance(name, str) or name == "__main__" or name not in sys.modules or not is_importable(name):
        return False
    found: Any = sys.modules[name]
    for part in str(getattr(value, "__qualname__", None) or getattr(value, "__name__", None)).split("."):
        found = getattr(found, part, None)
    return found is value


def reduce_definition(value: Any) -> Any:
    """Return the pickle reduction of a decorated function or a type alias by value. None for any other object.

    Raises:
        RefusedError: If it can be made only by running its module.
    """
    if isinstance(value, functools.cached_property):
        state = {name: part for name, part in vars(value).items() if name != "lock"}
        return _make_cached_property, (type(value),), state
    if isinstance(value, functools.singledispatchmethod):
        return _make_dispatching_method, (value.func, value.dispatcher)
    if not _is_decorated(value) or is_found_by_name(value):
        return None
    if type(value) is _CACHED:
        return _make_cached, (value.__wrapped__, value.cache_parameters())
    if isinstance(value, typing.NewType):
        return typing.NewType, (value.__name__, value.__supertype__), dict(vars(value))
    if isinstance(value, _TYPE_PARAMETERS):
        return type(value), (value.__name__,)
    if isinstance(value, types.FunctionType) and value.__code__ is _DISPATCHING:
        return _make_dispatching, (value.__wrapped__, dict(value.registry))  # type: ignore[attr-defined]
    if (name := _name_in_modules(value)) is not None:
        return resolve_name, (name,)
    msg = f"torch has made it for this process only: {_CURE}"
    raise RefusedError(value, msg)


def reduce_class(cls: type, reduced: Any) -> Any:
    """Return cloudpickle's reduction of a class by value, so that the rank gets an equal class.

    cloudpickle leaves out ``__qualname__``, and making the class runs ``__init_subclass__`` of its bases again, whose
    effects on the script's objects are pickled too.
    """
    if isinstance(cls, enum.EnumMeta) or not (isinstance(reduced, tuple) and len(reduced[1]) > _NAMESPACE):
        return reduced
    make, arguments, *state = reduced
    arguments[_NAMESPACE]["__qualname__"] = cls.__qualname__
    return _make_class, (make, *arguments), *state


def _make_class(make: Callable[..., type], *arguments: Any) -> type:
    """Make a class without the ``__init_subclass__`` that a base of the script defines."""
    bases = arguments[_BASES]
    resolved = types.resolve_bases(bases)  # of generic classes, named tuples, and typed dicts
    owner: Any = next((each for base in resolved for each in base.__mro__ if "__init_subclass__" in vars(each)), object)
    if owner.__module__ != "__main__":
        return make(*arguments)
    own = vars(owner)["__init_subclass__"]
    type.__setattr__(owner, "__init_subclass__", classmethod(lambda cls, **_: super(owner, cls).__init_subclass__()))
    try:
        return make(*arguments)
    finally:
        type.__setattr__(owner, "__init_subclass__", own)


def _is_decorated(value: Any) -> bool:
    if isinstance(value, types.FunctionType):
        code = value.__code__
        return code is _DISPATCHING or (code.co_name == _COMPILED and "_dynamo" in code.co_filename)
    return isinstance(value, _KINDS)


_KINDS = (
    _CACHED,
    typing.NewType,
    *_TYPE_PARAMETERS,
    _OPERATOR,
    torch.jit.ScriptFunction,
)


def _name_in_modules(value: Any) -> str | None:
    """Return the name under which a module has an object that does not have its name. None if only the script has it."""
    for module in list(sys.modules.values()):
        if type(module) is types.ModuleType and module.__name__ != "__main__":
            for name, found in list(vars(module).items()):
                if found is value and is_importable(module.__name__):
                    return f"{module.__name__}:{name}"
    return None


def _make_cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _make_cached_property(cls: type[functools.cached_property[Any]]) -> functools.cached_property[Any]:
    made = cls.__new__(cls)
    functools.cached_property.__init__(made, len)  # makes a lock; the state replaces the function
    return made


def _make_dispatching_method(function: Any, dispatcher: Any) -> functools.singledispatchmethod[Any]:
    """Make a method again: since Python 3.13 it has a cache of weak references, which cannot be pickled."""
    made: functools.singledispatchmethod[Any] = functools.singledispatchmethod(function)
    made.dispatcher = dispatcher
    return made


def _make_dispatching(function: Callable[..., Any], registry: dict[type, Callable[..., Any]]) -> Any:
    made = functools.singledispatch(function)
    for cls, implementation in registry.items():
        made.register(cls, implementation)
    return made
