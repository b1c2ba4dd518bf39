"""A session whose calls go the way that a plan has for them, where several ways give the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch

from parawrap.engine._backward import LaneBackward
from parawrap.engine._call import Call, LanesAwaitThread
from parawrap.engine._entry import Entry
from parawrap.engine._session import Session
from parawrap.engine._stats import Stats
from parawrap.engine._traced import Traces
from parawrap.engine._verbs import originals_of
from parawrap.engine._work import Work
from parawrap.engine.plan import Plan, Planner, Turn
from parawrap.lanes import intra_op_threads
from parawrap.replicas import LaneReplica
from parawrap.shards import Originals
from parawrap.tree import unflatten

__all__ = ["PlannedSession"]


class PlannedSession(Session):
    """A session that asks a planner before each call.

    There is nothing to ask where the answer depends on how many lanes there are (``reduce="stack"``, ``join="list"``),
    where every new shape costs a compilation, and where the user's word is to cut every call.
    """

    def __init__(self, target: Callable[..., Any], devices: Sequence[torch.device], *, plan: Plan, **options: Any) -> None:
        super().__init__(target, devices, **options)
        self._traces = Traces()
        self._planner = self._planner_of(plan)
        if self._planner is not None and not self._planner.is_quick:
            self._never_cuts = False  # one lane, too, can be run in several ways

    def stats(self) -> Stats:
        counted = super().stats()
        spared = 0 if self._planner is None else self._planner.spared_calls()
        return replace(counted, calls=counted.calls + spared, plain=counted.plain + spared)

    def close(self) -> None:
        super().close()
        self._traces.forget()
        if self._planner is not None:
            self._planner.close()

    def _planner_of(self, plan: Plan) -> Planner | None:
        if plan.rule == "lanes" or not self.rules.keep_single or self.pool.backend.compiles_each_shape:
            return None
        if plan.rule == "default" and not self._stays_on_cpu:
            return None
        asks = _weakly(self._writes_buffers), _weakly(self._can_trace)
        return Planner(plan, self.target, self.pool.lanes, self.pool.threads, *asks)

    def _run(self, call: Call) -> Any:
        planner = self._planner
        if planner is None or (self._stays_on_cpu and self._sources(call.flat)):
            return super()._run(call)  # from elsewhere to the CPU: the call as it is without parawrap would fail
        if planner.is_quick and self._is_whole(call):
            planner.spare(call.entry, call.flat)
            return super()._run(call)
        with planner.turn(call.entry, call.plan, call.flat) as turn:
            return turn.came_to(self._run_by(turn, call._replace(plan=turn.plan, turn=turn)))

    def _is_at_hand(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        asks = self._planner is not None and not self._planner.is_quick and self._stays_on_cpu
        return not asks and super()._is_at_hand(args, kwargs)

    def _run_by(self, turn: Turn, call: Call) -> Any:
        """The call in the way that is its turn's."""
        if not self._is_whole(call):
            return self._cut(call)
        entry = call.entry
        if turn.way.traced:
            entry = entry._replace(plain=self._trace_of(entry, call.args, call.kwargs) or entry.plain)
        with intra_op_threads(turn.way.threads or None):
            return self._run_plainly(entry, call.args, call.kwargs)

    def _run_without_lanes(self, call: Call) -> Any:
        if call.turn is not None:
            call.turn.void()
        return super()._run_without_lanes(call)

    def _outputs(self, call: Call, replicas: Sequence[LaneReplica]) -> tuple[list[Any], Originals]:
        turn = call.turn
        if turn is None:
            return super()._outputs(call, replicas)
        works: Sequence[Work] = ()
        if self._stays_on_cpu:
            outputs = self._outputs_here(turn, call, replicas)
        else:
            works = self._works(call.entry, replicas, call.plan, call.flat)
            outputs = self.apply(turn.timed(works), call.plan, self._sources(call.flat))
        turn.learn(outputs)
        return outputs, originals_of(replicas, works)

    def _outputs_here(self, turn: Turn, call: Call, replicas: Sequence[LaneReplica]) -> list[Any]:
        """What lanes on the CPU return, each with the threads of its way, traced, or with its own backward."""
        shards = self._scattered(call.plan, call.flat)
        apply = partial(self.apply, threads=turn.way.threads)
        works = self._on_views(call.entry, replicas, shards)
        if turn.way.traced:
            traces = [self._trace_of(call.entry, shard.args, shard.kwargs) for shard in shards]
            works = [
                work if trace is None else partial(trace, *shard.args, **shard.kwargs)
                for work, trace, shard in zip(works, traces, shards, strict=True)
            ]
        if not turn.way.own_backward:
            return apply(works, call.plan)
        backward = LaneBackward(self.target, shards)
        return backward.regrown(apply(backward.watched(works), call.plan), apply)

    # Traces

    def _trace_of(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
        """The trace for calls of exactly these shapes, made where there is none; None where there can be none."""
        if self._replicas is None or self._planner is None or not self._stays_on_cpu:
            return None
        if len(self.devices) == 1:  # nobody watches the module then; a file may say traced all the same
            return None
        try:
            self.replicate()
        except LanesAwaitThread:
            return None
        self._traces.of_generation(self._replicas.generation)
        if not self._traces.has(entry, args, kwargs):
            self._planner.count_extra(self._traces.make(entry, self._replicas.scratch(), args, kwargs))
        return self._traces.of(entry, args, kwargs)

    def _can_trace(self, turn: Turn) -> bool:
        return self._trace_of(turn.entry, *unflatten(turn.flat.spec, turn.flat.leaves)) is not None

    def _writes_buffers(self) -> bool:
        return self._replicas is not None and self._replicas.written_by_lanes()


def _weakly(method: Callable[..., bool]) -> Callable[..., bool]:
    """The method, which does not keep its session: nobody may have that any more. It says no then."""
    known = WeakMethod(method)

    def ask(*args: Any) -> bool:
        alive = known()
        return alive is not None and alive(*args)

    return ask
