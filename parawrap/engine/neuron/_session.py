"""A session whose lanes are workers, which feed the cores in turn."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from parawrap.engine._call import Ticket
from parawrap.engine._entry import Entry
from parawrap.engine._session import Session
from parawrap.engine._verbs import not_a_copy
from parawrap.engine.neuron._fitting import Fitting
from parawrap.engine.neuron._placed import Batching, PlacedModel
from parawrap.lanes import Hand
from parawrap.replicas import LaneReplica
from parawrap.shards import Cutter, FlatCall, GatherRules, Shard, ShardPlan

__all__ = ["NeuronSession"]

_CPU = torch.device("cpu")


class NeuronSession(Session):
    """A session on the cores of a placed model, with several lanes a core: one brings its input while another one's runs.

    A call may be cut into more shards than there are lanes: shard i goes to core i and lane i, both counted in rounds.
    A call that is not cut runs in the caller's thread, on the next core in turn. With `owns_placed` the cores' memory is
    given back on `close`. Safe to share between threads.
    """

    def __init__(
        self,
        placed: PlacedModel,
        batching: Batching,
        workers: int,
        *,
        cutters: Mapping[str | None, Cutter],
        rules: GatherRules,
        output_device: torch.device | None = None,
        verify: bool = False,
        owns_placed: bool = False,
    ) -> None:
        self._placed = placed
        self._owns_placed = owns_placed
        self._fittings = {
            method: Fitting(placed.signature, batching.dim, cutter.parameters) for method, cutter in cutters.items()
        }
        in_one_lane = Cutter(batching.dim, lists_are_shared=True, sizes=batching.whole)
        self._in_one_lane = None if batching.chunk is None else in_one_lane
        super().__init__(
            placed.in_turn,
            (_CPU,) * workers,
            cutters=cutters,
            rules=rules,
            output_device=output_device,
            verify=verify,
            labels=[str(placed.cores[worker % len(placed.cores)]) for worker in range(workers)],
            plans_every_call=True,  # with one worker too: the plan is where rows are looked at
            may_try_alone=isinstance(placed.model, torch.jit.ScriptModule),  # no Python in it that waits for another lane
        )

    def replicate(self, lanes: int | None = None) -> list[LaneReplica]:
        """What so many shards run: never stale, since its weights are compiled in, or the module's own."""
        cores, workers = self._placed.cores, len(self.devices)
        shards = workers if lanes is None else lanes
        return [LaneReplica(i % workers, self._placed.on(cores[i % len(cores)]), not_a_copy) for i in range(shards)]

    def apply(
        self,
        works: Sequence[Callable[[], Any]],
        kind: Hashable = None,
        sources: Collection[torch.device] = (),
        threads: int | None = None,
    ) -> list[Any]:
        """Run the works in the lanes, those beyond the lanes in turn after the first ones; their values in order."""
        lanes = len(self.devices)
        if len(works) <= lanes:
            return super().apply(works, kind, sources, threads)
        in_lanes = [partial(_in_order, works[lane::lanes]) for lane in range(lanes)]
        of_lanes = super().apply(in_lanes, kind, sources, threads)
        values: list[Any] = [None] * len(works)
        for lane, of_lane in enumerate(of_lanes):
            values[lane::lanes] = of_lane
        return values

    def call(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Scatter, apply, gather.

        Raises:
            ShapeError: the model is not compiled for such tensors, or, without dynamic batching, for so many rows.
            SessionError: the model was taken off its cores.
        """
        with self._placed.in_use():
            args, kwargs = self._fittings[entry.method].fit(args, kwargs)
            return super().call(self._into_replicas(entry), args, kwargs)

    def hand(self, window: int) -> Hand | None:
        """None: a thread that has a core do something waits, and had better feed the others."""
        return None

    def submit(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any], hand: Hand | None = None) -> Ticket:
        """Run a whole call on one core. What `call` refuses is refused here too, and not by the future."""
        with self._placed.in_use():
            args, kwargs = self._fittings[entry.method].fit(args, kwargs)
            return super().submit(self._into_replicas(entry), args, kwargs, hand)

    def in_use(self) -> AbstractContextManager[None]:
        """Inside the block the model stays on its cores, for a call that is about to be made."""
        return self._placed.in_use()

    def close(self) -> None:
        super().close()
        if self._owns_placed:
            self._placed.unplace()

    def _into_replicas(self, entry: Entry) -> Entry:
        """The same way in, but never to the model itself: it is on whichever core the runtime put it."""
        return Entry(partial(self._in_this_thread, entry), entry.method)

    def _in_this_thread(self, entry: Entry, *args: Any, **kwargs: Any) -> Any:
        """A whole call, without lanes, on the next core in turn."""
        outputs, plan, flat = self._outputs_here(entry, args, kwargs)
        return outputs[0] if len(outputs) == 1 else self.gather(outputs, plan.sizes, self._beside(flat))

    def _run_plainly(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.tally.plain()
        outputs, plan, flat = self._outputs_here(entry, args, kwargs)
        as_it_is = len(outputs) == 1 and self.rules.keep_single
        return outputs[0] if as_it_is else self.gather(outputs, plan.sizes, self._beside(flat))

    def _outputs_here(
        self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], ShardPlan, FlatCall]:
        plan, flat = self._whole(entry, args, kwargs)
        call = entry.of(self._placed.in_turn())
        return [call(*shard.args, **shard.kwargs) for shard in self._scattered(plan, flat)], plan, flat

    def _whole(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[ShardPlan, FlatCall]:
        return super()._whole(entry, args, kwargs) if self._in_one_lane is None else self._in_one_lane.plan(args, kwargs, 1)

    def _scattered(self, plan: ShardPlan, flat: FlatCall) -> list[Shard]:
        return plan.scatter(flat, (_CPU,) * len(plan.sizes))

    def _way_into(self, entry: Entry, replica: LaneReplica) -> Callable[..., Any]:
        return entry.of(replica.module)


def _in_order(works: Sequence[Callable[[], Any]]) -> list[Any]:
    return [work() for work in works]
