"""A cut call with shards that lanes place, and the joins of its outputs and changed arguments.

A call of tensors on the CPU alone needs none of this: `Calls` cuts and concatenates them itself.
`Staged` in `whole_call.py` is a placed call with one part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import torch

from parawrap.backends import record_use
from parawrap.engine.borrowed import Borrowed, Loan, rules_of_entries
from parawrap.engine.cut import Shard, ShardPlan
from parawrap.engine.flat_call import FlatCall
from parawrap.engine.join import join
from parawrap.engine.join_rules import JoinRules
from parawrap.engine.lanes import without_autocast
from parawrap.engine.lent_containers import Path
from parawrap.engine.output_handover import hand_over_joined
from parawrap.engine.replica import Replica
from parawrap.tree import flatten

_NOT_PLACED = Shard((), {}, 0)


class PlacedCall:
    """The shards of one call, and the joins of its outputs and of its changed arguments.

    The lanes borrow the caller's arguments. `enter` writes into them what forward wrote.

    Attributes:
        plan: How the call is cut.
        flat: The call taken apart.
        columns: The parts of each leaf, from `ShardPlan.columns`.
        shards: One per part, as its lane has placed it. No two lanes write the same item, and each
            write is one step, so parts need no lock.
        device: The device of outputs; None if they stay where the lanes leave them, on the CPU.
    """

    def __init__(
        self,
        plan: ShardPlan,
        flat: FlatCall,
        columns: Sequence[Sequence[Any]],
        replicas: Sequence[Replica],
        rules: JoinRules,
        device: torch.device | None,
    ) -> None:
        self.plan = plan
        self.flat = flat
        self.columns = columns
        # Of full length from the start, so that a lane only replaces an item
        self.shards = [_NOT_PLACED] * len(plan.sizes)
        self.device = device
        self._replicas = replicas  # one per lane; there may be more parts
        self._rules = rules
        # Set by `join_arguments`
        self._loans: list[Loan] = []
        self._borrowed: Borrowed | None = None  # None: tensors and plain values alone

    def join_arguments(
        self, given: tuple[tuple[Any, ...], dict[str, Any]], outputs: Sequence[Any]
    ) -> None:
        """Join what forward put into copies of arguments.

        `given` are the caller's own arguments, which are not written yet. `outputs` are those of
        the lanes: an output that is an argument says how its entries are joined.
        """
        self._loans = [shard.loan for shard in self.shards]
        self._borrowed = self.plan.find_borrowed(self.flat, given, self._loans)
        if self._borrowed is not None:
            self._borrowed.join_changes(self._join_entries, self.device, outputs, self._join)

    def join_outputs(self, outputs: Sequence[Any], kind: str) -> Any:
        """Return the joined outputs of the lanes, which are on that kind of device."""
        if self.device is not None:
            # Lanes have made them on their streams. The caller's stream reads them from here on
            record_use(flatten(outputs)[0])
        # With join="list", each lane's output stays as it is
        if self._borrowed is not None and self._rules.join != "list":
            outputs = [*map(self._borrowed.mark_returned, outputs, range(len(outputs)))]
        # Autocast would cast what `torch.cat` joins
        with without_autocast(kind):
            return join(outputs, self.plan.sizes, self._rules, self.device, self._find_originals)

    def enter(self, output: Any) -> Any:
        """Write what forward wrote into the caller's objects, and return the output with them."""
        self.plan.write_back(self.flat, self.columns, self._loans)
        if self._borrowed is None:
            return output
        self._borrowed.enter()
        return self._borrowed.resolve(output)

    def _join(self, outputs: Sequence[Any]) -> Any:
        return join(outputs, self.plan.sizes, self._rules, self.device, self._find_originals)

    def _join_entries(self, values: Sequence[Any], place: Path | None, key: Any) -> Any:
        """Join the values that lanes put into one place of an argument."""
        if self.device is not None:
            record_use(flatten(values)[0])
        rules = rules_of_entries(self._rules, place, key)
        joined = join(values, self.plan.sizes, rules, self.device, self._find_originals)
        return hand_over_joined(joined, values, self._replicas)

    def _find_originals(self) -> Sequence[Callable[[Any], Any]]:
        """Return one function per part. It takes a value of the lane, and returns its origin.

        The origin is an object of the caller or of the model; None if there is none.
        """
        shared = self.plan.find_whole_leaves(self.flat)
        found = []
        # Part i ran in lane ``i % lanes``
        for shard, replica in zip(self.shards, cycle(self._replicas), strict=False):
            found.append(partial(_find_original, {**shared, **shard.origins}, replica))
        return found


def _find_original(origins: Mapping[int, Any], replica: Replica, value: Any) -> Any:
    found = origins.get(id(value))
    if found is None and isinstance(value, torch.Tensor):
        return replica.original_of(value)
    return found
