"""The objects in the containers of a target at one moment: what changed since, and putting it back.

The check runs before every call and after every task. It reads lengths, keys, and values in C, and works out the
differences only if something changed. It uses public operations only.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Iterable
from itertools import accumulate, chain, compress, count
from operator import is_, is_not
from typing import Any, NamedTuple

from parawrap.replicas._parts import Kind, attributes_of, parts_of, references_of, slots_of
from parawrap.replicas._survey import Node
from parawrap.replicas._torchscript import ScriptedState

__all__ = ["ABSENT", "Change", "Snapshot"]

ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "ABSENT"})()
_PLAIN_DICTS = (dict, OrderedDict)
_WITHOUT_ATTRIBUTES = frozenset({dict, OrderedDict, list, deque, set})  # an OrderedDict could have some, and has none
_LISTED = frozenset({Kind.LIST, Kind.SET, Kind.WEAK_DICT, Kind.CELL, Kind.FUNCTION, Kind.PARTIAL})


class Change(NamedTuple):
    """A value of a dict or an instance that was set, replaced, or removed. `ABSENT` stands for no value.

    For a list and the like, `key` is None, and the values are lists of the parts.
    """

    node: Node
    key: Any
    before: Any
    now: Any


class Snapshot:
    """The objects that containers hold, by identity. `places` are nodes of a target, each with itself or its copy."""

    def __init__(self, places: Iterable[tuple[Node, Any]]) -> None:
        places = [*places]
        instances = [(node, each) for node, each in places if _has_dict(node, each)]
        dicts = [(node, each) for node, each in places if node.kind is Kind.DICT]
        self._instances = [each for _, each in instances]
        self._classes = [*map(type, self._instances)]
        self._own: list[Any] = [*map(vars, self._instances)]
        self._nodes = [node for node, _ in (*instances, *dicts)]
        self._dicts: list[dict[Any, Any]] = [*self._own, *(each for _, each in dicts)]
        self._listed = [(node, each) for node, each in places if _is_listed(node, each)]
        self._scripts = [ScriptedState(each) for node, each in places if node.kind is Kind.SCRIPT and each is node.value]
        self.accept()

    def accept(self) -> None:
        """Take the objects of now for those that the containers must hold."""
        # Most dicts of a model are empty hooks, and their truth is read faster than their length.
        self._empty = [each for each in self._dicts if type(each) in _PLAIN_DICTS and not each]
        filled = [index for index, each in enumerate(self._dicts) if type(each) not in _PLAIN_DICTS or each]
        self._filled = [self._dicts[index] for index in filled]
        self._owners = [self._nodes[index] for index in filled]
        self._lengths = [*map(dict.__len__, self._filled)]
        self._ends = [*accumulate(self._lengths)]
        self._starts: dict[int, tuple[int, int]] = {}
        # The views are live, so they are made once.
        self._key_views = [_kind(each).keys(each) for each in self._filled]
        self._value_views = [_kind(each).values(each) for each in self._filled]
        self._keys = [*chain.from_iterable(self._key_views)]
        self._keys_are_names = {str}.issuperset(map(type, self._keys))
        self._values = [*chain.from_iterable(self._value_views)]
        self._parts = [_listed_parts(node, each) for node, each in self._listed]

    def intact(self) -> bool:
        """True if every container holds the same objects under the same keys, and is itself the same."""
        return self.holds_the_same() and self._has_identities()

    def holds_the_same(self) -> bool:
        """True if every container holds the same objects under the same keys."""
        return (
            self._has_lengths()
            and all(map(is_, chain.from_iterable(self._value_views), self._values))
            and self._has_keys()
            and (not self._listed or self._has_parts())
        )

    def changes(self) -> list[Change] | None:
        """Return the changes; None if an object got another class or ``__dict__``, or a scripted module changed."""
        if not self._has_identities():
            return None
        found: list[Change] = []
        if self._has_lengths() and self._has_keys():
            now = [*chain.from_iterable(self._value_views)]
            for index in compress(count(), map(is_not, now, self._values)):
                owner = self._owners[bisect_right(self._ends, index)]
                found.append(Change(owner, self._keys[index], self._values[index], now[index]))
        else:
            for node, own, given in self._given():
                keys = dict.fromkeys((*given, *dict.keys(own)))
                pairs = ((key, given.get(key, ABSENT), dict.get(own, key, ABSENT)) for key in keys)
                found += [Change(node, *pair) for pair in pairs if pair[1] is not pair[2]]
        for (node, each), parts in zip(self._listed, self._parts, strict=True):
            now = _listed_parts(node, each)
            if _differ(now, parts):
                found.append(Change(node, None, parts, now))
        return found

    def set(self, own: dict[Any, Any], key: Any, value: Any) -> None:
        """Set the value that a dict must hold under a key that it has."""
        if not self._starts:
            bounds = zip([0, *self._ends], self._ends, strict=False)
            self._starts = {id(each): pair for each, pair in zip(self._filled, bounds, strict=False)}
        if id(own) in self._starts:
            start, end = self._starts[id(own)]
            self._values[self._keys.index(key, start, end)] = value

    def restore(self) -> None:
        """Put everything back, except the classes of objects."""
        for each, own in zip(self._instances, self._own, strict=True):
            if vars(each) is not own:
                object.__setattr__(each, "__dict__", own)
        for _, own, given in self._given():
            if len(own) != len(given) or any(map(is_not, _kind(own).values(own), given.values())) or [*own] != [*given]:
                _kind(own).clear(own)
                _kind(own).update(own, given)
        for (node, each), parts in zip(self._listed, self._parts, strict=True):
            if _differ(_listed_parts(node, each), parts):
                _put_back(node, each, parts)

    def parts_before(self, value: Any) -> list[Any]:
        """Return what a container held; the container may have changed since."""
        for _, own, given in self._given():
            if own is value:
                return [*given.values()]
        return next((parts for (_, each), parts in zip(self._listed, self._parts, strict=True) if each is value), [])

    def _given(self) -> Iterable[tuple[Node, dict[Any, Any], dict[Any, Any]]]:
        """Yield each dict with what it held."""
        bounds = zip(self._owners, self._filled, [0, *self._ends], self._ends, strict=False)
        for node, own, start, end in bounds:
            yield node, own, dict(zip(self._keys[start:end], self._values[start:end], strict=True))
        filled = set(map(id, self._filled))
        for node, own in zip(self._nodes, self._dicts, strict=True):
            if id(own) not in filled:
                yield node, own, {}

    def _has_lengths(self) -> bool:
        return not any(self._empty) and [*map(dict.__len__, self._filled)] == self._lengths

    def _has_keys(self) -> bool:
        keys = chain.from_iterable(self._key_views)
        if self._keys_are_names:  # equal strings are one key, and lists are compared in C
            return [*keys] == self._keys
        return all(map(is_, keys, self._keys))

    def _has_identities(self) -> bool:
        return (
            all(map(is_, map(type, self._instances), self._classes))
            and all(map(is_, map(vars, self._instances), self._own))
            and all(state.intact() for state in self._scripts)
        )

    def _has_parts(self) -> bool:
        pairs = zip(self._listed, self._parts, strict=True)
        return not any(_differ(_listed_parts(node, each), parts) for (node, each), parts in pairs)


def _has_dict(node: Node, value: Any) -> bool:
    if node.kind in (Kind.MODULE, Kind.COMPILED):
        return True
    if type(value) in _WITHOUT_ATTRIBUTES:
        return False
    own = getattr(value, "__dict__", None)
    if type(own) is not dict or own is value:
        return False
    return node.kind is Kind.INSTANCE or (node.kind in (Kind.DICT, Kind.LIST, Kind.SET) and bool(own))


def _is_listed(node: Node, value: Any) -> bool:
    """True if an object keeps parts elsewhere than in a dict."""
    return node.kind in _LISTED or (node.kind in (Kind.INSTANCE, Kind.MODULE) and bool(slots_of(type(value))))


def _listed_parts(node: Node, value: Any) -> list[Any]:
    """Return the parts of a list and the like; of an instance with slots, the names and the values of its attributes."""
    match node.kind:
        case Kind.LIST | Kind.SET:
            return [*value]
        case Kind.INSTANCE | Kind.MODULE:
            return [*chain.from_iterable(attributes_of(value))]
        case _:
            return [part for _, part in (*parts_of(value, node.kind), *references_of(value, node.kind))]


def _put_back(node: Node, value: Any, parts: list[Any]) -> None:
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
