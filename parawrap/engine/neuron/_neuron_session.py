"""The calls of a compiled model on NeuronCores: cut into inferences, run on the cores in turn, and joined."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch

from parawrap.engine._call_recorder import Recorder, Trace
from parawrap.engine._session import Ready
from parawrap.engine._stats import Stats, Tally
from parawrap.engine.neuron._compiled_shapes import Fitting
from parawrap.engine.neuron._placed_model import Batching, PlacedModel
from parawrap.errors import SessionError
from parawrap.lanes import (
    Entry,
    Lane,
    LaneFuture,
    LanePool,
    Modes,
    Prepare,
    Task,
    as_call,
    here,
    intra_op_threads,
    raise_first_failure,
    timed,
)
from parawrap.replicas import Freshness
from parawrap.shards import Cutter, JoinRules, Shard, ShardPlan, join

__all__ = ["NeuronSession"]

_CPU = torch.device("cpu")


class NeuronSession:
    """The calls of a placed model. Thread-safe.

    Several lanes feed each core: one lane copies its input while the core computes for another. A call may have more
    shards than lanes: shard i runs in lane ``i % lanes``, on core ``i % cores``. A call that is not cut runs in the
    caller's thread, on the next core in turn. With `owns_placed`, `close` frees the memory of the cores.
    """

    def __init__(
        self,
        placed: PlacedModel,
        batching: Batching,
        workers: int,
        *,
        cutters: Mapping[str | None, Cutter],
        rules: JoinRules,
        output_device: torch.device | None = None,
        owns_placed: bool = False,
    ) -> None:
        self.devices = (_CPU,) * workers
        self.tally = Tally(workers)
        self.recorder = Recorder(placed.model)
        self.pool = LanePool(self.devices, labels=[str(placed.cores[i % len(placed.cores)]) for i in range(workers)])
        self._placed = placed
        self._owns_placed = owns_placed
        self._cutters = cutters
        self._rules = rules
        self._output_device = output_device
        self._fittings = {
            method: Fitting(placed.signature, batching.dim, cutter.parameters) for method, cutter in cutters.items()
        }
        in_one_lane = Cutter(batching.dim, lists_are_shared=True, sizes=batching.whole)
        self._in_one_lane = None if batching.chunk is None else in_one_lane
        self._futures: WeakSet[Future[Any]] = WeakSet()

    def call(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Scatter, apply, gather. The weights are part of the compiled model, so there is nothing to replicate.

        Raises:
            ShapeError: If the model is not compiled for these tensors, or for this number of rows without dynamic batching.
            SessionError: If the model was unloaded from its cores.
        """
        with self._placed.in_use():
            args, kwargs = self._fittings[entry.method].fit(args, kwargs)
            if not self.pool.is_ready():
                return self._run_here(entry, args, kwargs)
            cutter = self._cutters[entry.method]
            flat = cutter.flatten(args, kwargs)
            plan = cutter.plan(flat, len(self.devices))
            if len(plan.sizes) == 1:
                return self._run_here(entry, args, kwargs)
            shards = plan.scatter(flat, (_CPU,) * len(plan.sizes))
            outputs = self._apply([self._task(entry, *each) for each in zip(shards, plan.sizes, count())])
            output = self._gather(outputs, plan.sizes)
            self.tally.cut(plan.sizes, [index % len(self.devices) for index in range(len(shards))])
            return output

    def get_ready(self) -> Ready | None:
        """Return None: a compiled model does not change."""

    def submit(
        self,
        entry: Entry,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        prepare: Prepare | None = None,
        ready: Ready | None = None,
    ) -> LaneFuture:
        """Run a call whole on one core, in the lane that is free first. Raises the errors of `call` before it is queued.

        With `prepare`, the lane computes the arguments of the call first, as ``prepare(*args)``. `ready` is not used.
        """
        if self.pool.closed:
            msg = "the lanes are closed: submit inside the `with` block, and read the outputs of map before it ends"
            raise SessionError(msg)
        with self._placed.in_use():
            if prepare is None:
                task = self._whole_task(entry, args, kwargs)
            else:
                task = partial(self._run_prepared, entry, args, prepare)
            future = self.pool.submit_to_any(task, Modes.capture("cpu"))
        self._futures.add(future)
        return future

    def cancel(self) -> None:
        """Drop submitted calls that have not started."""
        for future in list(self._futures):
            future.cancel()

    def refresh(self) -> None:
        """Do nothing: the weights of a compiled model are part of it."""

    def close(self) -> None:
        """Let the lanes finish and end their threads; free the cores' memory if the session owns the placed model."""
        self.pool.close()
        if self._owns_placed:
            self._placed.unplace()

    def stats(self) -> Stats:
        """Return the counters."""
        return self.tally.stats(self.pool.lanes, Freshness())

    def trace(self, path: str | Path) -> Trace:
        """Return a recorder of the calls of each lane."""
        return Trace(self.recorder, self.pool.lanes, path)

    def in_use(self) -> AbstractContextManager[None]:
        """Keep the model on its cores inside the block, for a call that is about to be made."""
        return self._placed.in_use()

    def _apply(self, tasks: Sequence[Task]) -> list[Any]:
        """Run task i in lane ``i % lanes`` and return the values in order."""
        lanes = len(self.devices)
        rounds = tasks if len(tasks) <= lanes else [partial(_in_order, tasks[lane::lanes]) for lane in range(lanes)]
        outcomes = self.pool.run(rounds, Modes.capture("cpu"))
        raise_first_failure(outcomes, self.pool.lanes[: len(rounds)])
        of_lanes = [outcome.value for outcome in outcomes]
        if rounds is tasks:
            return of_lanes
        values: list[Any] = [None] * len(tasks)
        for lane, of_lane in enumerate(of_lanes):
            values[lane::lanes] = of_lane
        return values

    def _gather(self, outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
        with intra_op_threads(self.pool.threads):
            return join(outputs, sizes, self._rules, self._output_device)

    def _task(self, entry: Entry, shard: Shard, rows: int, index: int) -> Task:
        cores = self._placed.cores
        call = entry.of(self._placed.on(cores[index % len(cores)]))
        return partial(self._recorded(entry, rows, index % len(self.devices), call), *shard.args, **shard.kwargs)

    def _recorded(self, entry: Entry, rows: int, lane: int | None, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `call`; while a trace is open, with a record of when it runs."""
        if not self.recorder.traces:
            return call
        return partial(timed, partial(self.recorder.record, entry.method, entry.batch, rows), lane, call)

    def _run_here(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a whole call in the caller's thread."""
        output = self._run_in_turn(entry, *args, **kwargs)
        self.tally.plain()
        return output

    def _run_in_turn(self, entry: Entry, *args: Any, **kwargs: Any) -> Any:
        """Run a whole call on the next core in turn."""
        shards, plan = self._whole(entry, args, kwargs)
        lane = None if here.lane is None else here.lane.index
        return self._joined(entry, self._placed.in_turn(), shards, plan.sizes, lane)

    def _whole_task(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Lane], Any]:
        """Return the task that runs a whole call in a lane."""
        args, kwargs = self._fittings[entry.method].fit(args, kwargs)
        shards, plan = self._whole(entry, args, kwargs)
        return partial(self._run_shards, entry, shards, plan.sizes)

    def _run_prepared(self, entry: Entry, batch: tuple[Any, ...], prepare: Prepare, lane: Lane) -> Any:
        with self._placed.in_use():
            record = partial(self.recorder.record, "prepare", entry.batch, None)
            return self._whole_task(entry, *as_call(timed(record, lane.index, prepare, *batch)))(lane)

    def _run_shards(self, entry: Entry, shards: Sequence[Shard], sizes: Sequence[int], lane: Lane) -> Any:
        cores = self._placed.cores
        output = self._joined(entry, self._placed.on(cores[lane.index % len(cores)]), shards, sizes, lane.index)
        self.tally.whole(lane.index, sum(sizes))
        return output

    def _joined(self, entry: Entry, model: Any, shards: Sequence[Shard], sizes: Sequence[int], lane: int | None) -> Any:
        calls = [self._recorded(entry, rows, lane, entry.of(model)) for rows in sizes]
        outputs = [call(*shard.args, **shard.kwargs) for call, shard in zip(calls, shards, strict=True)]
        as_it_is = len(outputs) == 1 and self._rules.keep_single
        return outputs[0] if as_it_is else self._gather(outputs, sizes)

    def _whole(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Shard], ShardPlan]:
        """Return a whole call as shards that one core runs one after another."""
        if self._in_one_lane is None:
            plan, flat = self._cutters[entry.method].whole(args, kwargs)
        else:
            flat = self._in_one_lane.flatten(args, kwargs)
            plan = self._in_one_lane.plan(flat, 1)
        return plan.scatter(flat, (_CPU,) * len(plan.sizes)), plan


def _in_order(tasks: Sequence[Task]) -> list[Any]:
    return [task() for task in tasks]
