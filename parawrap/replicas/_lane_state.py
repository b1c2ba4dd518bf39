"""The state that calls leave in one replica. Each call starts from the model's state, so the next one drops it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain
from operator import is_, is_not
from typing import Any

import torch

from parawrap.errors import ReplicaError
from parawrap.replicas._copy_rules import Cell, Dict, Instance
from parawrap.replicas._copy_structure import Copy, Node, Survey
from parawrap.replicas._detect_changes import Lengths, is_watched_apart, parts_of
from parawrap.replicas._private_names import BUFFERS, CHILDREN, PARAMETERS
from parawrap.replicas._replica_tensors import Tensors
from parawrap.replicas._rule_by_class import ATOMS

__all__ = ["LaneState"]

_NOT_STATE = frozenset({BUFFERS, PARAMETERS})  # tensors have rules of their own
_NEW = object()


class LaneState:
    """The values in the dicts, instances, and lists of one replica. Used while the lane is idle, or in the lane."""

    def __init__(self, survey: Survey, copy: Copy, tensors: Tensors) -> None:
        self._survey = survey
        self._copy = copy
        self._tensors = tensors
        nodes = [node for node in survey.makeable if node.key not in _NOT_STATE]
        self._nodes = [node for node in nodes if isinstance(node.content, Dict) or _has_dict(node)]
        copies = [copy.of(node.value) for node in self._nodes]
        self._dicts: list[Any] = [
            each if isinstance(node.content, Dict) else vars(each) for node, each in zip(self._nodes, copies, strict=True)
        ]
        self._others = [(node, copy.of(node.value)) for node in nodes if is_watched_apart(node)]
        self._growing = [(node, copy.of(node.value)) for node in survey.makeable if node.key in (CHILDREN, PARAMETERS)]
        self._grown_from = [dict(own) for _, own in self._growing]
        self.accept()

    def accept(self) -> None:
        """Take the values of now for the values that each call starts from."""
        self._views = [own.values() for own in self._dicts if own]  # live
        self._keys = [list(own) for own in self._dicts]
        self._sized = Lengths(self._dicts)
        self._values = [*chain.from_iterable(self._views)]  # a dict that is empty now must stay empty
        self._parts = [parts_of(node, own) for node, own in self._others]

    def restore(self) -> None:
        """Put back the values that calls replaced."""
        if not self.is_intact():
            self._restore()

    def is_intact(self) -> bool:
        """True if no call replaced a value."""
        same = self._sized.intact() and all(map(is_, chain.from_iterable(self._views), self._values))
        return same and (not self._others or self._others_are_intact())

    def _restore(self) -> None:
        given, fresh = [*self._given()], self._fresh()
        for own, values in zip(self._dicts, given, strict=True):
            if id(own) not in fresh and _differ(own, values):
                kind = OrderedDict if isinstance(own, OrderedDict) else dict
                kind.clear(own)
                kind.update(own, {key: fresh.get(id(value), value) for key, value in values.items()})
        for (node, own), parts in zip(self._others, self._parts, strict=True):
            if id(own) not in fresh and _list_differs(parts_of(node, own), parts):
                node.content.put_back(own, [fresh.get(id(part), part) for part in parts])
        if fresh:
            self._dicts = [fresh.get(id(own), own) for own in self._dicts]
            self._others = [(node, fresh.get(id(own), own)) for node, own in self._others]
            self.accept()

    def _fresh(self) -> dict[int, Any]:
        """Copies for containers that a call changed and then took out of the model: they may be in its output."""
        dicts = zip(self._nodes, self._dicts, self._given(), strict=True)
        changed = [(node, own) for node, own, given in dicts if isinstance(node.content, Dict) and _differ(own, given)]
        others = zip(self._others, self._parts, strict=True)
        changed += [
            pair
            for pair, parts in others
            if not isinstance(pair[0].content, Instance | Cell) and _list_differs(parts_of(*pair), parts)
        ]
        return {id(own): self._copy.make(node) for node, own in changed if not self._is_held(node, own)}

    def _is_held(self, node: Node, own: Any) -> bool:
        """True if a container is still where the model has its original."""
        for holder in self._survey.holders(node.value):
            copy = self._copy.of(holder.value)
            if any(part is own for _, part in (*holder.content.parts(copy), *holder.content.references(copy))):
                return True
        return False

    def _others_are_intact(self) -> bool:
        return not any(
            _list_differs(parts_of(node, own), parts) for (node, own), parts in zip(self._others, self._parts, strict=True)
        )

    @property
    def growing(self) -> list[dict[str, Any]]:
        """The dicts of submodules and parameters."""
        return [own for _, own in self._growing]

    def refuse_grown(self) -> None:
        """Refuse a module that makes or replaces layers or parameters in a call.

        Raises:
            ReplicaError: If the lane made or replaced one. The message names the place.
        """
        for (node, own), given in zip(self._growing, self._grown_from, strict=True):
            name = next((name for name in own if own[name] is not given.get(name)), None)
            if name is not None and node.parent is not None:
                place = f"{self._survey.path(node.parent)}.{name}".lstrip(".")
                msg = (
                    f"{type(node.parent.value).__name__} makes {place!r} in forward, and each lane made its own, which "
                    "learns nothing. Make it before the block, for instance by a call of the model"
                )
                raise ReplicaError(msg)

    def changed(self) -> list[str]:
        """Return the places of attributes and items that a call set or removed."""
        return [repr(f"{self._survey.path(node)}{node.content.place(key)}".lstrip(".")) for node, key in self._replaced()]

    def _given(self) -> Iterator[dict[Any, Any]]:
        values = iter(self._values)
        for keys in self._keys:
            yield dict(zip(keys, values, strict=False))

    def _replaced(self) -> Iterator[tuple[Node, Any]]:
        """Yield the place of each value that a call set, and that later calls of the model would have read."""
        for node, own, given in zip(self._nodes, self._dicts, self._given(), strict=True):
            if isinstance(node.content, Dict) and not self._is_held(node, own):
                continue  # a call took it out of the model
            for key, now in own.items():
                if self._counts(key, given.get(key, _NEW), now, own):
                    yield node, key
            for key in given:
                if key not in own and key not in _NOT_STATE:
                    yield node, key
        for (node, own), parts in zip(self._others, self._parts, strict=True):
            if (
                not isinstance(node.content, Cell)
                and _list_differs(parts_of(node, own), parts)
                and self._is_held(node, own)
            ):
                yield node, len(parts)

    def _counts(self, key: Any, before: Any, now: Any, own: Any) -> bool:
        """True for another value, unless a hook of torch computes it at each call."""
        if now is before or key in _NOT_STATE or key == CHILDREN:
            return False
        if type(now) in ATOMS:
            return before is _NEW or type(before) is not type(now) or bool(now != before)
        parameters = own.get(PARAMETERS)
        if isinstance(parameters, dict) and (f"{key}_orig" in parameters or f"{key}_v" in parameters):
            return False
        return not isinstance(now, torch.Tensor) or self._tensors.original_of(now) is None


def _differ(own: dict[Any, Any], given: dict[Any, Any]) -> bool:
    return len(own) != len(given) or any(map(is_not, own.values(), given.values()))


def _list_differs(now: list[Any], before: list[Any]) -> bool:
    return len(now) != len(before) or any(map(is_not, now, before))


def _has_dict(node: Node) -> bool:
    return isinstance(node.content, Instance) and hasattr(node.value, "__dict__")
