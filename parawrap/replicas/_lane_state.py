"""The state of one replica, which is put back after each call: calls start from the state of the model."""

from __future__ import annotations

from collections import deque
from operator import is_not
from typing import Any

import torch

from parawrap.errors import ReplicaError
from parawrap.replicas._copies import Copies
from parawrap.replicas._lane_tensors import LaneTensors
from parawrap.replicas._parts import Kind, kind_of, parts_of, references_of
from parawrap.replicas._private_names import BUFFERS, CHILDREN, PARAMETERS
from parawrap.replicas._snapshot import ABSENT, Change, Snapshot
from parawrap.replicas._survey import SurveyNode

__all__ = ["LaneState"]


class LaneState:
    """The objects that the containers of one replica hold, except tensors. Used while the lane is idle, or in the lane.

    `written` is a list that the replicas of a session share. It gets the places that the first such call wrote.
    """

    def __init__(self, copies: Copies, tensors: LaneTensors, written: list[str]) -> None:
        self._copies = copies
        self._tensors = tensors
        self._written = written
        pairs = [*copies.pairs()]
        self._modules = {id(copy) for _, copy in pairs if isinstance(copy, torch.nn.Module)}
        self._snapshot = Snapshot((node, copy) for node, copy in pairs if not _holds_buffers(node))
        self._buffers = [(node, copy, frozenset(copy)) for node, copy in pairs if _holds_buffers(node)]
        self._sizes = [len(names) for *_, names in self._buffers]

    def accept(self) -> None:
        """Take the objects of now for those that each call starts from."""
        self._snapshot.accept()

    def intact(self) -> bool:
        """True if the last call left nothing."""
        return [len(own) for _, own, _ in self._buffers] == self._sizes and self._snapshot.intact()

    def restore(self) -> None:
        """Put back what calls changed."""
        if self.intact():
            return
        for _, own, names in self._buffers:
            for name in [name for name in own if name not in names]:
                del own[name]
        self._snapshot.restore()

    def settle(self) -> None:
        """Put back what a call changed, and note its places for a warning.

        Raises:
            ReplicaError: If the call made a layer or a parameter; each lane would train its own. The message names it.
        """
        self._snapshot.return_dicts()
        changes = [change for change in self._changes() if self._counts(change)]
        self.restore()
        for change in changes:
            if self._is_made(change):
                holder = change.node.parent if change.node.key in (CHILDREN, PARAMETERS) else change.node
                name = type((holder or change.node).value).__name__
                msg = (
                    f"{name} makes {_path(change)!r} in forward, and each lane made its own, which learns nothing. Make it "
                    "before the block, for instance by a call of the model"
                )
                raise ReplicaError(msg)
        if changes and not self._written:
            self._written.extend(dict.fromkeys(_path(change) for change in changes))

    def _changes(self) -> list[Change]:
        changes = self._snapshot.changes() or []
        for node, own, names in self._buffers:
            changes += [Change(node, name, ABSENT, value) for name, value in own.items() if name not in names]
        return changes

    def _counts(self, change: Change) -> bool:
        """True for state that a later call would have read, and that no hook of torch computes at each call."""
        node, key, before, now = change
        copy = self._copies.of(node.value)
        if node.kind in (Kind.DICT, Kind.LIST, Kind.SET) and not self._is_held(node, copy):
            return False  # the call took it out of the model
        if key is None and node.kind is Kind.DICT:
            return False  # another order
        if key is None:
            return len(before) != len(now) or not all(map(_are_equal, before, now))
        if _are_equal(before, now) or self._is_empty_as_before(before, now):
            return False
        if node.kind is Kind.MODULE:
            parameters = vars(copy)[PARAMETERS]
            if f"{key}_orig" in parameters or f"{key}_v" in parameters:
                return False
        return not isinstance(now, torch.Tensor) or node.key == PARAMETERS or self._tensors.original_of(now) is None

    def _is_held(self, node: SurveyNode, own: Any) -> bool:
        """True if a container is still where the model has its original."""
        holders = [(holder, self._copies.of(holder.value)) for holder in self._copies.survey.holders(node.value)]
        return any(
            part is own
            for holder, copy in holders
            for _, part in (*parts_of(copy, holder.kind), *references_of(copy, holder.kind))
        )

    def _is_empty_as_before(self, before: Any, now: Any) -> bool:
        if not isinstance(now, dict | list | set | deque) or now:
            return False
        return before in (ABSENT, None) if kind_of(type(before)) is Kind.ATOM else not self._snapshot.parts_before(before)

    def _is_made(self, change: Change) -> bool:
        """True if the call made a layer or a parameter."""
        now = [change.now]
        if change.key is None:
            known = set(map(id, change.before))
            now = [part for part in change.now if id(part) not in known]
        return any(
            (isinstance(part, torch.nn.Module) and id(part) not in self._modules)
            or (isinstance(part, torch.nn.Parameter) and self._tensors.original_of(part) is None)
            for part in now
        )


def _holds_buffers(node: SurveyNode) -> bool:
    return node.key == BUFFERS and node.kind is Kind.DICT and node.parent is not None and node.parent.kind is Kind.MODULE


def _path(change: Change) -> str:
    return change.node.path if change.key is None else change.node.path_of(change.key)


def _are_equal(before: Any, now: Any) -> bool:
    if not is_not(before, now):
        return True
    return type(before) is type(now) and kind_of(type(now)) is Kind.ATOM and bool(before == now)
