"""Checks that no other thread disturbed a copy of the model.

A copy that failed may succeed if it is repeated (`was_disturbed`). A copy that succeeded is
compared with the model's snapshot (`set_plain_values`): while `copy.deepcopy` ran, another thread
may have registered a hook, or set an attribute, and removed it again. The copy may have it, and the
model no longer shows it. Such a change may also hide other entries from the loop that copies them.
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

# How many copies may fail with an error of Python while the snapshot shows no change of the model.
# A guess that no test has contradicted: a thread that goes on writing leaves a change that shows
_MOST_UNCHANGED = 2
_DICTS = (dict, OrderedDict)
# Copies of these have the entries in the same order. A set has no order. A cell gets its contents
# after the copy
_IN_ORDER = ALWAYS_NEW - {set, types.CellType}

Key = tuple[int, str]
"""The key of a place."""


def was_disturbed(error: Exception, snapshot: Snapshot | None, copies: int) -> bool:
    """True if a copy may have failed because another thread changed the model meanwhile.

    `snapshot` is that of the model before the copy; None if the model could not be read. `copies`
    is the number of copies so far, with this one.
    """
    if snapshot is not None and not snapshot.is_same():
        return True
    # The other thread may also have taken its change back. Python raises a RuntimeError itself, and
    # none of its subclasses, if a dict changes during a loop
    cause = error.__cause__ or error
    return type(cause) is RuntimeError and copies <= _MOST_UNCHANGED


class PlainPart(NamedTuple):
    """The entries of one container of the model that each copy must have too.

    Attributes:
        key: The key of its place.
        held: The entries: a dict for a dict, a list for all others.
        may_have_more: True if copies may hold further entries.
    """

    key: Key
    held: Any
    may_have_more: bool = False


def read_plain_parts(model: Snapshot, left_out: Collection[Key]) -> list[PlainPart]:
    """Return the entries of a model that each copy must have too.

    Leave out the places of the given keys, and objects of classes with their own rules for copies.
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
            entries = container.expected.items()
            held = {name: part for name, part in entries if name not in names}
            found.append(PlainPart(key, held, may_have_more=True))
        elif _has_order(container):
            found.append(PlainPart(key, container.expected))
    return found


def _find_uncopied_names(container: Container) -> set[str]:
    """Return the attributes that copies do not get: the stubs of a block, and compiled code."""
    if container.place.kind != "vars":
        return set()
    names: set[str] = {COMPILED_CALL} & container.expected.keys()
    if hasattr(container.live, "names_of_stubs"):  # the `PlainView` of a block's own module
        names.update(container.live.names_of_stubs())
    return names


def _has_order(container: Container) -> bool:
    """True if copies hold the same entries in the same order."""
    if type(container.owner) in _IN_ORDER:
        return True
    # A dict of the user's class may order its items itself, but an object not its attributes
    return container.place.kind != "items" and type(container.live) in _DICTS


def set_plain_values(
    replica: Snapshot, parts: Sequence[PlainPart], copy_of: Callable[[int, Any], Any]
) -> Key | None:
    """Set numbers, flags, and texts of a new replica to those of the model.

    `copy_of` takes the id of an object of the model, and the object. It returns the copy in the
    replica, or the object if lanes share it.

    Return the key of the first place that holds another object; None if there is no such place.
    """
    has_set_values = False
    for part in parts:
        container = replica.containers.get(part.key)
        if container is None:  # lanes share its owner
            continue
        held, now = part.held, container.expected
        if part.may_have_more:
            now = {name: now.get(name, ABSENT) for name in held}
        if len(now) != len(held):
            return part.key
        # Each copy of a table has the numbers of hooks as keys. Keys of other dicts may be copies,
        # which equal no key of the model
        if container.place.kind in HOOK_TABLES and [*now] != [*held]:
            return part.key

        is_dict = isinstance(held, dict)
        originals = [*held.values()] if is_dict else held
        copies = [*map(copy_of, map(id, originals), originals)]
        if all(map(is_, now.values() if is_dict else now, copies)):
            continue
        if not is_dict or now.keys() != held.keys():
            return part.key
        for name, value in zip(held, copies, strict=True):
            if now[name] is value:
                continue
            if type(value) not in SIMPLE or type(now[name]) not in SIMPLE:
                return part.key
            dict.__setitem__(container.live, name, value)
            container.expected[name] = value
            has_set_values = True
    if has_set_values:
        replica.note()
    return None
