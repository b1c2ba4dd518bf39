"""The kinds of calls that a session meets: what is told apart by a cheap key, and worked out once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from parawrap.engine._entry import Entry
from parawrap.engine.plan._case import Case
from parawrap.engine.plan._contest import Contest
from parawrap.engine.plan._way import Way
from parawrap.shards import FlatCall, ShardPlan, balanced, in_proportion

__all__ = ["Kind", "Kinds"]

_MOST = 1024
_MOST_FLAGS = 8


class Kind:
    """Calls that differ in nothing that a way depends on."""

    __slots__ = ("_plans", "calls", "contest", "elements")

    def __init__(self, contest: Contest, elements: int) -> None:
        self.contest = contest
        self.elements = elements
        self.calls = 0
        self._plans: dict[tuple[int, tuple[int, ...]], ShardPlan] = {}

    def cut(self, plan: ShardPlan, way: Way) -> ShardPlan:
        """The plan by which `plan`'s calls are cut in that way: the same one each time."""
        key = way.lanes, way.weights
        found = self._plans.get(key)
        if found is None:
            sizes = in_proportion(plan.rows, way.weights) if way.weights else balanced(plan.rows, way.lanes)
            found = self._plans[key] = plan if sizes == plan.sizes else plan.resized(sizes)
        return found


class Kinds:
    """Those that were met, each with the contest of its case.

    Args:
        contest: that of a case, for calls of one plan and so many elements.
    """

    def __init__(self, contest: Callable[[Case, ShardPlan, int], Contest]) -> None:
        self._contest = contest
        self._known: dict[Any, Kind] = {}

    def of(self, entry: Entry, plan: ShardPlan, flat: FlatCall, *, training: bool) -> Kind:
        """The kind of this call."""
        elements, dtype = 0, None
        flags: list[Any] = []  # a target may well return something else by one of them: a loss, say
        for leaf in flat.leaves:
            if isinstance(leaf, torch.Tensor):
                elements += leaf.numel()
                dtype = dtype or leaf.dtype
            elif len(flags) < _MOST_FLAGS and (leaf is None or isinstance(leaf, bool | str)):
                flags.append(leaf)
        key = plan, entry.method, torch.is_grad_enabled(), training, elements, dtype, *flags
        kind = self._known.get(key)
        if kind is None:
            case = Case.of(entry.method, flat, plan.rows, elements, training=training)
            if flags:
                case = case._replace(inputs=", ".join([case.inputs, *map(str, flags)]))
            kind = Kind(self._contest(case, plan, elements), elements)
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[key] = kind
        return kind
