"""The globals of functions that travel by value, in the launching process and in ranks that stay.

A function keeps its globals in the rank, whatever module it is in. They follow three rules:

1. A call brings the globals that its functions use, if they are bound to another object here than at the last call. Small
   lists, dicts, and sets are also brought if their contents changed. A deleted global is deleted in the ranks.
2. A global that a function assigned in a rank belongs to the ranks. It is not sent again until a function deletes it there.
3. Other objects that changed in place are not sent again.

In ranks that stay, functions of a module that ranks can import use that module there, and nothing is sent for them.
"""

from __future__ import annotations

import functools
import importlib
import io
import linecache
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from parawrap._private_names import goes_by_name, id_of_class, names_in_code
from parawrap.processes.pickling import IdentityPickler, Packed, ValuePickler, is_importable, pack, received_classes

_MAIN = "__main__"
_IMPORTED = "import "  # begins the key of a module's globals, which the rank has by import
_LARGEST_COMPARED = 4096  # bytes of a pickle; the contents of larger containers are not compared, so that calls stay fast
_MOST_SEARCHED = 256  # items of a container, for functions in it; a guess: a search takes 0.1 ms then
_CONTAINERS = (list, dict, set)
_WRAPPERS = (functools.partial, functools.cached_property, types.MethodType, staticmethod, classmethod, property)
_WRAPPED = ("func", "args", "keywords", "__func__", "__self__", "fget", "fset")  # their attributes
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_MISSING = object()
_UNASSIGNED = types.CellType()  # equals the cell of a variable that is not assigned yet

Name = tuple[str, str]
"""The key of a function's globals, and a name in them. The key of ``__main__`` is its name."""


class SentScript:
    """The globals that the ranks of one launch have, as the launching process knows them. One thread uses it at a time.

    `imports` is True for ranks that stay.
    """

    def __init__(self, *, imports: bool = False) -> None:
        self._imports = imports
        self._spaces: dict[int, tuple[str, dict[str, Any]]] = {}  # by id; the dicts stay, so that ids are not reused
        self._sent: dict[Name, tuple[Any, _Contents | None]] = {}  # the object, and the contents of a container
        self._owned: set[Name] = set()
        self.last_sent: list[Name] = []  # the globals that came with the last call

    def pack_call(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], bound_to: tuple[Any, ...] = ()
    ) -> Packed:
        """Pickle a call, with the globals that the ranks lack. `bound_to` is the object of a bound method.

        Raises:
            UnsendableError: If the function, an argument, or a global cannot be pickled.
        """
        used = list(self._globals_used_by(function))
        deleted = [name for name, value in used if value is _MISSING and name in self._sent and name not in self._owned]
        new = {
            name: (value, _contents_of(value))
            for name, value in used
            if value is not _MISSING and self.must_send(name, value)
        }
        places = {f"the global {name!r}{'' if space == _MAIN else f' of {space}'}": (space, name) for space, name in new}
        call = {
            "places": places,
            "deleted": deleted,
            **{label: new[name][0] for label, name in places.items()},
            "the function": function,
            **({"the object": bound_to[0]} if bound_to else {}),
            "args": args,
            "kwargs": kwargs,
            "notes": _Notes(),
        }
        packed = pack(call, make_pickler=functools.partial(_CallPickler, self, new))
        self._sent.update(new)
        for name in deleted:
            del self._sent[name]
        self.last_sent = list(new)
        return packed

    def forget(self, names: list[Name]) -> None:
        """Forget globals that did not reach all ranks. They are sent again."""
        for name in names:
            self._sent.pop(name, None)

    def note_owned(self, assigned: list[Name], deleted: list[Name]) -> None:
        """Note the globals that functions of a rank have assigned, and those that they have deleted."""
        self._owned.update(assigned)
        for name in deleted:
            self._owned.discard(name)
            self._sent.pop(name, None)

    def space_of(self, globals_: dict[str, Any]) -> str:
        """Return the key of a function's globals."""
        found = self._spaces.get(id(globals_))
        if found is None:
            name = str(globals_.get("__name__"))
            module = sys.modules.get(name)
            key = f"{name} {id(globals_)}"
            if module is not None and vars(module) is globals_:
                if name == _MAIN:
                    key = _MAIN
                elif self._imports and is_importable(name):
                    key = _IMPORTED + name
            found = self._spaces[id(globals_)] = (key, globals_)
        return found[0]

    def must_send(self, name: Name, value: Any) -> bool:
        """True for a global that the ranks lack."""
        if name in self._owned or name[0].startswith(_IMPORTED):
            return False
        sent, contents = self._sent.get(name, (_MISSING, None))
        return sent is not value or (contents is not None and contents.differ_from(value))

    def _globals_used_by(self, function: Any) -> Iterator[tuple[Name, Any]]:
        """Yield the globals that a function uses, also through functions and classes that travel by value.

        The value of a name that is not a global is `_MISSING`: it may be a builtin, or a global that was deleted.
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
                todo += [cell.cell_contents for cell in value.__closure__ or () if cell != _UNASSIGNED]
                todo += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
                for name in names_in_code(value.__code__):
                    part = value.__globals__.get(name, _MISSING)
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
            elif not isinstance(value, (types.ModuleType, *_PLAIN)):
                todo.append(type(value))
                own = [*getattr(value, "__dict__", {}).items()]
                todo += [part for name, part in own if name == "__wrapped__" or isinstance(part, types.FunctionType)]


class _Contents:
    """The contents of a small container, to compare them later; of a larger one its length."""

    def __init__(self, value: Any) -> None:
        self._length = len(value)
        self._met: list[Any] = []  # alive, so that no later object has the identity of one of them
        self._read = None if self._length > _LARGEST_COMPARED else self._read_contents(value)

    def differ_from(self, value: Any) -> bool:
        """True if the container has other contents now."""
        if self._read is None or len(value) != self._length:
            return len(value) != self._length
        return bool(_Contents(value)._read != self._read)

    def _read_contents(self, value: Any) -> Any:
        stream = io.BytesIO()
        try:
            IdentityPickler(stream, self._met, types.ModuleType).dump(value)
        except Exception:  # noqa: BLE001 (classes may raise anything)
            parts = [*value, *value.values()] if isinstance(value, dict) else [*value]
            self._met += parts
            return [*map(id, parts)]
        return stream.getvalue() if stream.tell() <= _LARGEST_COMPARED else None


def _contents_of(value: Any) -> _Contents | None:
    return _Contents(value) if isinstance(value, _CONTAINERS) else None


class _Notes:
    """Stands for what the pickler noticed. It is pickled last, as a dict.

    "main" has the functions and classes of ``__main__`` that were pickled by value. torch.save, all_gather_object, and
    other code that pickles by name finds them there. "sources" has the source lines of files that do not exist, so that
    tracebacks show notebook cells.
    """


class _Globals(dict[str, Any]):
    """Stands for the globals of a function: the rank has a dict for each key."""

    def __reduce__(self) -> Any:
        return _globals_of, (self["space"],)


class _CallPickler(ValuePickler):
    """Pickles a call. Functions that travel by value refer to their globals in the rank."""

    def __init__(self, script: SentScript, new: dict[Name, Any], stream: io.BytesIO, buffers: list[memoryview]) -> None:
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
            if isinstance(obj, types.FunctionType):
                self._leave_out_known_globals(obj, reduced)
        return reduced

    def _leave_out_known_globals(self, function: types.FunctionType, reduced: Any) -> None:
        slots = reduced[2][1]  # of cloudpickle's state of a function
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
        if obj.__module__ == _MAIN and name.isidentifier() and vars(sys.modules[_MAIN]).get(name, obj) is obj:
            self._notes["main"][name] = obj
        if isinstance(obj, types.FunctionType):
            file = obj.__code__.co_filename
            if file not in self._notes["sources"] and not Path(file).exists() and (lines := linecache.getlines(file)):
                self._notes["sources"][file] = lines


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

    def take(self, call: dict[str, Any]) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """Set the globals of a call, and return its function and arguments."""
        for label, (space, name) in call["places"].items():
            if (space, name) not in self._owned:
                _globals_of(space)[name] = call[label]
        for space, name in call["deleted"]:
            _globals_of(space).pop(name, None)
        notes = call["notes"]
        main = vars(sys.modules[_MAIN])
        main.update((name, value) for name, value in notes["main"].items() if (_MAIN, name) not in self._owned)
        linecache.cache.update((name, (0, None, lines, name)) for name, lines in notes["sources"].items())
        received_classes.update(cls for cls in list(id_of_class) if cls not in received_classes)
        self._received = {space: dict(values) for space, values in self._all_spaces()}
        bound_to = [call["the object"]] if "the object" in call else []
        return call["the function"], (*bound_to, *call["args"]), call["kwargs"]

    def changes(self) -> tuple[list[Name], list[Name]] | None:
        """Return the globals that functions have assigned since the last call, and those that they have deleted."""
        assigned, deleted = [], []
        for space, values in self._all_spaces():
            before = self._received.get(space, {})
            for name, value in list(values.items()):  # threads may change it
                if (
                    before.get(name, _MISSING) is not value
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
