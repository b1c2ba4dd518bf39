"""The globals of ``__main__`` that ranks that stay receive with a call.

A rank has a ``__main__`` of its own, in which the functions of calls run. Before a call, it receives the globals that the
function uses, also through other functions, if they are new here or have changed here since the ranks received them:

* definitions (functions, classes, modules) and plain values (numbers, strings, settings) are compared by their content,
* other objects, such as models, by their identity. One that was changed in place is refused.

A global that a function assigned in a rank belongs to the ranks, and is not sent. If this process assigns it too, the next
call that uses it is refused.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import hashlib
import io
import logging
import pickle
import re
import sys
import types
import weakref
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, NamedTuple

import cloudpickle
import torch

from parawrap.errors import UnsendableError
from parawrap.launch._private_names import version_of
from parawrap.launch.messages._pickle_definitions import is_found_by_name
from parawrap.launch.messages._pickle_values import explain_unpicklable
from parawrap.launch.messages._plain_values import pickled_plain
from parawrap.launch.messages._script_names import names_of_script
from parawrap.launch.messages._script_pickler import ScriptPickler, pickle_definition, pickle_with_names

__all__ = ["PackedCall", "SentGlobals", "content_of"]

_DEFINITIONS = (type, types.FunctionType, types.ModuleType)
_EXACT = (type(None), bool, int, str, bytes, complex, torch.dtype, torch.device)
_SEQUENCES = (list, tuple, set, frozenset)
_CONSTANT = (
    *(PurePath, re.Pattern, logging.Logger, enum.Enum, range, slice, complex, torch.Size),
    *(dt.date, dt.time, dt.timedelta, dt.tzinfo, decimal.Decimal, fractions.Fraction),
)
_DEEPEST = 50  # of nested settings; deeper ones are compared as other objects are


class PackedCall(NamedTuple):
    """One call for the ranks, pickled.

    Attributes:
        payload: The pickle of a call, and the memory of its tensors.
        names_only: The same without the function and arguments, for ranks that do not call it. None if no global is sent.
        sent: What to remember once the call is sent.
        values: The pickled objects. They lend the memory of their tensors.
    """

    payload: tuple[memoryview, list[memoryview]]
    names_only: tuple[memoryview, list[memoryview]] | None
    sent: Mapping[str, _Sent]
    values: Any

    def detached(self) -> PackedCall:
        """Return a copy for a later time, when the caller may have changed the arguments."""
        return PackedCall(_copied(self.payload), self.names_only and _copied(self.names_only), self.sent, None)


@dataclass(frozen=True)
class _Sent:
    """A global as it was sent.

    Attributes:
        content: Equal contents mean equal values.
        holder: Returns the object, or None if it is gone or if only its content counts.
        parts: The ids of the objects with a state that were sent with it.
        needs: The other globals that it uses.
        pickled: The pickle of a definition.
    """

    content: Any
    holder: Any
    needs: tuple[str, ...] = ()
    parts: Mapping[int, Any] = dataclasses.field(default_factory=dict)
    pickled: bytes = b""


class SentGlobals:
    """Remembers which globals the ranks have. Used under the lock of the calls."""

    def __init__(self) -> None:
        self._sent: dict[str, _Sent] = {}
        self._owners: dict[str, set[int]] = {}

    def commit(self, sent: Mapping[str, _Sent]) -> Mapping[str, _Sent | None]:
        """Remember what is sent with a call. Return what was known of these globals before, for `restore`."""
        before = {name: self._sent.get(name) for name in sent}
        self._sent.update(sent)
        return before

    def restore(self, before: Mapping[str, _Sent | None]) -> None:
        """Undo `commit`: the call was not sent, or a rank could not set its globals."""
        for name, known in before.items():
            if known is None:
                self._sent.pop(name, None)
            else:
                self._sent[name] = known

    def note_owned(self, rank: int, assigned: Iterable[str], deleted: Iterable[str]) -> None:
        """Remember that functions assigned or deleted these globals in a rank."""
        for name in assigned:
            self._owners.setdefault(name, set()).add(rank)
        for name in deleted:
            self._sent.pop(name, None)
            owners = self._owners.get(name, set())
            owners.discard(rank)
            if not owners:
                self._owners.pop(name, None)

    def pack(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str, *, for_all: bool) -> PackedCall:
        """Pickle a call, together with the globals that the ranks lack.

        Raises:
            UnsendableError: If a part cannot be pickled, or if a global was assigned both here and in a rank.
        """
        found = find_function(function)
        survey = _Survey(self._sent, self._owners.keys())
        if isinstance(found, tuple) and found[0] == "__main__":
            survey.visit(found[1], name)
        pickler = None
        if survey.uses_objects or not isinstance(found, tuple) or pickled_plain((args, kwargs)) is None:
            named = {"the function": found, "args": args, "kwargs": kwargs}
            pickler = _walk(named, "", ScriptPickler)[1]
            survey.visit_all(pickler, name)
        self._check_globals(survey)
        if pickler is not None and survey.uses_objects:
            self._check_arguments(_parts_of(pickler), survey)
        definitions = pickle.dumps((survey.definitions, survey.sources))
        payload = _joined(definitions, survey.values, found, args, kwargs)
        names_only = None
        if not for_all and (survey.definitions or survey.values):
            names_only = _joined(definitions, survey.values, None, (), {})
        return PackedCall(payload, names_only, survey.sent, (args, kwargs, survey.values))

    def _check_globals(self, survey: _Survey) -> None:
        """Refuse a global that shares an object with another one that the ranks have received before.

        Raises:
            UnsendableError: If there is one: in the ranks, it would be two objects.
        """
        for name, sent in survey.sent.items():
            for other in self._sent.keys() - survey.sent.keys():
                self._refuse_shared(sent.parts, other, f"the global {name!r}", f"make {name!r} in a function on the ranks")

    def _check_arguments(self, parts: Mapping[int, Any], survey: _Survey) -> None:
        """Refuse an argument that shares an object with a global that the function uses and the ranks have already.

        Raises:
            UnsendableError: If there is one.
        """
        for other in (self._sent.keys() & survey.seen) - survey.sent.keys():
            self._refuse_shared(parts, other, "an argument", "use only the global, or pass all of them as arguments")

    def _refuse_shared(self, parts: Mapping[int, Any], other: str, what: str, cure: str) -> None:
        before = self._sent[other].parts
        for key in parts.keys() & before.keys():
            part = before[key]()
            if part is not None and part is parts[key]():
                msg = (
                    f"{what} holds a {type(part).__qualname__} that the global {other!r} holds too, and the ranks have "
                    f"their own {other!r} since an earlier call. In the ranks, it would be two objects: {cure}"
                )
                raise UnsendableError(msg)


def _joined(
    definitions: bytes, values: dict[str, Any], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[memoryview, list[memoryview]]:
    """Return two pickles in one: the definitions are loaded first, because the call may refer to them."""
    call = {"the globals": values, "the function": function, "args": args, "kwargs": kwargs}
    pickled, buffers = pickle_with_names(call, "", _is_global)
    return memoryview(definitions + pickled), buffers


def _copied(payload: tuple[memoryview, list[memoryview]]) -> tuple[memoryview, list[memoryview]]:
    pickled, buffers = payload
    return pickled, [memoryview(bytes(each)) for each in buffers]


def find_function(function: Any) -> Any:
    """Return the module and name of a global function, for a message that needs no pickler of functions, or itself."""
    if not isinstance(function, types.FunctionType):
        return function
    module, name = function.__module__, function.__qualname__
    if module == "__main__":
        return (module, name) if vars(sys.modules["__main__"]).get(name) is function else function
    is_shared = "." not in name and is_found_by_name(function) and not _goes_by_value(module)
    return (module, name) if is_shared else function


def _goes_by_value(module: str) -> bool:
    by_value = cloudpickle.list_registry_pickle_by_value()
    return any(module == each or module.startswith(f"{each}.") for each in by_value)


def _is_global(name: str) -> bool:
    return name in vars(sys.modules["__main__"])


class _Survey:
    """Walks over the globals that a call uses, and collects those that the ranks lack.

    Attributes:
        definitions: The definitions to send, each after those that its pickle needs.
        values: The other globals to send.
        sources: The lines of files that do not exist.
        sent: What to remember of both.
        seen: All globals that the call uses.
        uses_objects: True if one of them is an object with a state.
    """

    def __init__(self, known: Mapping[str, _Sent], owned: Collection[str]) -> None:
        self._known = known
        self._owned = owned
        self._main = vars(sys.modules["__main__"])
        self.seen: set[str] = set()
        self.definitions: list[tuple[str, bytes]] = []
        self.values: dict[str, Any] = {}
        self.sources: dict[str, list[str]] = {}
        self.sent: dict[str, _Sent] = {}
        self.uses_objects = False

    def visit_all(self, pickler: ScriptPickler, user: str) -> None:
        """Visit the globals that a pickle needs or whose names its functions use."""
        self.sources |= pickler.sources
        for name in (*pickler.required, *pickler.used):
            self.visit(name, user)
        for name in pickler.assigned:
            self._visit_assigned(name, user)
        if pickler.reads_names:
            for name in names_of_script()[0]:
                with contextlib.suppress(UnsendableError):  # it may not be needed
                    self.visit(name, user)

    def visit(self, name: str, user: str) -> None:
        """Visit a global that `user` uses, and the globals that it uses itself."""
        if name in self.seen or name not in self._main:
            return
        self.seen.add(name)
        value = self._main[name]
        if isinstance(value, _DEFINITIONS):
            self._visit_definition(name, value, user)
        elif (content := content_of(value)) is not None:
            self._visit_plain(name, value, content, user)
        else:
            self._visit_object(name, value, user)

    def _visit_assigned(self, name: str, user: str) -> None:
        """Send the first value of a global that functions only assign: perhaps not all ranks do."""
        if name not in self._known and name not in self._owned:
            with contextlib.suppress(UnsendableError):  # it may not be needed
                self.visit(name, user)

    def _visit_definition(self, name: str, value: Any, user: str) -> None:
        before = self._known.get(name)
        content = _content_of_definition(value)
        if before is not None and content is not None and content == before.content:
            for each in before.needs:
                self.visit(each, name)
            return
        pickled, pickler = pickle_definition(name, value, _is_global)
        needs = (*pickler.required, *pickler.used)
        for each in pickler.required:
            self.visit(each, name)
        if before is None or pickled != before.pickled:
            self._check_owner(name, user)
            self.definitions.append((name, pickled))
            self.sent[name] = _Sent(content, None, needs, pickled=pickled)
        self.visit_all(pickler, name)

    def _visit_plain(self, name: str, value: Any, content: Any, user: str) -> None:
        before = self._known.get(name)
        if before is not None and before.content == content:
            for each in before.needs:
                self.visit(each, name)
            return
        self._check_owner(name, user)
        pickler = _walk(value, f"the global {name!r}", ScriptPickler)[1]
        self.visit_all(pickler, name)
        self.values[name] = value
        self.sent[name] = _Sent(content, None, needs=(*pickler.required, *pickler.used))

    def _visit_object(self, name: str, value: Any, user: str) -> None:
        before = self._known.get(name)
        self.uses_objects = True
        if before is None:
            self._check_owner(name, user)
        pickled, pickler = _walk(value, f"the global {name!r}", _DigestPickler)
        digest = hashlib.blake2b(pickled).digest()
        self.visit_all(pickler, name)
        if before is not None and before.holder is not None and before.holder() is value:
            if before.content != digest:
                msg = (
                    f"the global {name!r}, a {type(value).__qualname__}, was changed in place after the ranks received it, "
                    f"and {user} uses it. The ranks have their own: pass it as an argument, change it in a function that "
                    "the ranks call, or assign a copy to the name to replace theirs"
                )
                raise UnsendableError(msg)
            return
        self._check_owner(name, user)
        self.values[name] = value
        needs = (*pickler.required, *pickler.used)
        self.sent[name] = _Sent(digest, _reference(value), needs, _parts_of(pickler))

    def _check_owner(self, name: str, user: str) -> None:
        if name in self._owned:
            msg = (
                f"the global {name!r}, which {user} uses, was assigned in the ranks, and this process assigned it too: it "
                "is unclear which value is meant. Rename one of the two, or delete it here to use that of the ranks: "
                f"del {name}"
            )
            raise UnsendableError(msg)


def _content_of_definition(value: Any) -> Any:
    """Return a comparable description of a definition, or None if only its pickle describes it."""
    if isinstance(value, types.ModuleType):
        return ("module", value.__name__, id(value))
    if not isinstance(value, types.FunctionType) or value.__closure__ or value.__dict__:
        return None
    defaults = content_of((value.__defaults__, value.__kwdefaults__))
    same = (value.__module__, value.__qualname__, value.__doc__, repr(value.__annotations__))
    return None if defaults is None else ("function", value.__code__, defaults, *same)


def content_of(value: Any, depth: int = 0) -> Any:
    """Return a comparable copy of plain values: numbers, strings, containers and settings of these. None for others."""
    kind = type(value)
    if kind in _EXACT:
        return kind, value
    if kind is float:
        return kind, value.hex()
    if depth > _DEEPEST:
        return None
    if kind in _SEQUENCES:
        return _together(kind, value, depth)
    if kind is dict:
        return _together(kind, (part for item in value.items() for part in item), depth)
    if kind in (types.SimpleNamespace, argparse.Namespace) or (
        dataclasses.is_dataclass(kind) and not hasattr(kind, "__slots__")
    ):
        return _together(kind, (part for item in vars(value).items() for part in item), depth)
    return None


def _together(kind: type, parts: Iterable[Any], depth: int) -> Any:
    contents = [content_of(part, depth + 1) for part in parts]
    if any(each is None for each in contents):
        return None
    return (kind, frozenset(contents)) if kind in (set, frozenset) else (kind, tuple(contents))


def _walk(value: Any, address: str, kind: type[ScriptPickler]) -> tuple[bytes, ScriptPickler]:
    """Return the pickle of a value and of its buffers, and the pickler with what it has noted.

    Raises:
        UnsendableError: If the value cannot be pickled. The message names the unpicklable part, as a path from `address`.
    """
    stream = io.BytesIO()
    buffers: list[memoryview] = []
    pickler = kind(stream, buffers, _is_global)
    with explain_unpicklable(value, address, buffers):
        pickler.dump(value)
    if kind is _DigestPickler:
        for buffer in buffers:
            stream.write(buffer)
    return stream.getvalue(), pickler


class _DigestPickler(ScriptPickler):
    """Pickles tensors as their address and version, without their elements."""

    def _reduced_tensor(self, tensor: torch.Tensor) -> Any:
        version = 0 if tensor.is_inference() else version_of(tensor)
        shape = (tuple(tensor.shape), tensor.stride(), str(tensor.dtype), str(tensor.device))
        return tuple, ((tensor.data_ptr(), version, *shape, tensor.requires_grad),)


def _parts_of(pickler: ScriptPickler) -> dict[int, Any]:
    """Return functions that return the objects with a state in a pickle, by the ids of these objects."""
    return {id(each): _reference(each) for each in pickler.objects if _is_kept(each)}


def _is_kept(value: Any) -> bool:
    """True for objects that two globals must not hold as two copies."""
    return isinstance(value, torch.nn.Module) or not (callable(value) or isinstance(value, _CONSTANT))


def _reference(value: Any) -> Any:
    """Return a function that returns the value. It does not keep the value alive, if its class allows that."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value
