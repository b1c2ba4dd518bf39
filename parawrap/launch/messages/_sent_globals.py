"""The globals of ``__main__`` that ranks that stay receive with a call.

A rank has its own ``__main__``. The functions of calls run in it. Before a call, it receives the globals that the
function uses, also through other functions, if they are new here or have changed here since the ranks received them:

* definitions (functions, classes, modules) and plain values (numbers, strings, settings) are compared by their content,
* other objects, such as models, by their identity. One that was changed in place is refused.

A global that a function assigned in a rank belongs to the ranks, and is not sent. If this process assigns it too, the next
call that uses it is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import sys
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from parawrap.errors import UnsendableError
from parawrap.launch.messages._global_contents import (
    DEFINITIONS,
    DigestPickler,
    containers_in,
    content_of,
    content_of_definition,
    has_state,
    is_learned_state,
    reference_to,
    walk,
)
from parawrap.launch.messages._pickle_definitions import is_found_by_name
from parawrap.launch.messages._plain_values import pickle_plain
from parawrap.launch.messages._script_names import names_of_script
from parawrap.launch.messages._script_pickler import ScriptPickler, goes_by_value, pickle_definition, pickle_with_names

__all__ = ["PackedCall", "SentGlobals"]


_NO_DEFINITIONS = pickle.dumps(((), {}))


class PackedCall(NamedTuple):
    """One call for the ranks, pickled.

    Attributes:
        payload: The pickle of a call, and the memory of its tensors. None for a call that was dropped.
        names_only: The globals alone, for ranks that do not call the function. None if there are none.
        sent: What to remember once the call is sent.
        values: The pickled objects. They lend the memory of their tensors.
    """

    payload: tuple[memoryview, list[memoryview]] | None
    names_only: tuple[memoryview, list[memoryview]] | None
    sent: Mapping[str, _Sent]
    values: Any

    def detached(self) -> PackedCall:
        """Return a copy for a later time, when the caller may have changed the arguments."""
        return PackedCall(_copy_payload(self.payload), _copy_payload(self.names_only), self.sent, None)


@dataclass(frozen=True)
class _Sent:
    """A global as it was sent.

    Attributes:
        content: Equal contents mean equal values. A digest for objects that are not plain.
        holder: Returns the object, if its identity counts.
        needs: The other globals that it uses.
        reads_names: True if it may use any global.
        parts: The objects that no other global may hold as a copy, by their ids.
        is_plain: True for a plain value.
        kept: Objects that `content` has by their identity.
    """

    content: Any
    holder: Callable[[], Any] | None = None
    needs: tuple[str, ...] = ()
    reads_names: bool = False
    parts: Mapping[int, Callable[[], Any]] = field(default_factory=dict)
    is_plain: bool = False
    kept: Any = None


class _Definition(NamedTuple):
    """A definition to send: its value, its pickle, and the other globals that the reader needs to load it."""

    value: Any
    pickled: bytes
    required: frozenset[str]


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

    def pack(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> PackedCall:
        """Pickle a call, together with the globals that the ranks lack.

        Raises:
            UnsendableError: If a part cannot be pickled, or if it is unclear which value of a global is meant.
        """
        found = name_function(function)
        survey = _GlobalSearch(self._sent, self._owners.keys())
        if isinstance(found, tuple):
            if found[0] == "__main__":
                survey.visit(found[1], name)
        else:
            pickler = walk({"the function": found}, "", ScriptPickler, _is_global)[1]
            survey.visit_all(pickler, name)
            self._check_apart(_parts_of(pickler, is_learned_state), self._sent.keys() - survey.sent.keys(), "the function")
        if (args or kwargs) and (survey.uses_objects or pickle_plain((args, kwargs)) is None):
            pickler = walk({"args": args, "kwargs": kwargs}, "", ScriptPickler, _is_global)[1]
            survey.visit_all(pickler, name)
            self._check_apart(_parts_of(pickler), (self._sent.keys() & survey.seen) - survey.sent.keys(), "an argument")
        self._check_globals(survey)
        has_definitions = survey.definitions or survey.sources
        definitions = pickle.dumps((survey.order_definitions(), survey.sources)) if has_definitions else _NO_DEFINITIONS
        payload = _join_pickles(definitions, survey.values, found, args, kwargs)
        has_names = survey.definitions or survey.values
        names_only = _join_pickles(definitions, survey.values, None, (), {}) if has_names else None
        return PackedCall(payload, names_only, survey.sent, (args, kwargs, survey.values))

    def _check_globals(self, survey: _GlobalSearch) -> None:
        """Send plain globals that share a container again, all together. Refuse other globals that share an object.

        Raises:
            UnsendableError: If a global shares an object with one that the ranks have received before.
        """
        checked: set[str] = set()
        while new := survey.sent.keys() - checked:
            for name in new:
                checked.add(name)
                for other in self._sent.keys() - survey.sent.keys():
                    if (
                        self._sent[other].is_plain
                        and _find_shared(survey.sent[name].parts, self._sent[other].parts) is not None
                    ):
                        survey.visit(other, name, again=True)
        for name, sent in survey.sent.items():
            apart = self._sent.keys() - survey.sent.keys()
            if name in survey.definitions:
                apart = (apart | survey.sent.keys()) - {name}
            self._check_apart(sent.parts, apart, f"the global {name!r}", survey.sent)

    def _check_apart(
        self, parts: Mapping[int, Any], others: Iterable[str], what: str, sent: Mapping[str, _Sent] | None = None
    ) -> None:
        """Refuse an object of a global that would arrive in the ranks twice.

        Raises:
            UnsendableError: If one of the other globals has a part that is among `parts`.
        """
        known = {**self._sent, **(sent or {})}
        for other in others:
            part = _find_shared(parts, known[other].parts)
            if part is not None:
                msg = (
                    f"{what} holds a {type(part).__qualname__} that the global {other!r} holds too, and they travel apart: "
                    "in the ranks, it would be two objects. Use only the global in functions, make it in a function on the "
                    "ranks, or pass everything that shares it as arguments of one call"
                )
                raise UnsendableError(msg)


def _join_pickles(
    definitions: bytes, values: dict[str, Any], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[memoryview, list[memoryview]]:
    """Return two pickles in one: the definitions are loaded first, because the call may refer to them."""
    call = {"the globals": values, "the function": function, "args": args, "kwargs": kwargs}
    pickled, buffers = pickle_with_names(call, "", _is_global)
    return memoryview(definitions + pickled), buffers


def _copy_payload(payload: tuple[memoryview, list[memoryview]] | None) -> tuple[memoryview, list[memoryview]] | None:
    if payload is None:
        return None
    pickled, buffers = payload
    return pickled, [memoryview(bytes(each)) for each in buffers]


def _find_shared(parts: Mapping[int, Any], others: Mapping[int, Any]) -> Any:
    """Return an object that is among both, or that shares memory with one of the others. None if there is none."""
    for key, reference in parts.items():
        part, other = reference(), others[key]() if key in others else None
        if other is not None and (part is other or _share_memory(part, other)):
            return part
    return None


def _share_memory(part: Any, other: Any) -> bool:
    are_tensors = isinstance(part, torch.Tensor) and isinstance(other, torch.Tensor)
    return are_tensors and _key_of(part) == _key_of(other)


def _key_of(part: Any) -> int:
    """Return a number that equal objects share, and tensors on the same memory."""
    if isinstance(part, torch.Tensor):
        with contextlib.suppress(Exception):  # without a storage
            return part.untyped_storage().data_ptr() or id(part)
    return id(part)


def name_function(function: Any) -> Any:
    """Return the module and name of a global function, for a message that needs no pickler of functions, or itself."""
    if not isinstance(function, types.FunctionType):
        return function
    module, name = function.__module__, function.__qualname__
    if module == "__main__":
        return (module, name) if vars(sys.modules["__main__"]).get(name) is function else function
    is_shared = "." not in name and is_found_by_name(function) and not goes_by_value(module)
    return (module, name) if is_shared else function


def _is_global(name: str) -> bool:
    return name in vars(sys.modules["__main__"])


class _GlobalSearch:
    """Walks over the globals that a call uses, and collects those that the ranks lack.

    Attributes:
        definitions: The definitions to send, by name.
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
        self.definitions: dict[str, _Definition] = {}
        self.values: dict[str, Any] = {}
        self.sources: dict[str, list[str]] = {}
        self.sent: dict[str, _Sent] = {}
        self.uses_objects = False

    def order_definitions(self) -> list[tuple[tuple[str, ...], bytes, dict[str, list[str]]]]:
        """Return the pickles of the definitions, each after those that it needs. Circular ones share one pickle.

        With each come its names, and the attributes of its classes.
        """
        pending, ordered = dict(self.definitions), []
        while pending:
            names = [name for name, each in pending.items() if not each.required & pending.keys() - {name}]
            if names:
                ordered += [_entry((name,), pending[name].pickled, self.definitions) for name in names]
            else:
                names = [*pending]
                together = {name: each.value for name, each in pending.items()}
                ordered.append(_entry(tuple(names), pickle_definition(names, together, _is_global)[0], self.definitions))
            for name in names:
                del pending[name]
        return ordered

    def visit_all(self, pickler: ScriptPickler, user: str) -> None:
        """Visit the globals that a pickle needs or whose names its functions use."""
        self.sources |= pickler.sources
        for name in (*pickler.required, *pickler.used):
            self.visit(name, user)
        for name in pickler.assigned:
            self._visit_assigned(name, user)
        if pickler.reads_names:
            self._visit_any(user)

    def visit(self, name: str, user: str, *, again: bool = False) -> None:
        """Visit a global that `user` uses, and the globals that it uses itself. Send it `again` even if it is unchanged."""
        if (name in self.seen and not again) or name not in self._main:
            return
        self.seen.add(name)
        value = self._main[name]
        before = None if again else self._known.get(name)
        if isinstance(value, DEFINITIONS):
            self._visit_definition(name, value, before, user)
        elif (content := content_of(value)) is not None:
            self._visit_plain(name, value, content, before, user)
        else:
            self._visit_object(name, value, before, user)

    def _visit_any(self, user: str) -> None:
        """Visit all globals that can be sent, for a function that reads names, such as one that calls `eval`."""
        for name in names_of_script()[0]:
            with contextlib.suppress(UnsendableError):  # it may not be needed
                self.visit(name, user)

    def _visit_assigned(self, name: str, user: str) -> None:
        """Send the first value of a global that functions only assign: perhaps not all ranks do."""
        if name not in self._known and name not in self._owned:
            with contextlib.suppress(UnsendableError):  # it may not be needed
                self.visit(name, user)

    def _revisit(self, name: str, before: _Sent) -> None:
        """Visit the globals that an unchanged one uses."""
        for each in before.needs:
            self.visit(each, name)
        if before.reads_names:
            self._visit_any(name)

    def _visit_definition(self, name: str, value: Any, before: _Sent | None, user: str) -> None:
        content = content_of_definition(value)
        if before is not None and content is not None and content == before.content:
            self._revisit(name, before)
            return
        pickled, pickler = pickle_definition([name], value, _is_global)
        content = pickled if content is None else content
        if before is None or content != before.content:
            self._check_owner(name, user)
            self.definitions[name] = _Definition(value, pickled, frozenset(pickler.required))
            self.sent[name] = _make_sent(pickler, content, parts=_parts_of(pickler, is_learned_state))
        self.visit_all(pickler, name)

    def _visit_plain(self, name: str, value: Any, content: Any, before: _Sent | None, user: str) -> None:
        if before is not None and before.content == content and (before.holder is None or before.holder() is value):
            self._revisit(name, before)
            return
        self._check_owner(name, user)
        pickler = walk(value, f"the global {name!r}", ScriptPickler, _is_global)[1]
        self.values[name] = value
        parts = {id(each): reference_to(each) for each in containers_in(value)}
        holder = reference_to(value) if id(value) in parts else None
        self.sent[name] = _make_sent(pickler, content, parts=parts, holder=holder, is_plain=True)
        self.visit_all(pickler, name)

    def _visit_object(self, name: str, value: Any, before: _Sent | None, user: str) -> None:
        self.uses_objects = True
        if before is None:
            self._check_owner(name, user)
        pickled, pickler = walk(value, f"the global {name!r}", DigestPickler, _is_global)
        digest = hashlib.blake2b(pickled).digest()
        if before is not None and before.holder is not None and before.holder() is value:
            if before.content != digest:
                msg = (
                    f"the global {name!r}, a {type(value).__qualname__}, was changed in place after the ranks received it, "
                    f"and {user} uses it. The ranks have their own: pass it as an argument, change it in a function that "
                    "the ranks call, or assign a copy to the name to replace theirs"
                )
                raise UnsendableError(msg)
            self._revisit(name, before)
            return
        self._check_owner(name, user)
        by_value = walk(value, f"the global {name!r}", ScriptPickler, _is_global)[1]
        self.values[name] = value
        self.sent[name] = _make_sent(
            by_value, digest, parts=_parts_of(by_value), holder=reference_to(value), kept=pickler.definitions
        )
        self.visit_all(by_value, name)

    def _check_owner(self, name: str, user: str) -> None:
        if name in self._owned:
            msg = (
                f"the global {name!r}, which {user} uses, was assigned in the ranks, and this process assigned it too: it "
                "is unclear which value is meant. Rename one of the two, or delete it here to use that of the ranks: "
                f"del {name}"
            )
            raise UnsendableError(msg)


def _make_sent(pickler: ScriptPickler, content: Any, **others: Any) -> _Sent:
    needs = (*pickler.required, *pickler.used)
    return _Sent(content, needs=needs, reads_names=pickler.reads_names, **others)


def _entry(
    names: tuple[str, ...], pickled: bytes, definitions: Mapping[str, _Definition]
) -> tuple[tuple[str, ...], bytes, dict[str, list[str]]]:
    values = {name: definitions[name].value for name in names}
    return names, pickled, {name: [*vars(value)] for name, value in values.items() if isinstance(value, type)}


def _parts_of(pickler: ScriptPickler, is_part: Callable[[Any], bool] = has_state) -> dict[int, Callable[[], Any]]:
    """Return references to the objects in a pickle that two globals must not hold as two copies, by their ids."""
    return {_key_of(each): reference_to(each) for each in pickler.objects if is_part(each)}
