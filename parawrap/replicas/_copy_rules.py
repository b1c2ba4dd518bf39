"""How objects of each class are opened and copied. `content_of` finds the rule for an object.

A rule yields the parts of an object. Parts that belong to it are copied with it. Parts that it only refers to (the cells
of a closure, the arguments of a partial) are the user's: they are copied only if they lead to the model.
"""

from __future__ import annotations

import functools
import gc
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Any

from parawrap.replicas._attributes import CopyOf, Part, attributes_of, clear_attributes, fill_attributes
from parawrap.replicas._private_names import COMPILED_CALL, COMPILED_FROM, IS_REPLICA, NOT_CALLED, recompiled
from parawrap.replicas._torchscript import fill_script, new_script, tensors_of_script

__all__ = [
    "CachedFunction",
    "Cell",
    "Compiled",
    "CompiledFunction",
    "Content",
    "Dict",
    "Function",
    "Instance",
    "List",
    "Method",
    "Module",
    "Namespace",
    "Opaque",
    "Partial",
    "Proxy",
    "Script",
    "Service",
    "Set",
    "TensorContent",
    "Tuple",
    "Weak",
    "WeakMethod",
    "WeakProxy",
    "WeakReference",
]

_NOTHING: tuple[Part, ...] = ()
_EMPTY = object()
_PLAIN = (dict, OrderedDict)


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
        return attributes_of(value)

    def new(self, value: Any, copy_of: CopyOf) -> Any:
        return object.__new__(type(value))

    def fill(self, value: Any, copy: Any, copy_of: CopyOf) -> None:
        fill_attributes(value, copy, copy_of)

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
        return attributes_of(value)


class Module(Instance):
    """A module. Its copy is marked like the replicas of torch, and compiled code of the original is left out.

    The class attribute `_left_out_of_replicas` names attributes that copies start without.
    """

    def parts(self, value: Any) -> Iterable[Part]:
        left_out = getattr(type(value), "_left_out_of_replicas", ())
        return [part for part in attributes_of(value) if part[0] not in NOT_CALLED and part[0] not in left_out]

    def fill(self, value: Any, copy: Any, copy_of: CopyOf) -> None:
        fill_attributes(value, copy, copy_of)
        own = vars(copy)
        own[IS_REPLICA] = True
        for name in getattr(type(value), "_left_out_of_replicas", ()):
            own.pop(name, None)
        if own.get(COMPILED_CALL) is not None:
            own[COMPILED_CALL] = None


class Compiled(Module):
    """The result of ``torch.compile(module)``. The copy compiles the copy of the module, once that is filled."""

    turn = 5

    def fill(self, value: Any, copy: Any, copy_of: CopyOf) -> None:
        recompiled(copy, value, copy_of)
        hooks = {name: copy_of(part) for name, part in vars(value).items() if name.endswith("_hooks")}
        vars(copy).update(hooks, **{IS_REPLICA: True})


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
        return [*dict.items(value), *attributes_of(value)] if type(value) not in _PLAIN else value.items()

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
        fill_attributes(value, copy, copy_of)


class List(Content):
    """A list or a deque."""

    is_own = True

    def parts(self, value: Any) -> Iterable[Part]:
        return [*enumerate(value), *attributes_of(value)]

    def new(self, value: Any, copy_of: CopyOf) -> Any:
        if not isinstance(value, deque):
            return list.__new__(type(value))
        copy = deque.__new__(type(value))
        deque.__init__(copy, (), value.maxlen)
        return copy

    def fill(self, value: Any, copy: Any, copy_of: CopyOf) -> None:
        kind: Any = deque if isinstance(value, deque) else list
        kind.extend(copy, map(copy_of, value))
        fill_attributes(value, copy, copy_of)

    def put_back(self, copy: Any, parts: Sequence[Any]) -> None:
        kind: Any = deque if isinstance(copy, deque) else list
        kind.clear(copy)
        kind.extend(copy, parts)


class Set(Content):
    """A set."""

    is_own = True
    turn = 2

    def parts(self, value: Any) -> Iterable[Part]:
        return [*((item, item) for item in value), *attributes_of(value)]

    def new(self, value: Any, copy_of: CopyOf) -> Any:
        return set.__new__(type(value))

    def fill(self, value: Any, copy: Any, copy_of: CopyOf) -> None:
        set.update(copy, map(copy_of, value))
        fill_attributes(value, copy, copy_of)

    def put_back(self, copy: Any, parts: Sequence[Any]) -> None:
        set.clear(copy)
        set.update(copy, parts[: len(parts) - len(attributes_of(copy))])


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
        return [*enumerate(value), *attributes_of(value)]

    def new(self, value: Any, copy_of: CopyOf) -> Any:
        items = map(copy_of, value)
        try:
            kind: Any = tuple if isinstance(value, tuple) else frozenset
            made = kind.__new__(type(value), items)
        except TypeError:  # a structseq of C
            return type(value)(map(copy_of, value))
        fill_attributes(value, made, copy_of)
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
        return (("func", value.func), *attributes_of(value))

    def references(self, value: Any) -> Iterable[Part]:
        return (*((f"args[{index}]", part) for index, part in enumerate(value.args)), *value.keywords.items())

    def new(self, value: Any, copy_of: CopyOf) -> Any:
        keywords = {name: copy_of(part) for name, part in value.keywords.items()}
        copy = type(value)(copy_of(value.func), *map(copy_of, value.args), **keywords)
        fill_attributes(value, copy, copy_of)
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
        return ((COMPILED_FROM, getattr(value, COMPILED_FROM)),)

    def new(self, value: Any, copy_of: CopyOf) -> Any:
        return copy_of(getattr(value, COMPILED_FROM))

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


def contents_of_cell(cell: types.CellType) -> Any:
    """Return what a cell holds, or a marker for an empty cell."""
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY
