"""Whether the structure of a target is what it was: the objects in every dict, list, set, and closure, by identity.

The check runs before every call, so it reads lengths, keys, and values in C, and works out the differences only if
something changed. It uses public operations only.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from operator import is_, is_not
from typing import Any, NamedTuple

import torch

from parawrap.replicas._contents import ATOMS, Cell, Content, Dict, Instance, List, Script, Set, Weak
from parawrap.replicas._script import ScriptedState
from parawrap.replicas._structure import Node

__all__ = ["Change", "Watch"]


class Change(NamedTuple):
    """A value of a dict or an instance that was replaced by another."""

    node: Node
    key: Any
    before: Any
    now: Any

    @property
    def keeps_form(self) -> bool:
        """True if outputs keep their form: a train mode, a number of the same class, a tensor for a tensor."""
        if isinstance(self.before, torch.Tensor) and isinstance(self.now, torch.Tensor):
            return True
        return self.key == "training" or type(self.before) is type(self.now) is float

    @property
    def is_of_atoms(self) -> bool:
        """True if neither value has parts."""
        return type(self.before) in ATOMS and type(self.now) in ATOMS


class Watch:
    """The structure of a target at one moment."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        nodes = list(nodes)
        self._owners = [node for node in nodes if isinstance(node.content, Instance)]
        self._instances = [node.value for node in self._owners if hasattr(node.value, "__dict__")]
        self._classes = [*map(type, self._instances)]
        self._own: list[Any] = [*map(vars, self._instances)]
        self._holders = [node for node in self._owners if hasattr(node.value, "__dict__")]
        self._holders += [node for node in nodes if isinstance(node.content, Dict)]
        self._dicts: list[dict[Any, Any]] = [*self._own, *(node.value for node in self._holders[len(self._own) :])]
        self._lengths = [*map(len, self._dicts)]
        self._filled = [each for each, length in zip(self._dicts, self._lengths, strict=True) if length]
        self._keys = [*chain.from_iterable(self._filled)]
        self._values = [*self._now()]
        self._others = [node for node in nodes if _is_watched_apart(node)]
        self._parts = [_parts_of(node) for node in self._others]
        self._scripts = [ScriptedState(node.value) for node in nodes if isinstance(node.content, Script)]

    def intact(self) -> bool:
        """True if every object still holds the same objects under the same keys."""
        return (
            [*map(len, self._dicts)] == self._lengths
            and all(map(is_, self._now(), self._values))
            and [*chain.from_iterable(self._filled)] == self._keys
            and all(map(is_, map(type, self._instances), self._classes))
            and all(map(is_, map(vars, self._instances), self._own))
            and (not self._others or self._others_are_intact())
            and all(state.intact() for state in self._scripts)
        )

    def changes(self) -> list[Change] | None:
        """Return the values that were replaced; None if anything else changed."""
        same_keys = [*map(len, self._dicts)] == self._lengths and [*chain.from_iterable(self._filled)] == self._keys
        same_owners = all(map(is_, map(type, self._instances), self._classes)) and all(
            map(is_, map(vars, self._instances), self._own)
        )
        if not (same_keys and same_owners and self._others_are_intact()):
            return None
        if not all(state.intact() for state in self._scripts):
            return None
        nodes = chain.from_iterable([node] * length for node, length in zip(self._holders, self._lengths, strict=True))
        rows = zip(nodes, self._keys, self._values, self._now(), strict=True)
        return [Change(*row) for row in rows if row[2] is not row[3]]

    def accept(self) -> None:
        """Take the values of now for what the structure is."""
        self._values = [*self._now()]

    def _now(self) -> Iterable[Any]:
        return chain.from_iterable([each.values() for each in self._filled])

    def _others_are_intact(self) -> bool:
        for node, before in zip(self._others, self._parts, strict=True):
            now = _parts_of(node)
            if len(now) != len(before) or any(map(is_not, now, before)):
                return False
        return True


def _is_watched_apart(node: Node) -> bool:
    content: Content = node.content
    if isinstance(content, List | Set | Weak | Cell):
        return True
    return isinstance(content, Instance) and not hasattr(node.value, "__dict__")


def _parts_of(node: Node) -> list[Any]:
    """The parts of an object that are not in a dict."""
    if isinstance(node.content, List):
        return list(node.value)
    parts = (*node.content.parts(node.value), *node.content.references(node.value))
    return [part for _, part in parts]
