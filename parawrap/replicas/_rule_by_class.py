"""Find the rule for an object by its class. Atoms have no rule: they have no parts, and every lane has the same ones."""

from __future__ import annotations

import enum
import functools
import logging
import re
import sys
import types
import weakref
from collections import deque
from copy import copy as shallow_copy
from typing import Any

import torch

from parawrap.replicas._attributes import attributes_of, slots_of
from parawrap.replicas._copy_rules import (
    CachedFunction,
    Cell,
    Compiled,
    CompiledFunction,
    Content,
    Dict,
    Function,
    Instance,
    List,
    Method,
    Module,
    Namespace,
    Opaque,
    Partial,
    Proxy,
    Script,
    Service,
    Set,
    TensorContent,
    Tuple,
    Weak,
    WeakMethod,
    WeakProxy,
    WeakReference,
)
from parawrap.replicas._private_names import is_compiled_function, is_compiled_module

__all__ = ["ATOMS", "content_of", "is_sentinel"]

ATOMS = frozenset(
    {
        *(
            object,
            type(None),
            bool,
            int,
            float,
            complex,
            str,
            bytes,
            type,
            range,
            slice,
            type(...),
            type(NotImplemented),
            re.Pattern,
        ),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
        *(types.ModuleType, types.CodeType, types.GenericAlias, types.UnionType, types.WrapperDescriptorType),
        *(types.MethodDescriptorType, types.ClassMethodDescriptorType, types.GetSetDescriptorType),
    }
)
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: defined by a class statement, or by a C extension that copies one

_OPAQUE, _INSTANCE, _SERVICE, _MODULE = Opaque(), Instance(), Service(), Module()
_FUNCTION, _COMPILED_FUNCTION, _METHOD = Function(), CompiledFunction(), Method()
_COMPILED = Compiled()
_BY_BASE: tuple[tuple[type | tuple[type, ...], Content | None], ...] = (
    (torch.jit.ScriptModule, Script()),
    (torch.nn.Module, _MODULE),
    (torch.Tensor, TensorContent()),
    ((type, enum.Enum, str, bytes, int, float, types.ModuleType, logging.Logger), None),
    (dict, Dict()),
    ((list, deque), List()),
    (set, Set()),
    ((tuple, frozenset), Tuple()),
    ((weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet), Weak()),
    ((types.MethodType, types.MethodWrapperType), _METHOD),
    (functools.partial, Partial()),
    (types.CellType, Cell()),
    (types.MappingProxyType, Proxy()),
    (types.SimpleNamespace, Namespace()),
)
_BY_CLASS: dict[Any, Content | None] = {
    **dict.fromkeys(ATOMS),
    weakref.ref: WeakReference(),
    weakref.WeakMethod: WeakMethod(),
    weakref.ProxyType: WeakProxy(),
    weakref.CallableProxyType: WeakProxy(),
    type(functools.lru_cache(len)): CachedFunction(),
}
# Their instances describe code, and lead to the whole of it. No call reads them.
_DESCRIBE_CODE = {("torch.fx.graph", "Graph"), ("torch.fx.node", "Node")}


def content_of(value: Any) -> Content | None:
    """Return the rule for an object; None for an atom."""
    cls = type(value)
    if cls is types.FunctionType:
        return _COMPILED_FUNCTION if is_compiled_function(value) else _FUNCTION
    if cls is types.BuiltinFunctionType:
        return None if value.__self__ is None or isinstance(value.__self__, types.ModuleType | type) else _METHOD
    try:
        return _BY_CLASS[cls]
    except KeyError:
        _BY_CLASS[cls] = found = _content_of_class(cls)
        return found


def _content_of_class(cls: type) -> Content | None:
    if (cls.__module__, cls.__qualname__) in _DESCRIBE_CODE:
        return None
    if is_compiled_module(cls):
        return _COMPILED
    for bases, content in _BY_BASE:
        if issubclass(cls, bases):
            return content
    if not all(base is object or base.__flags__ & _HEAP_TYPE for base in cls.__mro__) or not _has_python_state(cls):
        return _OPAQUE
    return _SERVICE if any(map(_is_service, cls.__mro__)) else _INSTANCE


def is_sentinel(value: Any) -> bool:
    """True for a singleton: an attribute of its class, an object that is its own copy, or a named global."""
    cls = type(value)
    if not isinstance(content_of(value), Instance) or isinstance(value, torch.nn.Module):
        return False
    if any(each is value for each in vars(cls).values()):
        return True
    if any(getattr(cls, name, None) is not getattr(object, name, None) for name in _COPYING):
        try:
            return shallow_copy(value) is value
        except Exception:  # noqa: BLE001  # code of the user's
            return False
    module = sys.modules.get(cls.__module__)
    is_named_only = all(type(part) is str for _, part in attributes_of(value))
    return is_named_only and module is not None and any(each is value for each in vars(module).values())


_COPYING = ("__copy__", "__deepcopy__", "__reduce__", "__reduce_ex__")
_NEUTRAL = frozenset({"abc", "builtins", "collections", "contextlib", "dataclasses", "typing", "types"})


def _is_service(cls: type) -> bool:
    root = cls.__module__.partition(".")[0]
    return root in sys.stdlib_module_names and root not in _NEUTRAL and root != "__main__"


def _has_python_state(cls: type) -> bool:
    """True if all state of the instances lies in their ``__dict__`` and their slots."""
    pointers = bool(cls.__dictoffset__) + bool(cls.__weakrefoffset__)
    return cls.__basicsize__ <= object.__basicsize__ + 8 * (len(slots_of(cls)) + pointers)
