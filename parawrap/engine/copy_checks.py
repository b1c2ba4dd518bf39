"""Checks that no other thread disturbed a copy of the model.

A copy that failed may succeed once more (`was_disturbed`). A copy that succeeded is compared with
the model's snapshot (`set_plain_values`): while `copy.deepcopy` ran, another thread may have
registered a hook, or set an attribute, and taken that back before the model was looked at again. No
look at the model shows that. And a loop over a dict that gets and loses an entry may leave out
others.
"""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from operator import is_
from typing import Any, NamedTuple

from parawrap._private_names import COMPILED_CALL, HOOK_TABLES
from parawrap.engine.model_state import Container, Snapshot
from parawrap.engine.places import ALWAYS_NEW, SIMPLE, has_own_rules
from parawrap.tree import ABSENT

# Copies after an error and without a sign of a change; a guess that no test has contradicted: more
# changes leave a sign
_MOST_UNCHANGED = 2
_DICTS = (dict, OrderedDict)
# Copies of these have the entries in the same order. A set has no order, and a cell is filled later
_IN_ORDER = ALWAYS_NEW - {set, types.CellType}

Key = tuple[int, str]
"""The key of a place."""


def was_disturbed(error: Exception, snapshot: Snapshot | None, copies: int) -> bool:
    """True if a copy may have failed because another thread changed the model meanwhile.

    `snapshot` is that of the model before the copy, and `copies` how many were tried.
    """
    if snapshot is not None and not snapshot.is_same():
        return True
    # A change may also have come and gone. Python's error about a dict that changes under a loop is
    # a plain RuntimeError
    cause = error.__cause__ or error
    return type(cause) is RuntimeError and copies <= _MOST_UNCHANGED


class PlainPart(NamedTuple):
    """A container that the model and its copies hold alike.

    Attributes:
        key: The key of its place.
        held: What the model's holds, as far as copies must have it.
        may_have_more: True if copies may hold further entries.
    """

    key: Key
    held: Any
    may_have_more: bool = False


def read_plain_parts(model: Snapshot, left_out: Collection[Key]) -> list[PlainPart]:
    """Return what each copy of the model must hold too, without the places of these keys.

    Parts of classes that say how they are copied are left out.
    """
    found: list[PlainPart] = []
    rules: dict[type, bool] = {}  # not a cache of the process: it would keep classes alive
    for key, container in model.containers.items():
        cls = type(container.owner)
        if cls not in rules:
            rules[cls] = has_own_rules(cls)
        if rules[cls] or key in left_out:
            continue
        names = _find_uncopied_names(container)
        if names:
            held = {name: part for name, part in container.before.items() if name not in names}
            found.append(PlainPart(key, held, may_have_more=True))
        elif _has_order(container):
            found.append(PlainPart(key, container.before))
    return found


def _find_uncopied_names(container: Container) -> set[str]:
    """Return the attributes that copies do not get: the stubs of a block, and compiled code."""
    if container.place.kind != "vars":
        return set()
    names: set[str] = {COMPILED_CALL} & container.before.keys()
    if hasattr(container.own, "names_of_stubs"):  # the view of a block's own module
        names.update(container.own.names_of_stubs(), {COMPILED_CALL})
    return names


def _has_order(container: Container) -> bool:
    """True if copies hold the same entries in the same order."""
    if type(container.owner) in _IN_ORDER:
        return True
    # A class of the user's may order its items itself, but not its attributes
    return container.place.kind != "items" and type(container.own) in _DICTS


def set_plain_values(
    replica: Snapshot, parts: Sequence[PlainPart], copy_of: Callable[[int, Any], Any]
) -> Key | None:
    """Set numbers, flags, and texts of a new replica to those of the model.

    `copy_of` takes the id of a part of the model, and the part, and returns its copy, or the part
    if lanes share it.

    Return the key of a place that holds something else; None if there is none.
    """
    has_set_values = False
    for part in parts:
        mine = replica.containers.get(part.key)
        if mine is None:  # of an object that all lanes use
            continue
        held, before = part.held, mine.before
        if part.may_have_more:
            before = {name: before.get(name, ABSENT) for name in held}
        if len(before) != len(held):
            return part.key
        # The keys of hooks are numbers. Other keys may be copies, which equal nothing
        if mine.place.kind in HOOK_TABLES and [*before] != [*held]:
            return part.key
        is_dict = isinstance(held, dict)
        values = [*held.values()] if is_dict else held
        now = before.values() if is_dict else before
        expected = [*map(copy_of, map(id, values), values)]
        if all(map(is_, now, expected)):
            continue
        if not is_dict or before.keys() != held.keys():
            return part.key
        for name, value in zip(held, expected, strict=True):
            if before[name] is value:
                continue
            if type(value) not in SIMPLE or type(before[name]) not in SIMPLE:
                return part.key
            dict.__setitem__(mine.own, name, value)
            mine.before[name] = value
            has_set_values = True
    if has_set_values:
        replica.note()
    return None
