"""The globals of functions that travel by value, in the launching process and in ranks that stay.

A function keeps its globals in the rank, whatever module it is in. The globals of one module, or of
one dict of `exec`, are a space. Both processes refer to a space by the same key. There are three
rules:

1. A call brings a global that its functions use, if its name is bound to another object here than
   at the last call. It also brings a small list, dict, or set whose contents changed. A global that
   was deleted here is deleted in the ranks. A global that a part of an object uses counts as used
   by every function once the object was sent.
2. A global that a function assigned in a rank belongs to the ranks. It is not sent again until a
   function deletes it there.
3. Any other object that changed in place is not sent again.

In ranks that stay, functions of a module that ranks can import use that module there, and nothing
is sent for them. If the user registers the module with cloudpickle to go by value, its functions
are sent as they are here, with their globals.
"""

from __future__ import annotations

import functools
import importlib
import io
import linecache
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import is_
from pathlib import Path
from typing import Any, NamedTuple

import torch

from parawrap._private_names import goes_by_name, id_of_class, names_in_code
from parawrap.errors import LaunchError
from parawrap.processes.definitions import is_generic
from parawrap.processes.kept_functions import (
    UNASSIGNED,
    KeptCall,
    KeptFunction,
    KeptFunctions,
    parts_of,
)
from parawrap.processes.packing import Packer, restore
from parawrap.processes.pickling import (
    IdentityPickler,
    Packed,
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
_IMPORTED = "import "  # the key of a space starts with it if the rank imports the module
# Items of a container, and bytes of its pickle: the contents of a larger one are not compared, so
# that calls stay fast
_LARGEST_COMPARED = 4096
# Items of a container that is searched for functions; a guess: a search takes 0.1 ms then
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
# The attributes in which objects of these classes have what they wrap
_WRAPPED = ("func", "dispatcher", "args", "keywords", "__func__", "__self__", "fget", "fset")

Name = tuple[str, str]
"""The key of a space, and a name in it. The key of ``__main__`` is its name."""

_PlaceInScript = tuple[int, str]
"""The id of the globals of a function here, and a name in them."""


class PackedCall(NamedTuple):
    """A call that is ready to be sent, for `ScriptOfRank.take`.

    Attributes:
        item: A range of the block with all of the call; or the key of a function that the ranks
            keep, and the items of the arguments.
        block: The memory of the call.
        new: The globals that come with the call.
        deleted: Globals that it deletes in the ranks.
        found: The globals among `new` that only its pickler has found, as in `SentScript`.
        kept: Its function, if the ranks keep the function from this call on, or have it already.
    """

    item: Any
    block: Block
    new: Mapping[Name, Sent] = {}
    deleted: Sequence[Name] = ()
    found: Mapping[_PlaceInScript, dict[str, Any]] = {}
    kept: KeptFunction | None = None

    @property
    def brings_definitions(self) -> bool:
        """True if it brings its function or globals. Ranks that do not run it take these too."""
        return isinstance(self.item, range)


class _KnownSpace(NamedTuple):
    """A space, and its key."""

    key: str
    globals_: dict[str, Any]  # kept alive, so that no other dict gets its id


class Sent(NamedTuple):
    """A global as it was sent, to notice a change."""

    value: Any
    contents: _ContainerContents | _ModuleContents | None  # None: changes in place do not count


# Stands for a global that only some ranks may have. No value is `ABSENT`, so the next call sends
# the global, or deletes it
_UNKNOWN = Sent(ABSENT, None)


class SentScript:
    """The globals that the ranks of one launch have, as the launching process knows them.

    One thread at a time uses it, except that the pool may call `note_owned` meanwhile. This is
    safe: each step of `note_owned` is atomic, and `ScriptOfRank.take` keeps the globals that the
    rank owns, also if a call that was packed before brings them.

    Args:
        imports: True for ranks that stay: functions of a module that they can import use that
            module there.
    """

    def __init__(self, *, imports: bool = False) -> None:
        self._imports = imports
        self._known: dict[int, _KnownSpace] = {}  # by the id of the dict
        self._sent: dict[Name, Sent] = {}
        self._owned: set[Name] = set()  # globals that functions of the ranks have assigned
        # Globals that only the pickler has found, and the dicts that have them. They count as used
        # by every function: the search does not open all objects, such as the parts of a trainer
        self._found: dict[_PlaceInScript, dict[str, Any]] = {}
        self._kept = KeptFunctions()
        self._by_value = modules_of_user()  # at the last call

    def pack_call(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        bound_to: tuple[Any, ...] = (),
    ) -> PackedCall:
        """Pickle a call, with the globals that the ranks lack.

        `bound_to` has the object of a bound method. It is empty for other functions.

        Raises:
            UnsendableError: If the function, an argument, or a global cannot be pickled.
        """
        self._follow_registrations()

        # The globals that the ranks lack, and those that they must delete
        new: dict[Name, Sent] = {}
        deleted: list[Name] = []
        for name, value in (*self._globals_used_by(function), *self._globals_found()):
            if value is ABSENT:
                if name in self._sent and name not in self._owned:
                    deleted.append(name)
            elif self.must_send(name, value):
                new[name] = Sent(value, _contents_of(value))

        # The arguments alone, if the ranks keep the function. A rank keeps the whole call that
        # brought it, and makes it again: with globals in this call, it would set old ones
        kept: KeptFunction | None = None
        can_be_kept = self._imports and not (bound_to or new or deleted)
        parts = parts_of(function) if can_be_kept else None
        if parts is not None:
            kept = self._kept.find(function, parts)
            if kept is not None:
                packer = Packer()
                items = packer.add(args, "args"), packer.add(kwargs, "kwargs")
                # A range may have functions or classes of the script, which need its globals
                if not any(isinstance(item, range) for item in items):
                    return PackedCall((kept.key, *items), packer, kept=kept)
            kept = self._kept.make(function, parts)

        found: dict[_PlaceInScript, dict[str, Any]] = {}
        packed = self._pack_all(function, args, kwargs, bound_to, new, found, deleted, kept)
        return PackedCall(range(packed.size), packed, new, deleted, found, kept)

    def _pack_all(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        bound_to: tuple[Any, ...],
        new: dict[Name, Sent],
        found: dict[_PlaceInScript, dict[str, Any]],
        deleted: list[Name],
        kept: KeptFunction | None,
    ) -> Packed:
        """Pickle a call with its function. `new` and `found` get the globals that it finds."""
        # If a part cannot be pickled, the error message names its key in this dict
        names: dict[str, Name] = {}  # of the globals, by their keys in `call`
        call: dict[str, Any] = {"names": names, "deleted": deleted}
        for (space, name), sent in new.items():
            label = f"the global {name!r}" if space == _MAIN else f"the global {name!r} of {space}"
            names[label] = (space, name)
            call[label] = sent.value
        call["the function"] = function
        if bound_to:
            call["the object"] = bound_to[0]
        call |= {
            "args": args,
            "kwargs": kwargs,
            "key": None if kept is None else kept.key,  # under which the ranks keep the call
            "gone": [] if kept is None else self._kept.gone_with(function),  # keys to forget
            "is_by_value": isinstance(function, types.FunctionType) and not goes_by_name(function),
            "notes": _Notes(),  # last: the pickler writes there what it has noticed of the others
        }
        return pack(call, make_pickler=functools.partial(_CallPickler, self, new, found))

    def note_sent(self, call: PackedCall) -> None:
        """Note that a call was sent, or waits for its turn. Later calls do not bring its globals.

        No signal handler may raise between the sending and this note: signals are held back.
        """
        if call.kept is not None:
            self._kept.note(call.kept)
        self._sent.update(call.new)
        self._found.update(call.found)
        for name in call.deleted:
            self._sent.pop(name, None)

    def forget(self, call: PackedCall) -> None:
        """Forget what a call brings that did not reach all ranks: the next call brings it again."""
        if call.kept is not None:
            self._kept.drop(call.kept.function)
        for place in call.found:  # else a global that ranks cannot unpickle would fail every call
            self._found.pop(place, None)
        for name in (*call.new, *call.deleted):
            # Not removed: some ranks may have the global, and a later call may have to delete it
            self._sent[name] = _UNKNOWN

    def note_owned(self, assigned: list[Name], deleted: list[Name]) -> None:
        """Note the globals that functions of a rank have assigned, and those they have deleted."""
        self._owned.update(assigned)
        for name in deleted:
            self._owned.discard(name)
            self._sent.pop(name, None)

    def space_of(self, globals_: dict[str, Any]) -> str:
        """Return the key of the space with these globals of a function."""
        known = self._known.get(id(globals_))
        if known is None:
            known = _KnownSpace(self._make_key(globals_), globals_)
            self._known[id(globals_)] = known
        return known.key

    def _make_key(self, globals_: dict[str, Any]) -> str:
        name = str(globals_.get("__name__"))
        module = sys.modules.get(name)
        if module is not None and vars(module) is globals_:
            if name == _MAIN:
                return _MAIN
            if self._imports and is_importable(name) and not is_among(name, self._by_value):
                return _IMPORTED + name
        # Dicts of `exec` may share a name, but no id: `_known` keeps them alive
        return f"{name} {id(globals_)}"

    def _follow_registrations(self) -> None:
        """Forget the globals of modules that the user has registered or unregistered since.

        The ranks have imported such a module and would get it by value now, or the other way round.
        """
        before, now = self._by_value, modules_of_user()
        if before == now:
            return
        self._by_value = now
        # The key of a module's globals says how the module travels
        for identity, known in list(self._known.items()):
            self._known[identity] = known._replace(key=self._make_key(known.globals_))
        for name, sent in list(self._sent.items()):
            for definition in _definitions_in(sent.value):
                module = _module_of(definition)
                if is_among(module, before) != is_among(module, now):
                    self._sent.pop(name, None)  # `note_owned` may have removed it meanwhile
                    break
        self._kept.drop_all()

    def must_send(self, name: Name, value: Any) -> bool:
        """True for a global that the ranks lack."""
        space, _ = name
        if name in self._owned or space.startswith(_IMPORTED):
            return False
        sent = self._sent.get(name, _UNKNOWN)
        if sent.value is not value:
            return True
        return sent.contents is not None and sent.contents.differ_from(value)

    def _globals_found(self) -> Iterator[tuple[Name, Any]]:
        """Yield the globals that only the pickler has found, like `_globals_used_by`."""
        for (_, name), globals_ in self._found.items():
            yield (self.space_of(globals_), name), globals_.get(name, ABSENT)

    def _globals_used_by(self, function: Any) -> Iterator[tuple[Name, Any]]:
        """Yield the globals that a function uses, and those of functions that travel with it.

        A name that is not a global has the value `ABSENT`: it may be a builtin, or a global that
        was deleted.
        """
        seen: set[int] = set()  # ids. `function` keeps all parts alive, so no id is used twice
        todo = [function]
        while todo:
            value = todo.pop()
            if id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, types.FunctionType):
                if goes_by_name(value):
                    continue
                if is_generic(value):  # its own code is that of functools
                    generic: Any = value
                    todo += [*generic.registry, *generic.registry.values(), generic.__wrapped__]
                    continue
                for cell in value.__closure__ or ():
                    if cell != UNASSIGNED:
                        todo.append(cell.cell_contents)
                todo += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
                for name in names_in_code(value.__code__):
                    part = value.__globals__.get(name, ABSENT)
                    yield (self.space_of(value.__globals__), name), part
                    todo.append(part)
            elif isinstance(value, type):
                if not goes_by_name(value):
                    # The metaclass may be one of the script too
                    todo += [*vars(value).values(), *value.__bases__, type(value)]
            elif isinstance(value, _WRAPPERS):
                todo += [getattr(value, name, None) for name in _WRAPPED]
            elif isinstance(value, (dict, list, tuple, set)):
                if len(value) <= _MOST_SEARCHED:
                    todo += value.values() if isinstance(value, dict) else value
            elif isinstance(value, torch.nn.Module):
                # Only the classes of its modules: it may have thousands of other parts
                todo += {type(module) for module in value.modules()}
            elif not isinstance(value, (types.ModuleType, *PLAIN)):
                # Any other object: its class, and the functions among its attributes. A search of
                # all attributes would take longer than the call
                todo.append(type(value))
                attributes = getattr(value, "__dict__", {})
                for name, part in [*attributes.items()]:  # a copy: other threads may change it
                    # functools.wraps and others keep a function, or an object, as `__wrapped__`
                    if name == "__wrapped__" or isinstance(part, types.FunctionType):
                        todo.append(part)


class _ContainerContents:
    """The contents of a small container, to compare them later; of a larger one its length."""

    def __init__(self, value: Any) -> None:
        self._length = len(value)
        # Objects that are compared by their ids. They stay alive, so that no other gets such an id
        self._met: list[Any] = []
        # None for a container that is too large
        self._read = None if self._length > _LARGEST_COMPARED else self._read_contents(value)

    def differ_from(self, value: Any) -> bool:
        """True if the container has other contents now."""
        if len(value) != self._length:
            return True
        if self._read is None:
            return False
        now = _ContainerContents(value)
        return bool(now._read != self._read)

    def _read_contents(self, value: Any) -> Any:
        """Return the pickle of the contents, or the ids of the items if they cannot be pickled."""
        stream = io.BytesIO()
        try:
            IdentityPickler(stream, self._met, types.ModuleType).dump(value)
        except Exception:  # noqa: BLE001 (classes may raise anything)
            parts = [*value, *value.values()] if isinstance(value, dict) else [*value]
            self._met += parts
            return [*map(id, parts)]
        return stream.getvalue() if stream.tell() <= _LARGEST_COMPARED else None


class _ModuleContents:
    """The attributes of a module that goes by value, and of other such modules among these.

    They show a reload: `importlib.reload` keeps the module, and gives it new attributes.
    """

    def __init__(self, module: types.ModuleType) -> None:
        self._read = self._read_attributes(module)

    def differ_from(self, module: types.ModuleType) -> bool:
        """True if an attribute is another object now."""
        now = self._read_attributes(module)
        return len(now) != len(self._read) or not all(map(is_, now, self._read))

    def _read_attributes(self, module: types.ModuleType) -> list[Any]:
        found: list[Any] = []
        seen = {id(module)}  # `found` keeps all modules alive, so no id is used twice
        todo = [module]
        while todo:
            attributes = dict(vars(todo.pop()))  # a copy: other threads may change it
            found += [*attributes, *attributes.values()]
            for value in attributes.values():
                is_new = isinstance(value, types.ModuleType) and id(value) not in seen
                if is_new and not goes_by_name(value):
                    seen.add(id(value))
                    todo.append(value)
        return found


def _contents_of(value: Any) -> _ContainerContents | _ModuleContents | None:
    """Return the contents of a global whose changes in place count, and None for others."""
    if isinstance(value, types.ModuleType):
        return None if goes_by_name(value) else _ModuleContents(value)
    # Comparing the state of other objects would take as long as sending them: rule 3
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
            attributes = getattr(part, "__dict__", {})
            todo.append(attributes.get("__wrapped__"))  # an object that functools.wraps has changed


def _module_of(definition: Any) -> str | None:
    if isinstance(definition, types.ModuleType):
        return definition.__name__
    return getattr(definition, "__module__", None)


class _Notes:
    """Stands in a call for the notes of its `_CallPickler`, which are complete at the end.

    They are pickled as a dict. "main" has the functions and classes of ``__main__`` that were
    pickled by value: code that pickles by name, such as torch.save and all_gather_object, finds
    them there. "sources" has the source lines of files that do not exist, so that tracebacks show
    notebook cells.
    """


class _Globals(dict[str, Any]):
    """Stands for the globals of a function, which the rank finds by their key under "space"."""

    def __reduce__(self) -> Any:
        return _globals_of, (self["space"],)


class _CallPickler(ValuePickler):
    """Pickles a call. Functions that travel by value refer to their globals in the rank."""

    def __init__(
        self,
        script: SentScript,
        new: dict[Name, Sent],
        found: dict[_PlaceInScript, dict[str, Any]],
        stream: Any,
        buffers: list[memoryview],
    ) -> None:
        super().__init__(stream, buffers)
        self._script = script
        self._new = new
        self._found = found
        self._notes: dict[str, dict[str, Any]] = {"main": {}, "sources": {}}

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is _Notes:
            return dict, (self._notes,)
        if isinstance(obj, types.FunctionType):
            space = self._script.space_of(obj.__globals__)
            # cloudpickle would make a new dict for the globals: it finds this one by their id
            self.globals_ref.setdefault(id(obj.__globals__), _Globals(space=space))
        reduced = super().reducer_override(obj)
        if isinstance(obj, (type, types.FunctionType)) and reduced is not NotImplemented:
            self._note(obj)
            if isinstance(obj, types.FunctionType) and not is_generic(obj):
                self._leave_out_known_globals(obj, reduced)
        return reduced

    def _leave_out_known_globals(self, function: types.FunctionType, reduced: Any) -> None:
        """Remove the globals that the ranks have from cloudpickle's reduction of a function."""
        # A reduction is a constructor, its arguments, and a state. This state has two parts: the
        # attributes of the function, and its other parts by name, such as its globals
        _constructor, _arguments, (_attributes, slots), *_ = reduced
        space = self._script.space_of(function.__globals__)
        unknown = {}
        for name, value in slots["__globals__"].items():
            key = space, name
            if key in self._new:
                unknown[name] = value
            elif self._script.must_send(key, value):
                unknown[name] = value
                self._new[key] = Sent(value, _contents_of(value))
                self._found[id(function.__globals__), name] = function.__globals__
        slots["__globals__"] = unknown

    def _note(self, obj: Any) -> None:
        """Note a function or class for `_Notes`."""
        name = obj.__qualname__
        # Nested definitions have a dot in their names. Another object may have the name now
        is_in_main = obj.__module__ == _MAIN and name.isidentifier()
        if is_in_main and vars(sys.modules[_MAIN]).get(name, obj) is obj:
            self._notes["main"][name] = obj
        if isinstance(obj, types.FunctionType):
            file = obj.__code__.co_filename
            if file not in self._notes["sources"] and not Path(file).exists():
                lines = linecache.getlines(file)
                if lines:
                    self._notes["sources"][file] = lines


# -- in the rank

_spaces: dict[str, dict[str, Any]] = {}  # by key: those that the rank does not import


def _globals_of(space: str) -> dict[str, Any]:
    """Return the globals of a space in this rank. Make them if the key is new."""
    if space == _MAIN:
        return vars(sys.modules[_MAIN])
    if space.startswith(_IMPORTED):
        return vars(importlib.import_module(space.removeprefix(_IMPORTED)))
    name, _, _id = space.rpartition(" ")  # as `_make_key` made it
    return _spaces.setdefault(space, {"__name__": name})


class ScriptOfRank:
    """The globals of functions that travelled by value to this rank."""

    def __init__(self) -> None:
        # The globals of each space before the last call ran
        self._received: dict[str, dict[str, Any]] = {}
        self._owned: set[Name] = set()  # globals that functions of this rank have assigned
        self._kept: dict[int, KeptCall] = {}  # by the key of the function

    def take(
        self, item: Any, block: memoryview
    ) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """Set the globals of a `PackedCall`, and return its function and arguments."""
        # The call, from its block, or from the call that brought its function
        if isinstance(item, range):
            call = self._read_call(item, block)
            for gone in call["gone"]:
                self._kept.pop(gone, None)
            if call["key"] is not None:
                self._kept[call["key"]] = KeptCall(call)
        else:
            key, args, kwargs = item
            kept = self._kept.get(key)
            if kept is None:  # an interrupt may stop a call before the rank has unpickled it
                msg = (
                    "the function of this call has not arrived: the call that brought it was "
                    "interrupted. Call it again"
                )
                raise LaunchError(msg)
            call = kept.call_with(restore(args, block), restore(kwargs, block))

        # Its globals. Those that this rank owns stay
        for label, (space, name) in call["names"].items():
            if (space, name) not in self._owned:
                _globals_of(space)[name] = call[label]
        for space, name in call["deleted"]:
            if (space, name) not in self._owned:
                _globals_of(space).pop(name, None)
        notes = call["notes"]
        main = vars(sys.modules[_MAIN])
        for name, value in notes["main"].items():
            if (_MAIN, name) not in self._owned:
                main[name] = value
        for name, lines in notes["sources"].items():
            # A size, no time of change, the lines, and a path. Without a time, `linecache` does not
            # look for the file
            linecache.cache[name] = (0, None, lines, name)
        # cloudpickle has given an identity to each class that came by value
        received_classes.update(cls for cls in list(id_of_class) if cls not in received_classes)

        # As they are now, for `changes`
        self._received = {space: dict(values) for space, values in self._all_spaces()}
        args = call["args"]
        if "the object" in call:
            args = (call["the object"], *args)
        return call["the function"], args, call["kwargs"]

    def _read_call(self, item: range, block: memoryview) -> dict[str, Any]:
        """Unpickle a call. Its functions set their globals then, except those this rank owns."""
        owned = [(_globals_of(space), name) for space, name in self._owned]
        before = [globals_.get(name, ABSENT) for globals_, name in owned]
        try:
            call: dict[str, Any] = restore(item, block)
        finally:
            # The call brings a name that it also has here if it was packed before the launching
            # process knew that a call before it assigns the name
            for (globals_, name), value in zip(owned, before, strict=True):
                if value is not ABSENT:
                    globals_[name] = value
        return call

    def changes(self) -> tuple[list[Name], list[Name]] | None:
        """Note and return the globals that functions have assigned and deleted since `take`.

        Return None if there are none.
        """
        assigned, deleted = [], []
        for space, values in self._all_spaces():
            before = self._received.get(space, {})
            for name, value in list(values.items()):  # threads may change it
                if before.get(name, ABSENT) is value:  # first: this is true of nearly all
                    continue
                is_special = name.startswith("__")  # such as `__builtins__`, which Python sets
                if not is_special and (space, name) not in self._owned:
                    assigned.append((space, name))
            deleted += [(space, name) for name in before if name not in values]
        self._owned.update(assigned)
        self._owned.difference_update(deleted)
        return (assigned, deleted) if assigned or deleted else None

    def _all_spaces(self) -> Iterator[tuple[str, dict[str, Any]]]:
        yield _MAIN, vars(sys.modules[_MAIN])
        yield from list(_spaces.items())
