"""The globals of functions that travel by value, in the launching process and in ranks that stay.

A function keeps its globals in the rank, whatever module it is in. They follow three rules:

1. A call brings the globals that its functions use, if they are bound to another object here than
   at the last call. Small lists, dicts, and sets are also brought if their contents changed. A
   deleted global is deleted in the ranks.
2. A global that a function assigned in a rank belongs to the ranks. It is not sent again until a
   function deletes it there.
3. Other objects that changed in place are not sent again.

In ranks that stay, functions of a module that ranks can import use that module there, and nothing
is sent for them. If the user registers the module with cloudpickle to go by value, they are sent as
they are here, with their globals.
"""

from __future__ import annotations

import functools
import importlib
import io
import linecache
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from operator import is_
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch

from parawrap._private_names import goes_by_name, id_of_class, names_in_code
from parawrap.errors import LaunchError
from parawrap.processes.definitions import is_generic
from parawrap.processes.packing import Packer, restore
from parawrap.processes.pickling import (
    IdentityPickler,
    ValuePickler,
    is_among,
    is_importable,
    modules_of_user,
    pack,
    received_classes,
)
from parawrap.processes.shared_memory import Block
from parawrap.tree import ABSENT, PLAIN

_MAIN = "__main__"
_IMPORTED = "import "  # begins the key of a module's globals, which the rank has by import
# bytes of a pickle; the contents of larger containers are not compared, so that calls stay fast
_LARGEST_COMPARED = 4096
# items of a container, for functions in it; a guess: a search takes 0.1 ms then
_MOST_SEARCHED = 256
_CONTAINERS = (list, dict, set)
_WRAPPERS = (
    functools.partial,
    functools.cached_property,
    functools.singledispatchmethod,
    types.MethodType,
    staticmethod,
    classmethod,
    property,
)
# their attributes
_WRAPPED = ("func", "dispatcher", "args", "keywords", "__func__", "__self__", "fget", "fset")
_LARGEST_KEPT = 4096  # bytes of a text in a closure of a function that is kept
_MOST_FUNCTIONS = 32  # that ranks keep; a guess: a loop of training and evaluation calls a few
_UNASSIGNED = types.CellType()  # equals the cell of a variable that is not assigned yet

Name = tuple[str, str]
"""The key of a function's globals, and a name in them. The key of ``__main__`` is its name."""


class PackedCall(NamedTuple):
    """A call that is ready to be sent, for `ScriptOfRank.take`.

    Attributes:
        item: A range of the block with all of the call; or the key of a function that the ranks
            keep, and the items of the arguments.
        block: The memory of the call.
        new: The globals that come with it, with their values.
        deleted: Globals that it deletes in the ranks.
        key: The key of its function, if the ranks keep it.
        function: The function and its parts, which the ranks are to keep under this key.
    """

    item: Any
    block: Block
    new: dict[Name, Any] = {}  # noqa: RUF012 (never written)
    deleted: Sequence[Name] = ()
    key: int | None = None
    function: tuple[Any, list[Any]] | None = None

    @property
    def is_news(self) -> bool:
        """False if ranks that do not run the call need nothing of it."""
        return isinstance(self.item, range)


class _KeptFunction(NamedTuple):
    """A function that the ranks keep under a key, and the parts that it had when it was sent."""

    key: int
    function: Any  # so that no other function gets its id
    parts: list[Any]


class _KeptFunctions:
    """The functions that the ranks keep, so that a later call sends only its arguments.

    Each gets a key of its own, also when it comes again: a call whose function has not arrived can
    never find another.
    """

    def __init__(self) -> None:
        self._keys = count()
        # By the id of the function, which stays alive here
        self._kept: dict[int, _KeptFunction] = {}
        self._gone: list[int] = []  # keys that the ranks may forget, and have not been told

    def key_of(self, function: Any, parts: list[Any]) -> int | None:
        """Return the key of a function, if the ranks have it as it is now."""
        kept = self._kept.get(id(function))
        if kept is None or len(parts) != len(kept.parts) or not all(map(is_, parts, kept.parts)):
            return None
        return kept.key

    def next_key(self) -> int:
        """Return a key that no function has."""
        return next(self._keys)

    def gone_with(self, function: Any) -> list[int]:
        """Return the keys that the ranks may forget if they get this function."""
        if id(function) in self._kept:
            return [*self._gone, self._kept[id(function)].key]
        if len(self._kept) >= _MOST_FUNCTIONS:
            oldest = next(iter(self._kept.values()))
            return [*self._gone, oldest.key]
        return [*self._gone]

    def note(self, key: int, function: Any, parts: list[Any]) -> None:
        """Note that the ranks get a function or have it already, and that it was called last."""
        before = self._kept.pop(id(function), None)
        if before is None and len(self._kept) >= _MOST_FUNCTIONS:
            oldest = next(iter(self._kept))  # dicts keep the order of entry, here of the last calls
            del self._kept[oldest]
        if before is None or before.key != key:
            self._gone.clear()  # a function that comes brings them
        self._kept[id(function)] = _KeptFunction(key, function, parts)

    def drop(self, function: Any) -> None:
        """Forget a function that did not reach all ranks."""
        if (before := self._kept.pop(id(function), None)) is not None:
            self._gone.append(before.key)

    def drop_all(self) -> None:
        """Forget all functions: the ranks may have them otherwise than they would be sent now."""
        self._gone += [kept.key for kept in self._kept.values()]
        self._kept.clear()


class SentScript:
    """The globals that the ranks of one launch have, as the launching process knows them.

    One thread uses it at a time.

    `imports` is True for ranks that stay.
    """

    def __init__(self, *, imports: bool = False) -> None:
        self._imports = imports
        # by id; the dicts stay, so that ids are not reused
        self._spaces: dict[int, tuple[str, dict[str, Any]]] = {}
        # the object, and the contents of a container
        self._sent: dict[Name, tuple[Any, _ContainerContents | _ModuleContents | None]] = {}
        self._owned: set[Name] = set()
        self._kept = _KeptFunctions()
        self._by_value = modules_of_user()

    def pack_call(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        bound_to: tuple[Any, ...] = (),
    ) -> PackedCall:
        """Pickle a call, with the globals that the ranks lack.

        `bound_to` is the object of a bound method.

        Raises:
            UnsendableError: If the function, an argument, or a global cannot be pickled.
        """
        self._follow_registrations()
        used = list(self._globals_used_by(function))
        deleted = [
            name
            for name, value in used
            if value is ABSENT and name in self._sent and name not in self._owned
        ]
        new = {
            name: (value, _contents_of(value))
            for name, value in used
            if value is not ABSENT and self.must_send(name, value)
        }
        parts = parts_of(function) if self._imports and not (bound_to or new or deleted) else None
        key = None
        if parts is not None:
            key = self._kept.key_of(function, parts)
            if key is not None:
                packer = Packer()
                items = packer.add(args, "args"), packer.add(kwargs, "kwargs")
                # Others may have functions or classes of the script, which need its globals
                if not any(isinstance(item, range) for item in items):
                    return PackedCall((key, *items), packer, key=key, function=(function, parts))
            key = self._kept.next_key()
        places = {
            f"the global {name!r}{'' if space == _MAIN else f' of {space}'}": (space, name)
            for space, name in new
        }
        call = {
            "places": places,
            "deleted": deleted,
            **{label: new[name][0] for label, name in places.items()},
            "the function": function,
            **({"the object": bound_to[0]} if bound_to else {}),
            "args": args,
            "kwargs": kwargs,
            "key": key,
            "gone": self._kept.gone_with(function) if parts is not None else [],
            "is_by_value": isinstance(function, types.FunctionType) and not goes_by_name(function),
            "notes": _Notes(),
        }
        packed = pack(call, make_pickler=functools.partial(_CallPickler, self, new))
        kept = None if parts is None else (function, parts)
        return PackedCall(range(packed.size), packed, new, deleted, key, kept)

    def note_sent(self, call: PackedCall) -> None:
        """Note that a call was sent, or waits for its turn. Later calls bring only what it lacks.

        No signal handler may raise in between: the ranks would lack what was noted, or get it
        twice.
        """
        if call.key is not None and call.function is not None:
            self._kept.note(call.key, *call.function)
        self._sent.update(call.new)
        for name in call.deleted:
            self._sent.pop(name, None)

    def forget(self, call: PackedCall) -> None:
        """Forget what has come with a call that did not reach all ranks: it is sent again."""
        if call.function is not None:
            self._kept.drop(call.function[0])
        for name in call.new:
            self._sent.pop(name, None)

    def note_owned(self, assigned: list[Name], deleted: list[Name]) -> None:
        """Note the globals that functions of a rank have assigned and deleted."""
        self._owned.update(assigned)
        for name in deleted:
            self._owned.discard(name)
            self._sent.pop(name, None)

    def space_of(self, globals_: dict[str, Any]) -> str:
        """Return the key of a function's globals."""
        found = self._spaces.get(id(globals_))
        if found is None:
            found = self._spaces[id(globals_)] = (self._make_key(globals_), globals_)
        return found[0]

    def _make_key(self, globals_: dict[str, Any]) -> str:
        name = str(globals_.get("__name__"))
        module = sys.modules.get(name)
        if module is not None and vars(module) is globals_:
            if name == _MAIN:
                return _MAIN
            if self._imports and is_importable(name) and not is_among(name, self._by_value):
                return _IMPORTED + name
        return f"{name} {id(globals_)}"

    def _follow_registrations(self) -> None:
        """Forget what was sent of modules that the user has registered or unregistered since.

        The ranks have imported it and would get it by value now, or the other way round.
        """
        before, now = self._by_value, modules_of_user()
        if before == now:
            return
        self._by_value = now
        for identity, (_, globals_) in list(self._spaces.items()):
            self._spaces[identity] = (self._make_key(globals_), globals_)
        for name, (value, _) in list(self._sent.items()):
            modules = [_module_of(each) for each in _definitions_in(value)]
            if any(is_among(each, before) != is_among(each, now) for each in modules):
                del self._sent[name]
        self._kept.drop_all()

    def must_send(self, name: Name, value: Any) -> bool:
        """True for a global that the ranks lack."""
        if name in self._owned or name[0].startswith(_IMPORTED):
            return False
        sent, contents = self._sent.get(name, (ABSENT, None))
        return sent is not value or (contents is not None and contents.differ_from(value))

    def _globals_used_by(self, function: Any) -> Iterator[tuple[Name, Any]]:
        """Yield the globals that a function uses, also through what travels by value with it.

        The value of a name that is not a global is `ABSENT`: it may be a builtin, or a global
        that was deleted.
        """
        seen: set[int] = set()
        todo = [function]
        while todo:
            value = todo.pop()
            if id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, types.FunctionType):
                if goes_by_name(value):
                    continue
                if is_generic(value):  # its own globals are those of functools
                    generic: Any = value
                    todo += [*generic.registry, *generic.registry.values(), generic.__wrapped__]
                    continue
                todo += [
                    cell.cell_contents for cell in value.__closure__ or () if cell != _UNASSIGNED
                ]
                todo += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
                for name in names_in_code(value.__code__):
                    part = value.__globals__.get(name, ABSENT)
                    yield (self.space_of(value.__globals__), name), part
                    todo.append(part)
            elif isinstance(value, type):
                if not goes_by_name(value):
                    todo += [*vars(value).values(), *value.__bases__, type(value)]
            elif isinstance(value, _WRAPPERS):
                todo += [getattr(value, name, None) for name in _WRAPPED]
            elif isinstance(value, (dict, list, tuple, set)):
                if len(value) <= _MOST_SEARCHED:
                    todo += value.values() if isinstance(value, dict) else value
            elif isinstance(value, torch.nn.Module):
                todo += {type(module) for module in value.modules()}
            elif not isinstance(value, (types.ModuleType, *PLAIN)):
                todo.append(type(value))
                own = [*getattr(value, "__dict__", {}).items()]
                todo += [
                    part
                    for name, part in own
                    if name == "__wrapped__" or isinstance(part, types.FunctionType)
                ]


class _ContainerContents:
    """The contents of a small container, to compare them later; of a larger one its length."""

    def __init__(self, value: Any) -> None:
        self._length = len(value)
        self._met: list[Any] = []  # alive, so that no later object has the identity of one of them
        self._read = None if self._length > _LARGEST_COMPARED else self._read_contents(value)

    def differ_from(self, value: Any) -> bool:
        """True if the container has other contents now."""
        if self._read is None or len(value) != self._length:
            return len(value) != self._length
        return bool(_ContainerContents(value)._read != self._read)

    def _read_contents(self, value: Any) -> Any:
        stream = io.BytesIO()
        try:
            IdentityPickler(stream, self._met, types.ModuleType).dump(value)
        except Exception:  # noqa: BLE001 (classes may raise anything)
            parts = [*value, *value.values()] if isinstance(value, dict) else [*value]
            self._met += parts
            return [*map(id, parts)]
        return stream.getvalue() if stream.tell() <= _LARGEST_COMPARED else None


class _ModuleContents:
    """The attributes of a module that goes by value, and of such modules among them.

    `importlib.reload` gives a module other attributes, and keeps the module.
    """

    def __init__(self, module: types.ModuleType) -> None:
        self._read = self._read_attributes(module)

    def differ_from(self, module: types.ModuleType) -> bool:
        """True if an attribute is another object now."""
        now = self._read_attributes(module)
        return len(now) != len(self._read) or not all(map(is_, now, self._read))

    def _read_attributes(self, module: types.ModuleType) -> list[Any]:
        found: list[Any] = []
        modules = {id(module): module}
        todo = [module]
        while todo:
            attributes = dict(vars(todo.pop()))  # other threads may change it
            found += [*attributes, *attributes.values()]
            for value in attributes.values():
                is_module = isinstance(value, types.ModuleType) and id(value) not in modules
                if is_module and not goes_by_name(value):
                    modules[id(value)] = value
                    todo.append(value)
        return found


def _contents_of(value: Any) -> _ContainerContents | _ModuleContents | None:
    if isinstance(value, types.ModuleType):
        return None if goes_by_name(value) else _ModuleContents(value)
    return _ContainerContents(value) if isinstance(value, _CONTAINERS) else None


def _definitions_in(value: Any) -> Iterator[Any]:
    """Yield the functions, classes, and modules that a global is, wraps, or contains."""
    seen: set[int] = set()
    todo = [value]
    while todo:
        part = todo.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, (types.FunctionType, type, types.ModuleType)):
            yield part
        elif isinstance(part, _WRAPPERS):
            todo += [getattr(part, name, None) for name in _WRAPPED]
        elif isinstance(part, (dict, list, tuple, set)):
            if len(part) <= _MOST_SEARCHED:
                todo += part.values() if isinstance(part, dict) else part
        else:
            # that of a decorated function
            todo.append(getattr(part, "__dict__", {}).get("__wrapped__"))


def _module_of(definition: Any) -> str | None:
    if isinstance(definition, types.ModuleType):
        return definition.__name__
    return getattr(definition, "__module__", None)


class _Notes:
    """Stands for what the pickler noticed. It is pickled last, as a dict.

    "main" has the functions and classes of ``__main__`` that were pickled by value. torch.save,
    all_gather_object, and other code that pickles by name finds them there. "sources" has the
    source lines of files that do not exist, so that tracebacks show notebook cells.
    """


class _Globals(dict[str, Any]):
    """Stands for the globals of a function: the rank has a dict for each key."""

    def __reduce__(self) -> Any:
        return _globals_of, (self["space"],)


class _CallPickler(ValuePickler):
    """Pickles a call. Functions that travel by value refer to their globals in the rank."""

    def __init__(
        self, script: SentScript, new: dict[Name, Any], stream: Any, buffers: list[memoryview]
    ) -> None:
        super().__init__(stream, buffers)
        self._script = script
        self._new = new
        self._notes: dict[str, dict[str, Any]] = {"main": {}, "sources": {}}

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is _Notes:
            return dict, (self._notes,)
        if isinstance(obj, types.FunctionType):
            space = self._script.space_of(obj.__globals__)
            self.globals_ref.setdefault(id(obj.__globals__), _Globals(space=space))
        reduced = super().reducer_override(obj)
        if isinstance(obj, (type, types.FunctionType)) and reduced is not NotImplemented:
            self._note(obj)
            if isinstance(obj, types.FunctionType) and not is_generic(obj):
                self._leave_out_known_globals(obj, reduced)
        return reduced

    def _leave_out_known_globals(self, function: types.FunctionType, reduced: Any) -> None:
        # cloudpickle reduces a function to a constructor, its arguments, and a state, which is the
        # attributes of the function, and its other parts by name, such as its globals
        _constructor, _arguments, (_attributes, slots), *_ = reduced
        space = self._script.space_of(function.__globals__)
        slots["__globals__"] = {
            name: value
            for name, value in slots["__globals__"].items()
            if (space, name) in self._new or self._script.must_send((space, name), value)
        }
        for name, value in slots["__globals__"].items():
            self._new[space, name] = value, _contents_of(value)

    def _note(self, obj: Any) -> None:
        name = obj.__qualname__
        if (
            obj.__module__ == _MAIN
            and name.isidentifier()
            and vars(sys.modules[_MAIN]).get(name, obj) is obj
        ):
            self._notes["main"][name] = obj
        if isinstance(obj, types.FunctionType):
            file = obj.__code__.co_filename
            if (
                file not in self._notes["sources"]
                and not Path(file).exists()
                and (lines := linecache.getlines(file))
            ):
                self._notes["sources"][file] = lines


# -- functions that stay in the ranks


def parts_of(function: Any) -> list[Any] | None:
    """Return the parts of a function that its pickle has. They are compared by identity.

    None if the function is not kept: a part may change in place, such as a list in a closure.
    """
    if isinstance(function, types.BuiltinFunctionType):
        is_of_module = function.__self__ is None or isinstance(function.__self__, types.ModuleType)
        return [] if is_of_module else None
    if type(function) is not types.FunctionType or function.__dict__:
        return None
    by_key = [part for pair in (function.__kwdefaults__ or {}).items() for part in pair]
    values = [*(function.__defaults__ or ()), *by_key, *_contents_of_cells(function)]
    if not all(type(each) in PLAIN for each in values):  # also a variable that is not assigned yet
        return None
    if any(isinstance(each, (str, bytes)) and len(each) > _LARGEST_KEPT for each in values):
        return None
    annotations = [part for pair in function.__annotations__.items() for part in pair]
    if not all(isinstance(each, (*PLAIN, type)) for each in annotations):
        return None
    names = [function.__name__, function.__qualname__, function.__module__, function.__doc__]
    is_in_main = vars(sys.modules[_MAIN]).get(function.__qualname__) is function
    return [function.__code__, *names, *values, *annotations, is_in_main]


def _contents_of_cells(function: Any) -> list[Any]:
    """Return what the variables of a closure hold; `_UNASSIGNED` for those without a value."""
    cells = function.__closure__ or ()
    return [_UNASSIGNED if cell == _UNASSIGNED else cell.cell_contents for cell in cells]


class _KeptCall:
    """A call without arguments, whose function stays in the rank."""

    def __init__(self, call: dict[str, Any]) -> None:
        self._call = call
        self._function = function = call["the function"]
        if call["is_by_value"]:
            self._cells = _contents_of_cells(function)
            self._defaults = function.__defaults__
            self._by_key = dict(function.__kwdefaults__ or {})
            self._annotations = dict(function.__annotations__)
            self._code = function.__code__
            self._names = function.__name__, function.__qualname__, function.__module__
            self._doc = function.__doc__

    def call_with(self, args: Any, kwargs: Any) -> dict[str, Any]:
        """Return the call with its arguments, and a function in the state in which it was sent."""
        function = self._copy() if self._call["is_by_value"] else self._look_up()
        notes = self._call["notes"]
        main = {
            name: function if value is self._function else value
            for name, value in notes["main"].items()
        }
        changed = {"the function": function, "args": args, "kwargs": kwargs}
        return {**self._call, **changed, "notes": {**notes, "main": main}}

    def _copy(self) -> Any:
        """Return a new function: an earlier call may have kept the last one."""
        closure = tuple(map(types.CellType, self._cells)) or None
        name, qualname, module = self._names
        globals_ = self._function.__globals__
        function = types.FunctionType(self._code, globals_, name, self._defaults, closure)
        function.__kwdefaults__ = dict(self._by_key) or None
        function.__annotations__ = dict(self._annotations)
        function.__qualname__, function.__module__ = qualname, module
        function.__doc__ = self._doc
        return function

    def _look_up(self) -> Any:
        """Return a function that the rank imports: a call may have put another one in its place."""
        function = self._function
        try:
            return resolve_name(f"{function.__module__}:{function.__qualname__}")
        except (ImportError, AttributeError, ValueError):  # such as that of a module without a name
            return function


# -- in the rank

_spaces: dict[str, dict[str, Any]] = {}


def _globals_of(space: str) -> dict[str, Any]:
    if space == _MAIN:
        return vars(sys.modules[_MAIN])
    if space.startswith(_IMPORTED):
        return vars(importlib.import_module(space.removeprefix(_IMPORTED)))
    return _spaces.setdefault(space, {"__name__": space.rpartition(" ")[0]})


class ScriptOfRank:
    """The globals of functions that travelled by value to this rank."""

    def __init__(self) -> None:
        self._received: dict[str, dict[str, Any]] = {}
        self._owned: set[Name] = set()
        self._kept: dict[int, _KeptCall] = {}

    def take(
        self, item: Any, block: memoryview
    ) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """Set the globals of a `PackedCall`, and return its function and arguments."""
        if isinstance(item, range):
            call = restore(item, block)
            for gone in call["gone"]:
                self._kept.pop(gone, None)
            if call["key"] is not None:
                self._kept[call["key"]] = _KeptCall(call)
        else:
            key, args, kwargs = item
            kept = self._kept.get(key)
            if kept is None:
                msg = (
                    "the function of this call has not arrived: the call that brought it was "
                    "interrupted. Call it again"
                )
                raise LaunchError(msg)
            call = kept.call_with(restore(args, block), restore(kwargs, block))
        for label, (space, name) in call["places"].items():
            if (space, name) not in self._owned:
                _globals_of(space)[name] = call[label]
        for space, name in call["deleted"]:
            _globals_of(space).pop(name, None)
        notes = call["notes"]
        main = vars(sys.modules[_MAIN])
        main.update(
            (name, value)
            for name, value in notes["main"].items()
            if (_MAIN, name) not in self._owned
        )
        linecache.cache.update(
            (name, (0, None, lines, name)) for name, lines in notes["sources"].items()
        )
        received_classes.update(cls for cls in list(id_of_class) if cls not in received_classes)
        self._received = {space: dict(values) for space, values in self._all_spaces()}
        bound_to = [call["the object"]] if "the object" in call else []
        return call["the function"], (*bound_to, *call["args"]), call["kwargs"]

    def changes(self) -> tuple[list[Name], list[Name]] | None:
        """Return the globals that functions have assigned and deleted since the last call."""
        assigned, deleted = [], []
        for space, values in self._all_spaces():
            before = self._received.get(space, {})
            for name, value in list(values.items()):  # threads may change it
                if (
                    before.get(name, ABSENT) is not value
                    and (space, name) not in self._owned
                    and not name.startswith("__")
                ):
                    assigned.append((space, name))
            deleted += [(space, name) for name in before if name not in values]
        self._owned.update(assigned)
        self._owned.difference_update(deleted)
        return (assigned, deleted) if assigned or deleted else None

    def _all_spaces(self) -> Iterator[tuple[str, dict[str, Any]]]:
        yield _MAIN, vars(sys.modules[_MAIN])
        yield from list(_spaces.items())
