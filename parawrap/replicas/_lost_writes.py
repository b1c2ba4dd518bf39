"""Changes that calls leave in lane 0 and the model never sees: attributes, items, new layers."""

from __future__ import annotations

from typing import Any

import torch

from parawrap.backends import warn_caller
from parawrap.errors import ReplicaError
from parawrap.replicas._contents import ATOMS, Dict, Instance, List
from parawrap.replicas._replica import Replica
from parawrap.replicas._structure import Node, Survey
from parawrap.tree import tensors_in

__all__ = ["LostWrites"]

_COMES_BACK = frozenset({"_buffers", "_parameters", "_modules"})
_MOST_NAMED = 3


class LostWrites:
    """The containers of one replica, as they were when it was made. All lanes run the same code, so one shows it."""

    def __init__(self, survey: Survey, replica: Replica) -> None:
        self._survey = survey
        self._replica = replica
        self._warned = False
        self._given: list[tuple[Node, Any, Any]] = []
        self._growing: list[tuple[Node, dict[str, Any], int]] = []
        for node in survey.makeable:
            copy = replica.copy.of(node.value)
            if isinstance(node.content, List):
                self._given.append((node, copy, list(copy)))
            elif isinstance(node.content, Dict) and node.key in ("_modules", "_parameters"):
                self._growing.append((node, copy, len(copy)))
            elif isinstance(node.content, Dict | Instance) and node.key not in _COMES_BACK:
                own = copy if isinstance(node.content, Dict) else getattr(copy, "__dict__", {})
                self._given.append((node, own, dict(own)))

    def set(self, node: Node, key: Any, value: Any) -> None:
        """Note a value that the caller set in the model, and that the replica has now."""
        for each, _, given in self._given:
            if each is node:
                given[key] = value

    @property
    def growing(self) -> list[dict[str, Any]]:
        """The dicts of submodules and parameters of the replica's modules."""
        return [copy for _, copy, _ in self._growing]

    def refuse_grown(self) -> None:
        """Refuse a module that makes layers or parameters in a call.

        Raises:
            ReplicaError: If the lane made one. The message names it.
        """
        for node, copy, length in self._growing:
            if len(copy) > length and node.parent is not None:
                name = next(name for name in copy if name not in node.value)
                place = f"{self._survey.path(node.parent)}.{name}".lstrip(".")
                msg = (
                    f"{type(node.parent.value).__name__} makes {place!r} in forward, and each lane made its own. Call the "
                    "model once before the block, so that it exists when the replicas are made"
                )
                raise ReplicaError(msg)

    def warn_once(self) -> None:
        """Warn if a call replaced attributes or items that the model had."""
        if self._warned:
            return
        names = [self._name(node, key) for node, own, given in self._given for key in self._replaced(own, given)]
        if names:
            self._warned = True
            more = "" if len(names) <= _MOST_NAMED else f" and {len(names) - _MOST_NAMED} more"
            warn_caller(
                f"the model wrote {', '.join(names[:_MOST_NAMED])}{more} during a call. Each lane wrote its own, and these "
                "writes do not come back to the model. Return the value from the call instead, or register a tensor as a "
                "buffer: the buffers of lane 0 come back"
            )

    def _replaced(self, own: Any, given: Any) -> list[Any]:
        """The keys, or the first new index, of values that are not those that the replica was given."""
        if isinstance(given, list):
            grown = len(own) != len(given) and any(True for _ in tensors_in(list(own)))
            return [len(given)] if grown else []
        return [key for key, before in given.items() if key in own and self._counts(key, before, own[key], own)]

    def _counts(self, key: Any, before: Any, now: Any, own: Any) -> bool:
        """True if a value was replaced by another number, or by tensors that no hook of torch computes at each call."""
        if now is before or key in _COMES_BACK:
            return False
        if type(now) in ATOMS:
            return type(before) is not type(now) or bool(now != before)
        parameters = own.get("_parameters")
        if isinstance(parameters, dict) and (f"{key}_orig" in parameters or f"{key}_v" in parameters):
            return False
        return any(not self._is_known(tensor) for tensor in tensors_in(now))

    def _is_known(self, tensor: torch.Tensor) -> bool:
        return self._replica.tensors.original_of(tensor) is not None

    def _name(self, node: Node, key: Any) -> str:
        return repr(f"{self._survey.path(node)}{node.content.place(key)}".lstrip("."))
