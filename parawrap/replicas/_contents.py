"""How objects of each class are opened and copied. `content_of` finds the rule for an object; atoms have none.

A rule yields the parts of an object. Parts that belong to it are copied with it. Parts that it only refers to (the cells
of a closure, the arguments of a partial) are the user's: they are copied only if they lead to the model.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import gc
import logging
import re
import sys
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from copy import copy as shallow_copy
from typing import Any

import torch

from parawrap.replicas._script import fill_script, new_script, tensors_of_script

__all__ = [
    "ATOMS",
    "Cell",
    "Compiled",
    "Content",
    "Dict",
    "Function",
    "Instance",
    "List",
    "Module",
    "Opaque",
    "Partial",
    "Script",
    "Set",
    "TensorContent",
    "Weak",
    "clear_attributes",
    "content_of",
    "has_slots",
    "is_sentinel",
]

Part = tuple[Any, Any]
"""A key, and what the object holds under it."""
CopyOf = Callable[[Any], Any]

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
_NOTHING: tuple[Part, ...] = ()
# Dictionaries of a module that calls do not read. They stay shared.
_NOT_CALLED = frozenset(
    {
        *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
        "_non_persistent_buffers_set",
    }
)
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: defined by a class statement, or by a C extension that copies one
_EMPTY = object()


class Content:
    """The rule for the objects of some classes. This one is for objects that own no parts."""

    is_own = False  # an object that the model owns is copied even if nothing in it is
    is_fixed = False  # the copy is made from the copies of its parts, and never changes
    turn = 1  # when copies are made and filled: instances first, since keys may be hashed by their attributes

    def parts(self, value: Any) -> Iterable[Part]:
        """Yield the parts that belong to the object."""
        return _NOTHING

    def references(self, value: Any) -> Iterable[Part]:
        """Yield the parts that the object refers to and that may be the user's."""
        return _NOTHING

    def new(self, value: Any, copy_of: CopyOf) -> Any:
        """Return the copy, empty unless the rule is fixed."""
        raise NotImplementedError

    def fill(self, value: Any, copy: Any, copy_of: CopyOf) -> None:
        """Put the copies of the parts into an empty copy."""

    def put_back(self, copy: Any, parts: Sequence[Any]) -> None:
        """Make these the parts of a copy again. Of an instance they are names and values of attributes, in turn."""

    def place(self, key: Any) -> str:
        """Return how Python code names the part with that key."""
        return f"[{key!r}]"


class Opaque(Content):
    """An object that only its garbage collector hooks can look into: an iterator, an object of a C class."""

    def references(self, value: Any) -> Iterable[Part]:
        return ((None, part) for part in gc.get_referents(value)) if gc.is_tracked(value) else _NOTHING

    def place(self, key: Any) -> str:
        return ""


class TensorContent(Content):
    """A tensor: the lane's :class:`Tensors` copy it."""

    is_own = True


class Instance(Content):
    """An instance of a Python class: its ``__dict__`` and its slots."""

    is_own = True
    turn = 0

    def parts(self, value: Any) -> Iterable[Part]:
        return _attributes(value)

    def new(self, value: Any, copy_of: CopyOf) -> Any:
        return object.__new__(type(value))

    def fill(self, value: Any, copy: Any, copy_of: CopyOf) -> None:
        _fill_attributes(value, copy, copy_of)

    def put_back(self, copy: Any, parts: Sequence[Any]) -> None:
        clear_attributes(copy)
        for name, value in zip(parts[::2], parts[1::2], strict=True):
            object.__setattr__(copy, name, value)

    def place(self, key: Any) -> str:
        return f".{key}"


class Namespace(Instance):
    """A ``types.SimpleNamespace``."""

    def new(self, value: Any, copy_of: CopyOf) -> Any:
        return types.SimpleNamespace.__new__(type(value))


class Service(Instance):
    """An instance of a class of the standard library: a logger, a lock, a thread."""

    is_own = False

    def parts(self, value: Any) -> Iterable[Part]:
        return _NOTHING

    def references(self, value: Any) -> Iterable[Part]:
        return _attributes(value)


class Module(Instance):
    """A module. Its copy is marked like the replicas of torch, and compiled code of the original is left out."""

    def parts(self, value: Any) -> Iterable[Part]:
        return [part for part in _attributes(value) if part[0] not in _NOT_CALLED]

    def fill(self, value: Any, copy: Any, copy_of: CopyOf) -> None:
        _fill_attributes(value, copy, copy_of)
        own = vars(copy)
        own["_is_replica"] = True
        if own.get("_compiled_call_impl") is not None:
            own["_compiled_call_impl"] = None


class Compiled(Module):
    """The result of ``torch.compile(module)``. The copy compiles the copy of the module, once that is filled."""

    turn = 5

    def fill(self, value: Any, copy: Any, copy_of: CopyOf) -> None:
        type(value).__init__(copy, copy_of(value._orig_mod), value.dynamo_ctx)
        hooks = {name: copy_of(part) for name, part in vars(value).items() if name.endswith("_hooks")}
        vars(copy).update(hooks, _is_replica=True)


class Script(Content):
    """A scripted module, with all that it holds: its attributes live in C++."""

    is_own = True
    turn = 3

    def parts(self, value: Any) -> Iterable[Part]:
        return tensors_of_script(value)

    def new(self, value: Any, copy_of: CopyOf) -> Any:
        return new_script(value)

    def fill(self, value: Any, copy: Any, copy_of: CopyOf) -> None:
        fill_script(value, copy, copy_of)

    def place(self, key: Any) -> str:
        return f".{key}"


class Dict(Content):
    """A dict of any class. Keys lead to copies only if they are parts of the model."""

    is_own = True
    turn = 2

    def parts(self, value: Any) -> Iterable[Part]:
        return [*dict.items(value), *_attributes(value)] if type(value) not in _PLAIN else value.items()

    def references(self, value: Any) -> Iterable[Part]:
        return ((key, key) for key in dict.keys(value) if type(key) is not str)

    def new(self, value: Any, copy_of: CopyOf) -> Any:
        kind = OrderedDict if isinstance(value, OrderedDict) else defaultdict if isinstance(value, defaultdict) else dict
        made = kind.__new__(type(value))
        if getattr(value, "__dict__", None) is value:  # its items are its attributes
            made.__dict__ = made
        return made

    def fill(self, value: Any, copy: Any, copy_of: CopyOf) -> None:
        put = OrderedDict.__setitem__ if isinstance(value, OrderedDict) else dict.__setitem__
        for key, part in dict.items(value):
            put(copy, key if type(key) is str else copy_of(key), copy_of(part))
        if isinstance(value, defaultdict):
            copy.default_factory = copy_of(value.default_factory)
        _fill_attributes(value, copy, copy_of)


class List(Content):
    """A list or a deque."""

    is_own = True

    def parts(self, value: Any) -> Iterable[Part]:
        return [*enumerate(value), *_attributes(value)]

    def new(self, value: Any, copy_of: CopyOf) -> Any:
        if not isinstance(value, deque):
            return list.__new__(type(value))
        copy = deque.__new__(type(value))
        deque.__init__(copy, (), value.maxlen)
        return copy

    def fill(self, value: Any, copy: Any, copy_of: CopyOf) -> None:
        kind: Any = deque if isinstance(value, deque) else list
        kind.extend(copy, map(copy_of, value))
        _fill_attributes(value, copy, copy_of)

    def put_back(self, copy: Any, parts: Sequence[Any]) -> None:
        kind: Any = deque if isinstance(copy, deque) else list
        kind.clear(copy)
        kind.extend(copy, parts)


class Set(Content):
    """A set."""

    is_own = True
    turn = 2

    def parts(self, value: Any) -> Iterable[Part]:
        return [*((item, item) for item in value), *_attributes(value)]

    def new(self, value: Any, copy_of: CopyOf) -> Any:
        return set.__new__(type(value))

    def fill(self, value: Any, copy: Any, copy_of: CopyOf) -> None:
        set.update(copy, map(copy_of, value))
        _fill_attributes(value, copy, copy_of)

    def put_back(self, copy: Any, parts: Sequence[Any]) -> None:
        set.clear(copy)
        set.update(copy, parts[: len(parts) - len(_attributes(copy))])


class Weak(Content):
    """A weak dictionary or a weak set of the standard library."""

    is_own = True
    turn = 2

    def parts(self, value: Any) -> Iterable[Part]:
        return value.items() if hasattr(value, "items") else ((item, item) for item in value)

    def references(self, value: Any) -> Iterable[Part]:
        return ((key, key) for key in value)

    def new(self, value: Any, copy_of: CopyOf) -> Any:
        return type(value)()

    def fill(self, value: Any, copy: Any, copy_of: CopyOf) -> None:
        if hasattr(value, "items"):
            copy.update({copy_of(key): copy_of(part) for key, part in value.items()})
        else:
            copy.update(map(copy_of, value))


class Tuple(Content):
    """A tuple, a named tuple, or a frozen set."""

    is_fixed = True

    def parts(self, value: Any) -> Iterable[Part]:
        return [*enumerate(value), *_attributes(value)]

    def new(self, value: Any, copy_of: CopyOf) -> Any:
        items = map(copy_of, value)
        try:
            kind: Any = tuple if isinstance(value, tuple) else frozenset
            made = kind.__new__(type(value), items)
        except TypeError:  # a structseq of C
            return type(value)(map(copy_of, value))
        _fill_attributes(value, made, copy_of)
        return made


class Method(Content):
    """A bound method, of Python or of C."""

    is_fixed = True

    def parts(self, value: Any) -> Iterable[Part]:
        return (("__self__", value.__self__),)

    def new(self, value: Any, copy_of: CopyOf) -> Any:
        owner = copy_of(value.__self__)
        if isinstance(value, types.MethodType):
            return types.MethodType(value.__func__, owner)
        return getattr(owner, value.__name__)

    def place(self, key: Any) -> str:
        return f".{key}"


class Partial(Content):
    """A partial. Its function belongs to it; its arguments may be the user's."""

    is_fixed = True

    def parts(self, value: Any) -> Iterable[Part]:
        return (("func", value.func), *_attributes(value))

    def references(self, value: Any) -> Iterable[Part]:
        return (*((f"args[{index}]", part) for index, part in enumerate(value.args)), *value.keywords.items())

    def new(self, value: Any, copy_of: CopyOf) -> Any:
        keywords = {name: copy_of(part) for name, part in value.keywords.items()}
        copy = type(value)(copy_of(value.func), *map(copy_of, value.args), **keywords)
        _fill_attributes(value, copy, copy_of)
        return copy

    def place(self, key: Any) -> str:
        return f".{key}"


class Function(Content):
    """A function: its cells, defaults, and attributes may be the user's."""

    turn = 4

    def references(self, value: Any) -> Iterable[Part]:
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        defaults = [*enumerate(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).items()]
        return (*cells, *defaults, *vars(value).items())

    def new(self, value: Any, copy_of: CopyOf) -> Any:
        cells = None if value.__closure__ is None else tuple(map(copy_of, value.__closure__))
        return types.FunctionType(value.__code__, value.__globals__, value.__name__, None, cells)

    def fill(self, value: Any, copy: Any, copy_of: CopyOf) -> None:
        defaults, keywords = value.__defaults__, value.__kwdefaults__
        copy.__defaults__ = None if defaults is None else tuple(map(copy_of, defaults))
        copy.__kwdefaults__ = None if keywords is None else {name: copy_of(part) for name, part in keywords.items()}
        copy.__qualname__, copy.__module__, copy.__doc__ = value.__qualname__, value.__module__, value.__doc__
        copy.__annotations__ = value.__annotations__
        vars(copy).update({name: copy_of(part) for name, part in vars(value).items()})

    def place(self, key: Any) -> str:
        return f" captures {key!r}"


class CompiledFunction(Content):
    """The result of ``torch.compile(function)``. Lanes run the copy of the function itself, uncompiled."""

    is_fixed = True

    def parts(self, value: Any) -> Iterable[Part]:
        return (("_torchdynamo_orig_callable", value._torchdynamo_orig_callable),)

    def new(self, value: Any, copy_of: CopyOf) -> Any:
        return copy_of(value._torchdynamo_orig_callable)

    def place(self, key: Any) -> str:
        return f".{key}"


class Cell(Content):
    """The cell of a closure, which several functions may share."""

    def references(self, value: Any) -> Iterable[Part]:
        content = contents_of_cell(value)
        return _NOTHING if content is _EMPTY else ((None, content),)

    def new(self, value: Any, copy_of: CopyOf) -> Any:
        return types.CellType()

    def fill(self, value: Any, copy: Any, copy_of: CopyOf) -> None:
        content = contents_of_cell(value)
        if content is not _EMPTY:
            copy.cell_contents = copy_of(content)

    def put_back(self, copy: Any, parts: Sequence[Any]) -> None:
        (copy.cell_contents,) = parts

    def place(self, key: Any) -> str:
        return ""


class WeakReference(Content):
    """A weak reference. It is copied if what it refers to is."""

    is_fixed = True

    def parts(self, value: Any) -> Iterable[Part]:
        return ((None, value()),)

    def new(self, value: Any, copy_of: CopyOf) -> Any:
        return weakref.ref(copy_of(value()))

    def place(self, key: Any) -> str:
        return "()"


class WeakMethod(Content):
    """A weak reference to a bound method."""

    is_fixed = True

    def parts(self, value: Any) -> Iterable[Part]:
        method = value()
        return () if method is None else (("__self__", method.__self__),)

    def new(self, value: Any, copy_of: CopyOf) -> Any:
        method = value()
        return weakref.WeakMethod(types.MethodType(method.__func__, copy_of(method.__self__)))


class WeakProxy(Content):
    """A weak proxy. A bound method shows the object behind it."""

    is_fixed = True

    def parts(self, value: Any) -> Iterable[Part]:
        return ((None, value.__reduce_ex__.__self__),)

    def new(self, value: Any, copy_of: CopyOf) -> Any:
        return weakref.proxy(copy_of(value.__reduce_ex__.__self__))

    def place(self, key: Any) -> str:
        return ""


class CachedFunction(Content):
    """The result of ``functools.lru_cache``. The copy has an empty cache."""

    is_fixed = True

    def parts(self, value: Any) -> Iterable[Part]:
        return (("__wrapped__", value.__wrapped__),)

    def new(self, value: Any, copy_of: CopyOf) -> Any:
        return functools.lru_cache(**value.cache_parameters())(copy_of(value.__wrapped__))

    def place(self, key: Any) -> str:
        return f".{key}"


class Proxy(Content):
    """A read-only view of a dict."""

    is_fixed = True

    def parts(self, value: Any) -> Iterable[Part]:
        return ((None, part) for part in gc.get_referents(value))

    def new(self, value: Any, copy_of: CopyOf) -> Any:
        (whole,) = gc.get_referents(value)
        return types.MappingProxyType(copy_of(whole))

    def place(self, key: Any) -> str:
        return ""


_PLAIN = (dict, OrderedDict)
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
    functools._lru_cache_wrapper: CachedFunction(),
}
# Their instances describe code, and lead to the whole of it. No call reads them.
_DESCRIBE_CODE = {("torch.fx.graph", "Graph"), ("torch.fx.node", "Node")}


def content_of(value: Any) -> Content | None:
    """Return the rule for an object; None for an atom."""
    cls = type(value)
    if cls is types.FunctionType:
        return _COMPILED_FUNCTION if "_torchdynamo_orig_callable" in vars(value) else _FUNCTION
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
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")  # loaded by the first torch.compile
    if eval_frame is not None and issubclass(cls, eval_frame.OptimizedModule):
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
    is_named_only = all(type(part) is str for _, part in _attributes(value))
    return is_named_only and module is not None and any(each is value for each in vars(module).values())


_COPYING = ("__copy__", "__deepcopy__", "__reduce__", "__reduce_ex__")
_NEUTRAL = frozenset({"abc", "builtins", "collections", "contextlib", "dataclasses", "typing", "types"})


def _is_service(cls: type) -> bool:
    root = cls.__module__.partition(".")[0]
    return root in sys.stdlib_module_names and root not in _NEUTRAL and root != "__main__"


def _has_python_state(cls: type) -> bool:
    """True if all state of the instances lies in their ``__dict__`` and their slots."""
    pointers = bool(cls.__dictoffset__) + bool(cls.__weakrefoffset__)
    return cls.__basicsize__ <= object.__basicsize__ + 8 * (len(_slots(cls)) + pointers)


def contents_of_cell(cell: types.CellType) -> Any:
    """Return what a cell holds, or a marker for an empty cell."""
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


_SLOTS: dict[type, tuple[tuple[str, Any], ...]] = {}


def _slots(cls: type) -> tuple[tuple[str, Any], ...]:
    """The names and descriptors of the slots of a Python class."""
    if cls not in _SLOTS:
        own = (vars(base).items() for base in cls.__mro__ if "__slots__" in vars(base))
        members = types.MemberDescriptorType
        _SLOTS[cls] = tuple((name, value) for items in own for name, value in items if isinstance(value, members))
    return _SLOTS[cls]


def _attributes(value: Any) -> Sequence[Part]:
    """The attributes of an instance, in its dict and in its slots."""
    own = getattr(value, "__dict__", None)
    found: list[Part] = [*own.items()] if isinstance(own, dict) and own is not value else []
    for name, slot in _slots(type(value)):
        try:
            found.append((name, slot.__get__(value)))
        except AttributeError:
            continue
    return found


def has_slots(cls: type) -> bool:
    """True if instances keep attributes in slots."""
    return bool(_slots(cls))


def clear_attributes(value: Any) -> None:
    """Delete all attributes of an instance."""
    getattr(value, "__dict__", {}).clear()
    for _, slot in _slots(type(value)):
        with contextlib.suppress(AttributeError):
            slot.__delete__(value)


def _fill_attributes(value: Any, copy: Any, copy_of: CopyOf) -> None:
    own = getattr(value, "__dict__", None)
    if isinstance(own, dict) and own and own is not value:
        vars(copy).update({name: copy_of(part) for name, part in own.items()})
    for _, slot in _slots(type(value)):
        try:
            part = slot.__get__(value)
        except AttributeError:
            continue
        slot.__set__(copy, copy_of(part))
