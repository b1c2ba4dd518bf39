"""The parts of an object: which ones `copy.deepcopy` copies with it, and how its copy gets another one."""

from __future__ import annotations

import contextlib
import copyreg
import functools
import gc
import re
import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from copy import copy as shallow_copy
from enum import Enum, auto
from typing import Any

import torch

from parawrap.replicas._private_names import (
    COMPILED_FROM,
    NOT_CALLED,
    children_of,
    is_compiled_function,
    is_compiled_module,
)
from parawrap.replicas._torchscript import fill_script, tensors_of_script

__all__ = [
    "CopyOf",
    "Kind",
    "Part",
    "attributes_of",
    "fill_function",
    "is_native",
    "is_shared",
    "kind_of",
    "parts_of",
    "rebuild",
    "references_of",
    "replace_part",
    "slots_of",
]

Part = tuple[Any, Any]
"""A key, and the part that the object holds under it."""
CopyOf = Callable[[Any], Any]


class Kind(Enum):
    """How objects of a class hold their parts."""

    __hash__ = object.__hash__  # that of Enum is slow

    ATOM = auto()  # has no parts; every lane has the same one
    TENSOR = auto()
    MODULE = auto()
    COMPILED = auto()  # a module that torch.compile returned
    SCRIPT = auto()  # a scripted module, with all that it holds
    DICT = auto()
    LIST = auto()
    SET = auto()
    WEAK_DICT = auto()
    TUPLE = auto()
    METHOD = auto()
    BUILTIN = auto()  # a bound method of C
    PARTIAL = auto()
    CACHED = auto()  # by functools.lru_cache
    FUNCTION = auto()
    CELL = auto()
    WEAK = auto()
    INSTANCE = auto()


FIXED = frozenset({Kind.TUPLE, Kind.METHOD, Kind.BUILTIN, Kind.PARTIAL, Kind.CACHED, Kind.WEAK})
"""Objects that are made from their parts and never change."""

_KINDS: dict[Any, Kind] = {
    **dict.fromkeys((object, type(None), bool, complex, range, slice, type(...), type(NotImplemented)), Kind.ATOM),
    **dict.fromkeys(
        (property, re.Pattern, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size), Kind.ATOM
    ),
    **dict.fromkeys((types.CodeType, types.GenericAlias, types.UnionType, types.WrapperDescriptorType), Kind.ATOM),
    **dict.fromkeys((types.MethodDescriptorType, types.ClassMethodDescriptorType, types.GetSetDescriptorType), Kind.ATOM),
    types.FunctionType: Kind.FUNCTION,
    types.CellType: Kind.CELL,
    types.MethodType: Kind.METHOD,
    types.BuiltinFunctionType: Kind.BUILTIN,
    type(functools.lru_cache(len)): Kind.CACHED,
    weakref.ProxyType: Kind.WEAK,
    weakref.CallableProxyType: Kind.WEAK,
}
_BY_BASE: tuple[tuple[Any, Kind], ...] = (
    (torch.jit.ScriptModule, Kind.SCRIPT),
    (torch.nn.Module, Kind.MODULE),
    (torch.Tensor, Kind.TENSOR),
    ((type, Enum, str, bytes, int, float, types.ModuleType, torch.Generator), Kind.ATOM),
    (dict, Kind.DICT),
    ((list, deque), Kind.LIST),
    (set, Kind.SET),
    ((tuple, frozenset), Kind.TUPLE),
    ((weakref.WeakKeyDictionary, weakref.WeakValueDictionary), Kind.WEAK_DICT),
    (weakref.ref, Kind.WEAK),
    (functools.partial, Kind.PARTIAL),
)
# The parts of a graph of torch.fx lead to the whole graph, and no call reads them.
_OF_GRAPHS = {("torch.fx.graph", "Graph"), ("torch.fx.node", "SurveyNode")}
# Modules of the standard library with classes that hold data. Objects of its other classes do something: they are shared.
_OF_DATA = frozenset({"abc", "argparse", "builtins", "collections", "contextlib", "dataclasses", "typing", "types"})
# An OrderedDict could have attributes, and in practice has none.
_WITHOUT_ATTRIBUTES = frozenset({dict, OrderedDict, list, deque, set, tuple})
_slots: dict[type, tuple[tuple[str, Any], ...]] = {}


def kind_of(cls: type) -> Kind:
    """Return how objects of a class hold their parts."""
    if cls not in _KINDS:
        if (cls.__module__, cls.__qualname__) in _OF_GRAPHS:
            found = Kind.ATOM
        elif is_compiled_module(cls):
            found = Kind.COMPILED
        else:
            found = next((kind for base, kind in _BY_BASE if issubclass(cls, base)), Kind.INSTANCE)
        _KINDS[cls] = found
    return _KINDS[cls]


def slots_of(cls: type) -> tuple[tuple[str, Any], ...]:
    """Return the names and descriptors of the slots of a Python class."""
    if cls not in _slots:
        own = (vars(base).items() for base in cls.__mro__ if "__slots__" in vars(base))
        _slots[cls] = tuple(part for items in own for part in items if type(part[1]) is types.MemberDescriptorType)
    return _slots[cls]


def attributes_of(value: Any) -> list[Part]:
    """Return the attributes of an instance, in its ``__dict__`` and in its slots."""
    if type(value) in _WITHOUT_ATTRIBUTES:
        return []
    own = getattr(value, "__dict__", None)
    found: list[Part] = [*own.items()] if isinstance(own, dict) and own is not value else []
    for name, slot in slots_of(type(value)):
        with contextlib.suppress(AttributeError):
            found.append((name, slot.__get__(value)))
    return found


def parts_of(value: Any, kind: Kind) -> Sequence[Part]:
    """Return the parts that `copy.deepcopy` copies with an object."""
    match kind:
        case Kind.MODULE:
            return _parts_of_module(value)
        case Kind.COMPILED:
            return [*children_of(value).items(), *(part for part in vars(value).items() if part[0].endswith("_hooks"))]
        case Kind.SCRIPT:
            return [*tensors_of_script(value)]
        case Kind.DICT | Kind.WEAK_DICT:
            pairs = [*(dict.items(value) if kind is Kind.DICT else value.items())]
            return [*pairs, *((key, key) for key, _ in pairs if type(key) is not str), *attributes_of(value)]
        case Kind.LIST | Kind.TUPLE | Kind.SET:
            return [*enumerate(value), *attributes_of(value)]
        case Kind.METHOD | Kind.BUILTIN:
            return (("__self__", value.__self__),)
        case Kind.PARTIAL:
            arguments = [(f"args[{index}]", part) for index, part in enumerate(value.args)]
            return [("func", value.func), *arguments, *value.keywords.items(), *attributes_of(value)]
        case Kind.CACHED:
            return (("__wrapped__", value.__wrapped__),)
        case Kind.INSTANCE:
            return _parts_of_instance(value)
        case _:
            return ()


def references_of(value: Any, kind: Kind, *, shared: bool = False) -> Iterable[Part]:
    """Return the parts that an object refers to. They may be the user's: they are copied only if they hold the model."""
    match kind:
        case Kind.FUNCTION if is_compiled_function(value):
            return ((COMPILED_FROM, getattr(value, COMPILED_FROM)),)
        case Kind.FUNCTION:
            cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            defaults = [*enumerate(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).items()]
            return [*cells, *defaults, *vars(value).items()]
        case Kind.CELL:
            with contextlib.suppress(ValueError):  # an empty cell
                return [(None, value.cell_contents)]
        case Kind.METHOD:
            return (("__func__", value.__func__),)
        case Kind.WEAK:
            return [(None, part) for part in _referents(value)]
        case Kind.INSTANCE if shared:
            if not is_native(value):
                return attributes_of(value)
            return [(None, part) for part in gc.get_referents(value)] if gc.is_tracked(value) else ()
    return ()


def is_shared(value: Any) -> bool:
    """True for an instance that every lane uses, unless it leads to the model: a lock, a logger, a sentinel, an array."""
    cls = type(value)
    modules = [base.__module__ for base in cls.__mro__]
    is_service = any(each == _OPERATORS or each.partition(".")[0] in _SERVICES for each in modules)
    if is_service or is_native(value) or _is_singleton(value):
        return True
    has_state = _is_plain(cls) or hasattr(value, "__dict__") or bool(slots_of(cls))
    return not has_state and not _parts_of_instance(value)


def is_native(value: Any) -> bool:
    """True for an instance that `copy.deepcopy` cannot copy. Only the garbage collector finds its parts."""
    if hasattr(type(value), "__deepcopy__"):
        return False
    try:
        value.__reduce_ex__(4)
    except Exception:  # noqa: BLE001  # code of the user's
        return True
    return False


def replace_part(value: Any, kind: Kind, copy: Any, part: Any, new: Any, copy_of: CopyOf) -> bool:
    """Put `new` wherever the copy of an object has the copy of `part`. Return False if the copy cannot change."""
    found = False
    match kind:
        case Kind.SCRIPT:
            fill_script(value, copy, copy_of)
            return True
        case Kind.DICT:
            set_item: Any = OrderedDict.__setitem__ if isinstance(copy, OrderedDict) else dict.__setitem__
            for key in [key for key, each in dict.items(value) if each is part]:
                set_item(copy, key if type(key) is str else copy_of(key), new)
                found = True
        case Kind.LIST:
            for index in [index for index, each in enumerate(value) if each is part]:
                copy[index] = new
                found = True
        case Kind.SET:
            set.clear(copy)
            set.update(copy, map(copy_of, value))
            return True
    own = getattr(value, "__dict__", None)
    names = [name for name, each in own.items() if each is part] if isinstance(own, dict) and own is not value else []
    if names:
        vars(copy).update(dict.fromkeys(names, new))
    for name, slot in slots_of(type(value)):
        if getattr(value, name, None) is part:
            slot.__set__(copy, new)
            found = True
    return found or bool(names)


def rebuild(value: Any, kind: Kind, copy_of: CopyOf) -> Any:
    """Return a copy that is made from the copies of the parts of an object; of a function, before `fill_function`."""
    match kind:
        case Kind.FUNCTION if is_compiled_function(value):
            return copy_of(getattr(value, COMPILED_FROM))  # lanes run the function itself, uncompiled
        case Kind.FUNCTION:
            cells = None if value.__closure__ is None else tuple(map(copy_of, value.__closure__))
            return types.FunctionType(value.__code__, value.__globals__, value.__name__, None, cells)
        case Kind.METHOD:
            return types.MethodType(copy_of(value.__func__), copy_of(value.__self__))
        case Kind.BUILTIN:
            return getattr(copy_of(value.__self__), value.__name__)
        case Kind.CACHED:
            return functools.lru_cache(**value.cache_parameters())(copy_of(value.__wrapped__))
        case Kind.WEAK:
            (referent,) = _referents(value)
            if type(value) is weakref.WeakMethod:
                method: Any = value()
                return weakref.WeakMethod(types.MethodType(method.__func__, copy_of(referent)))
            return (weakref.ref if isinstance(value, weakref.ref) else weakref.proxy)(copy_of(referent))
        case Kind.PARTIAL:
            keywords = {name: copy_of(part) for name, part in value.keywords.items()}
            made = type(value)(copy_of(value.func), *map(copy_of, value.args), **keywords)
        case _:
            base: Any = tuple if isinstance(value, tuple) else frozenset
            made = base.__new__(type(value), map(copy_of, value))
    for name, part in attributes_of(value):
        object.__setattr__(made, name, copy_of(part))
    return made


def fill_function(value: types.FunctionType, copy: types.FunctionType, copy_of: CopyOf) -> None:
    """Give the copy of a function its defaults and attributes."""
    defaults, keywords = value.__defaults__, value.__kwdefaults__
    copy.__defaults__ = None if defaults is None else tuple(map(copy_of, defaults))
    copy.__kwdefaults__ = None if keywords is None else {name: copy_of(part) for name, part in keywords.items()}
    copy.__qualname__, copy.__module__, copy.__doc__ = value.__qualname__, value.__module__, value.__doc__
    copy.__annotations__ = value.__annotations__
    vars(copy).update({name: copy_of(part) for name, part in vars(value).items()})


_SERVICES = sys.stdlib_module_names - _OF_DATA - {"__main__"}
_OPERATORS = "torch._ops"  # `copy.copy` of a torch.ops operator recurses for minutes


def _referents(value: Any) -> list[Any]:
    """Return what a weak reference, a weak method, or a weak proxy refers to; nothing if that is gone."""
    if not isinstance(value, weakref.ref):
        try:
            return [value.__reduce_ex__.__self__]  # a bound method shows the object behind a proxy
        except ReferenceError:
            return []
    found = value()
    return [] if found is None else [found.__self__ if type(value) is weakref.WeakMethod else found]


def _parts_of_module(module: torch.nn.Module) -> list[Part]:
    """Return the attributes of a module that calls read, and that its copy gets."""
    cls = type(module)
    state: Any = None
    if cls.__getstate__ is not torch.nn.Module.__getstate__ and not hasattr(cls, "__deepcopy__"):
        state = module.__getstate__()
    found = [*state.items()] if isinstance(state, dict) else attributes_of(module)
    return [part for part in found if part[0] not in NOT_CALLED]


def _parts_of_instance(value: Any) -> list[Part]:
    """Return the attributes of an instance, and the parts that its class gives to `copy.deepcopy`."""
    cls = type(value)
    if _is_plain(cls) or hasattr(cls, "__deepcopy__"):
        return attributes_of(value)
    reduced: Any = value.__reduce_ex__(4)
    if isinstance(reduced, str):
        return []
    arguments, state, items, pairs = [*reduced[1:], None, None, None][:4]
    found: list[Part] = [(None, part) for part in (*arguments, *(items or ()))]
    is_opaque = isinstance(state, tuple) and hasattr(cls, "__setstate__")  # else a tuple has the attributes and the slots
    if is_opaque:
        found += [(None, each) for each in state]
        state = None
    for each in (*(state if isinstance(state, tuple) else (state,)), dict(pairs or ())):
        found += each.items() if isinstance(each, dict) else [(None, each)]
    return [(key, part) for key, part in found if kind_of(type(part)) is not Kind.ATOM]


def _is_plain(cls: type) -> bool:
    """True if objects of the class are pickled as their attributes."""
    inherited = all(getattr(cls, name) is getattr(object, name) for name in ("__reduce_ex__", "__reduce__", "__getstate__"))
    return inherited and not hasattr(cls, "__deepcopy__") and cls not in copyreg.dispatch_table


def _is_singleton(value: Any) -> bool:
    """True for an attribute of its class, an object that is its own copy, and a named global."""
    cls = type(value)
    if any(each is value for each in vars(cls).values()):
        return True
    if hasattr(cls, "__copy__") or not _is_plain(cls):
        try:
            return shallow_copy(value) is value
        except Exception:  # noqa: BLE001  # code of the user's
            return False
    module = sys.modules.get(cls.__module__)
    is_named_only = all(type(part) is str for _, part in attributes_of(value))
    return is_named_only and module is not None and any(each is value for each in vars(module).values())
