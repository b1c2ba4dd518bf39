"""Lanes that feed NeuronCores: the pool of a compiled model, and the cutter of its calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from parawrap.engine.call import Entry, Lane, Lanes, Modes
from parawrap.engine.cut import Cutter, Shard, ShardPlan
from parawrap.engine.device_streams import LaneFuture
from parawrap.engine.extents import FlatCall
from parawrap.engine.join import join
from parawrap.engine.join_rules import JoinRules
from parawrap.engine.pooled import PartCall, PooledCall, PooledSession, QueuedCall, Record, TaskOutcome
from parawrap.engine.trace import timed
from parawrap.neuroncores._check_call import Fitting
from parawrap.neuroncores._placed_model import Batching, PlacedModel

__all__ = ["LANES_PER_CORE", "open_session"]

LANES_PER_CORE = 2
"""One lane runs while the other copies its input. Also the default of num_workers in torch_neuronx.DataParallel."""

_CPU = torch.device("cpu")


class NeuronPool:
    """The lanes of a placed model. Any number of threads may use it at once.

    Several lanes feed each core: one lane copies its input while the core computes for another. A call may have more parts
    than lanes: part i runs in lane ``i % lanes``, on core ``i % cores``. A call that is not cut runs in the thread of its
    caller, on the next core in turn. The weights are part of the compiled model, so there is nothing to bring up to date.
    With `owns_placed`, `close` frees the memory of the cores.

    Raises:
        SessionError: From a call, if the model was unloaded from its cores.
    """

    has_target_here = True
    cuts_for_one_lane = True
    home: torch.device | None = None
    refreshes = copied_bytes = 0  # the weights of a compiled model are part of it

    def __init__(
        self,
        placed: PlacedModel,
        lanes: int,
        cutters: Mapping[str | None, Cutter],
        rules: JoinRules,
        *,
        owns_placed: bool,
    ) -> None:
        labels = [str(placed.cores[lane % len(placed.cores)]) for lane in range(lanes)]
        self._lanes = Lanes([_CPU] * lanes, labels)
        self.lanes = self._lanes.all
        self.backend = self._lanes.backend
        self._placed = placed
        self._cutters = cutters
        self._rules = rules
        self._owns_placed = owns_placed

    @property
    def closed(self) -> bool:
        return not self._lanes.is_open

    def is_ready(self) -> bool:
        """True if a call of this thread may go to the lanes."""
        return self._lanes.is_ready()

    def refresh(self) -> None:
        """Do nothing: the weights of a compiled model are part of it."""

    renew = refresh

    def original_of(self, value: Any) -> Any:
        """Return the value: one that all cores return belongs to the layers around the compiled model, which they share."""
        return value

    def run(self, calls: Sequence[PartCall], modes: Modes, turns: str | None) -> list[TaskOutcome]:
        """Run part i in lane ``i % lanes``."""
        lanes, cores = len(self.lanes), self._placed.cores
        with self._placed.in_use():
            parts = [
                partial(self._run_part, call, self._placed.on(cores[index % len(cores)]), index % lanes)
                for index, call in enumerate(calls)
            ]
            rounds = [partial(_in_order, parts[lane::lanes]) for lane in range(min(lanes, len(parts)))]
            ended, errors = self._lanes.run(rounds, turns)
        outcomes = [TaskOutcome()] * len(calls)
        for lane, values in enumerate(ended):
            if values is not None:
                outcomes[lane::lanes] = map(TaskOutcome, values)
        for lane, error in errors:
            outcomes[lane] = TaskOutcome(error=error)
        return outcomes

    def submit(self, call: PooledCall, modes: Modes) -> LaneFuture:
        """Run a call whole on one core, in the lane that is free first. Raises the errors of a call before it is queued."""
        with self._placed.in_use():
            if call.prepare is None:
                call.flatten()
            queued = QueuedCall(partial(self._run_whole, call), modes)
            self._lanes.send(queued)
            return queued.future

    def run_plainly(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any], record: Record | None) -> Any:
        """Run a call whole in this thread, on the next core in turn."""
        with self._placed.in_use():
            plan, flat = self._cutters[entry.method].whole(args, kwargs)
            function = entry.of(self._placed.in_turn())
            return self._run_chunks(plan, flat, partial(timed, record, None, function))

    def cancel(self) -> None:
        """Do nothing: a lane finishes what it has started."""

    def close(self) -> None:
        """Let the lanes finish and end their threads; free the cores' memory if the pool owns the placed model."""
        self._lanes.close()
        if self._owns_placed:
            self._placed.unplace()

    def _run_part(self, call: PartCall, model: Any, lane: int) -> Any:
        call.place()
        return timed(call.record, lane, call.entry.of(model), *call.args, **call.kwargs)

    def _run_whole(self, call: PooledCall, lane: Lane) -> Any:
        cores = self._placed.cores
        with self._placed.in_use():
            call.make_arguments(lane.index)
            function = call.entry.of(self._placed.on(cores[lane.index % len(cores)]))
            output = self._run_chunks(*call.flatten(), call.record_call(lane.index, function))
        return call.finish(output, call, lane)

    def _run_chunks(self, plan: ShardPlan, flat: FlatCall, function: Callable[..., Any]) -> Any:
        """Call the model of one core with one chunk after another, and join the outputs."""
        shards: list[Shard] = plan.scatter(flat, [_CPU] * len(plan.sizes))
        outputs = [function(*shard.args, **shard.kwargs) for shard in shards]
        return outputs[0] if len(outputs) == 1 else join(outputs, plan.sizes, self._rules)


class NeuronCutter(Cutter):
    """Plans the calls of a compiled model, and refuses those that it cannot take with any number of rows.

    A whole call is cut into the chunks that one core gets, one after another.
    """

    def __init__(self, cutter: Cutter, placed: PlacedModel, batching: Batching) -> None:
        super().__init__(
            cutter.dim, cutter.in_dims, cutter.parameters, lists_are_shared=cutter.lists_are_shared, sizes=cutter.sizes
        )
        signature = None if cutter.in_dims else placed.signature  # the runtime checks inputs that have their own dims
        self._fitting = Fitting(signature, batching.dim, cutter.parameters)
        self._chunks = None
        if batching.chunk is not None:
            self._chunks = Cutter(
                batching.dim,
                cutter.in_dims,
                cutter.parameters,
                lists_are_shared=cutter.lists_are_shared,
                sizes=batching.whole,
            )

    def flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatCall:
        """Take a call apart.

        Raises:
            ShapeError: If the model is not compiled for these tensors.
        """
        return super().flatten(*self._fitting.fit(args, kwargs))

    def whole(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[ShardPlan, FlatCall]:
        """Return the plan that gives this call to one core, and the call taken apart. Raises like `flatten`."""
        args, kwargs = self._fitting.fit(args, kwargs)
        if self._chunks is None:
            return super().whole(args, kwargs)
        flat = self._chunks.flatten(args, kwargs)
        return self._chunks.plan(flat, 1), flat


def open_session(
    placed: PlacedModel,
    batching: Batching,
    lanes: int | None = None,
    *,
    cutters: Mapping[str | None, Cutter],
    rules: JoinRules,
    output_device: torch.device | None = None,
    owns_placed: bool = False,
) -> PooledSession:
    """Open a session for a placed model, with that number of lanes in all, by default `LANES_PER_CORE` per core."""
    fitted = {method: NeuronCutter(cutter, placed, batching) for method, cutter in cutters.items()}
    pool = NeuronPool(placed, lanes or LANES_PER_CORE * len(placed.cores), fitted, rules, owns_placed=owns_placed)
    return PooledSession(placed.model, pool, cutters=fitted, rules=rules, output_device=output_device)


def _in_order(tasks: Sequence[Callable[[], Any]]) -> list[Any]:
    return [task() for task in tasks]
