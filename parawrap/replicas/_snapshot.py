"""The objects in the containers of a target at one moment: what changed since, and putting it back.

The check runs before every call and after every task. It reads lengths, keys, and values in C, and works out the
differences only if something changed. It uses public operations only.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from itertools import chain
from operator import attrgetter, is_, is_not
from typing import Any, NamedTuple

from parawrap.replicas._parts import Kind, attributes_of, parts_of, references_of, slots_of
from parawrap.replicas._survey import SurveyNode
from parawrap.replicas._torchscript import ScriptedState

__all__ = ["ABSENT", "Change", "Snapshot"]

ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "ABSENT"})()
_PLAIN_DICTS = (dict, OrderedDict)
_WITHOUT_ATTRIBUTES = frozenset({dict, OrderedDict, list, deque, set})  # an OrderedDict could have some, and has none
_LISTED = frozenset({Kind.LIST, Kind.SET, Kind.WEAK_DICT, Kind.CELL, Kind.FUNCTION, Kind.PARTIAL})
_own_dict = attrgetter("__dict__")  # faster than `vars`


class Change(NamedTuple):
    """A value of a dict or an instance that was set, replaced, or removed. `ABSENT` stands for no value.

    For a list and the like, `key` is None, and the values are lists of the parts; for a dict in another order, of the keys.
    """

    node: SurveyNode
    key: Any
    before: Any
    now: Any


class Snapshot:
    """The objects that containers hold, by identity. `places` are nodes of a target, each with itself or its copy."""

    def __init__(self, places: Iterable[tuple[SurveyNode, Any]]) -> None:
        places = [*places]
        instances = [(node, each) for node, each in places if _has_dict(node, each)]
        dicts = [(node, each) for node, each in places if node.kind is Kind.DICT]
        self._instances = [each for _, each in instances]
        self._classes = [*map(type, self._instances)]
        self._own: list[Any] = [*map(vars, self._instances)]
        self._dicts: list[tuple[SurveyNode, Any]] = [*((node, vars(each)) for node, each in instances), *dicts]
        self._listed = [(node, each) for node, each in places if _is_listed(node, each)]
        self._scripts = [ScriptedState(each) for node, each in places if node.kind is Kind.SCRIPT and each is node.value]
        self.accept()

    def accept(self) -> None:
        """Take the objects of now for those that the containers must hold."""
        self._before = {id(own): dict(_kind(own).items(own)) for _, own in self._dicts}
        self._parts = [_list_parts(node, each) for node, each in self._listed]
        # Most dicts of a model are empty hooks, and their truth is read faster than their length.
        self._empty = [own for _, own in self._dicts if type(own) in _PLAIN_DICTS and not self._before[id(own)]]
        known = set(map(id, self._empty))
        self._filled = [own for _, own in self._dicts if id(own) not in known]
        self._lengths = [*map(dict.__len__, self._filled)]
        # The views are live, so they are made once.
        self._key_views = [_kind(own).keys(own) for own in self._filled]
        self._value_views = [_kind(own).values(own) for own in self._filled]
        self._flatten()

    def take(self, changes: Iterable[Change]) -> None:
        """Take the new values of these changes of dicts for those that the dicts must hold. They keep their keys."""
        for change in changes:
            own = change.node.value if change.node.kind is Kind.DICT else vars(change.node.value)
            self._before[id(own)][change.key] = change.now
        self._flatten()

    def intact(self) -> bool:
        """True if every container holds the same objects under the same keys, and is itself the same."""
        return (
            not any(self._empty)
            and [*map(dict.__len__, self._filled)] == self._lengths
            and all(map(is_, chain.from_iterable(self._value_views), self._values))
            and self._has_keys()
            and next(self._find_changed_parts(), None) is None
            and self._has_identities()
        )

    def changes(self) -> list[Change] | None:
        """Return the changes; None if an object got another class or ``__dict__``, or a scripted module changed."""
        if not self._has_identities():
            return None
        found: list[Change] = []
        for node, own, before in self._find_changed_dicts():
            keys = dict.fromkeys((*before, *dict.keys(own)))
            pairs = ((key, before.get(key, ABSENT), dict.get(own, key, ABSENT)) for key in keys)
            found += [Change(node, *pair) for pair in pairs if pair[1] is not pair[2]]
            order = [*_kind(own).keys(own)]
            if before.keys() == dict.keys(own) and _differ(order, [*before]):
                found.append(Change(node, None, [*before], order))
        for node, each, parts in self._find_changed_parts():
            found.append(Change(node, None, parts, _list_parts(node, each)))
        return found

    def return_dicts(self) -> None:
        """Give each object its own ``__dict__`` back. The items of a dict that a call put in its place are kept."""
        for each, own in zip(self._instances, self._own, strict=True):
            now = vars(each)
            if now is not own:
                own.clear()
                own.update(now)
                object.__setattr__(each, "__dict__", own)

    def restore(self) -> None:
        """Put everything back, except the classes of objects."""
        self.return_dicts()
        for _, own, before in self._find_changed_dicts():
            _kind(own).clear(own)
            _kind(own).update(own, before)
        for node, each, parts in self._find_changed_parts():
            _put_back(node, each, parts)

    def parts_before(self, value: Any) -> list[Any]:
        """Return what a container held; the container may have changed since."""
        if id(value) in self._before:
            return [*self._before[id(value)].values()]
        return next((parts for (_, each), parts in zip(self._listed, self._parts, strict=True) if each is value), [])

    def _flatten(self) -> None:
        before = [self._before[id(own)] for own in self._filled]
        self._keys = [*chain.from_iterable(before)]
        self._values = [*chain.from_iterable(map(dict.values, before))]
        self._keys_are_names = {str}.issuperset(map(type, self._keys))

    def _find_changed_dicts(self) -> Iterator[tuple[SurveyNode, Any, dict[Any, Any]]]:
        """Yield each dict that has changed, with its earlier items."""
        for node, own in self._dicts:
            before = self._before[id(own)]
            if not (before or own):
                continue
            values, keys = [*_kind(own).values(own)], [*_kind(own).keys(own)]
            if _differ(values, [*before.values()]) or _differ(keys, [*before]):
                yield node, own, before

    def _find_changed_parts(self) -> Iterator[tuple[SurveyNode, Any, list[Any]]]:
        """Yield each list and the like that has changed, with the parts that it held."""
        for (node, each), parts in zip(self._listed, self._parts, strict=True):
            if _differ(_list_parts(node, each), parts):
                yield node, each, parts

    def _has_keys(self) -> bool:
        keys = chain.from_iterable(self._key_views)
        if self._keys_are_names:  # equal strings are one key, and lists are compared in C
            return [*keys] == self._keys
        return all(map(is_, keys, self._keys))

    def _has_identities(self) -> bool:
        return (
            [*map(type, self._instances)] == self._classes
            and all(map(is_, map(_own_dict, self._instances), self._own))
            and all(state.intact() for state in self._scripts)
        )


def _has_dict(node: SurveyNode, value: Any) -> bool:
    if node.kind in (Kind.MODULE, Kind.COMPILED):
        return True
    if type(value) in _WITHOUT_ATTRIBUTES:
        return False
    own = getattr(value, "__dict__", None)
    if type(own) is not dict or own is value:
        return False
    return node.kind is Kind.INSTANCE or (node.kind in (Kind.DICT, Kind.LIST, Kind.SET) and bool(own))


def _is_listed(node: SurveyNode, value: Any) -> bool:
    """True if an object keeps parts elsewhere than in a dict."""
    return node.kind in _LISTED or (node.kind in (Kind.INSTANCE, Kind.MODULE) and bool(slots_of(type(value))))


def _list_parts(node: SurveyNode, value: Any) -> list[Any]:
    """Return the parts of a list and the like; of an instance with slots, the names and the values of its attributes."""
    match node.kind:
        case Kind.LIST | Kind.SET:
            return [*value]
        case Kind.INSTANCE | Kind.MODULE:
            return [*chain.from_iterable(attributes_of(value))]
        case _:
            return [part for _, part in (*parts_of(value, node.kind), *references_of(value, node.kind))]


def _put_back(node: SurveyNode, value: Any, parts: list[Any]) -> None:
    match node.kind:
        case Kind.LIST:
            kind: Any = deque if isinstance(value, deque) else list
            kind.clear(value)
            kind.extend(value, parts)
        case Kind.SET:
            set.clear(value)
            set.update(value, parts)
        case Kind.CELL:
            with contextlib.suppress(ValueError):
                (value.cell_contents,) = parts
        case Kind.INSTANCE | Kind.MODULE:
            given = dict(zip(parts[::2], parts[1::2], strict=True))
            for name, slot in slots_of(type(value)):
                if name in given:
                    slot.__set__(value, given[name])
                else:
                    with contextlib.suppress(AttributeError):
                        slot.__delete__(value)


def _differ(now: list[Any], before: list[Any]) -> bool:
    return len(now) != len(before) or any(map(is_not, now, before))


def _kind(own: dict[Any, Any]) -> Any:
    """Return the class with the methods that read a dict: an OrderedDict has its own order."""
    return OrderedDict if isinstance(own, OrderedDict) else dict
