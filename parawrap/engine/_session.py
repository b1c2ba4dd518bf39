"""Calls of one target: cut over its lanes by the four verbs, whole in one of them, or plain."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch

from parawrap.engine._call import Call, LanesAwaitThread, Ticket, failed
from parawrap.engine._entry import Entry
from parawrap.engine._reference import plain_output
from parawrap.engine._stats import Stats, Tally
from parawrap.engine._trace import Trace
from parawrap.engine._verbs import Verbs, originals_of
from parawrap.engine._work import UncutWork
from parawrap.errors import SessionError
from parawrap.lanes import Hand, LaneFuture, current_lane, sees_only_its_own_thread
from parawrap.replicas import Freshness, LaneReplica
from parawrap.shards import Cutter, FlatCall, GatherRules, Originals, Shard, ShardPlan, check_equal, gather

__all__ = ["Session"]


class Session(Verbs):
    """The calls of a target, and what is counted of them. Safe to share between threads.

    With `verify` the first call of each structure is compared with the plain one. With `plans_every_call` a call goes
    through its cutter though there is one lane on the CPU. The other options are those of `Verbs`.
    """

    def __init__(
        self,
        target: Callable[..., Any],
        devices: Sequence[torch.device],
        *,
        cutters: Mapping[str | None, Cutter],
        rules: GatherRules,
        output_device: torch.device | None = None,
        verify: bool = False,
        labels: Sequence[str] | None = None,
        plans_every_call: bool = False,
        may_try_alone: bool = False,
    ) -> None:
        super().__init__(
            target,
            devices,
            cutters=cutters,
            rules=rules,
            output_device=output_device,
            labels=labels,
            may_try_alone=may_try_alone,
        )
        self._plans_every_call = plans_every_call
        self._never_cuts = self._stays_on_cpu and len(self.devices) == 1 and not plans_every_call
        self._futures: WeakSet[Future[Any]] = WeakSet()
        self.tally = Tally(len(self.devices))
        self._verifies = verify
        self._verified: WeakSet[ShardPlan] = WeakSet()

    def stats(self) -> Stats:
        """The counters as they stand."""
        fresh = self._replicas.freshness if self._replicas is not None else Freshness()
        return self.tally.stats(self.pool.lanes, fresh)

    def trace(self, path: str | Path) -> Trace:
        """A recorder of when each lane works."""
        return Trace(self.pool.lanes, path)

    # Calls that are cut

    def call(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Scatter, replicate, apply, gather; or the plain call, where nothing is to be cut or it would be wrong to."""
        if self._has_no_lanes():
            return entry.plain(*args, **kwargs)  # part of another call, or beyond the block
        if self._never_cuts or self._is_at_hand(args, kwargs) or self._cannot_follow() or self.pool.awaits_a_thread():
            return self._run_plainly(entry, args, kwargs)
        plan, flat = self.cutters[entry.method].plan(args, kwargs, len(self.devices))
        return self._run(Call(entry, args, kwargs, plan, flat))

    def _run(self, call: Call) -> Any:
        """A call that can be cut, as far as its caller and the lanes go."""
        if self._is_whole(call):
            return self._run_plainly(call.entry, call.args, call.kwargs)
        return self._cut(call)

    def _cut(self, call: Call) -> Any:
        """The call over as many lanes as its plan has shards."""
        plan, flat = call.plan, call.flat
        try:
            replicas = self.replicate(len(plan.sizes))
        except LanesAwaitThread:
            return self._run_without_lanes(call)
        expected = self._expected(call.entry, plan, flat)
        outputs, originals = self._outputs(call, replicas)
        output = self.gather(outputs, plan.sizes, self._beside(flat), originals)
        self.tally.cut(plan.sizes)
        if expected is not None:
            check_equal(output, expected[0])
            self._verified.add(plan)
        return output

    def _outputs(self, call: Call, replicas: Sequence[LaneReplica]) -> tuple[list[Any], Originals]:
        """What the lanes return, and what tells the copies among it."""
        sources = self._sources(call.flat)
        if not sources and self._stays_on_cpu:
            works = self._on_views(call.entry, replicas, self._scattered(call.plan, call.flat))
            return self.apply(works, call.plan), originals_of(replicas, ())
        placed = self._works(call.entry, replicas, call.plan, call.flat)
        return self.apply(placed, call.plan, sources), originals_of(replicas, placed)

    def _expected(self, entry: Entry, plan: ShardPlan, flat: FlatCall) -> tuple[Any] | None:
        """With verify, the plain output of the first call of a structure."""
        if not self._verifies or plan in self._verified:
            return None
        home = self.pool.home if self.pool.home is not None else self.devices[0]
        run = entry.plain if self._replicas is None else entry.of(self._replicas.scratch())
        return (plain_output(run, plan, flat, home, self.devices),)

    def _is_whole(self, call: Call) -> bool:
        """Whether one lane gets all of it, and that lane is the caller with what it has."""
        return len(call.plan.sizes) == 1 and (self._stays_on_cpu or self._lies_in_lane_0(call.flat.leaves))

    def _is_at_hand(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the call is of a few tensors that one lane has already: nothing is to be cut, then, or brought over."""
        return (
            len(self.devices) == 1
            and not kwargs
            and all(isinstance(arg, torch.Tensor) for arg in args)
            and self._lies_in_lane_0(args)
        )

    # Whole calls, each in one lane

    def hand(self, window: int) -> Hand | None:
        """With what a caller submits that has so many calls in flight, if it may run some itself while it waits.

        While it runs one it submits nothing: with fewer than two for each lane the others would run out of work.
        """
        return self.pool.hand() if self._stays_on_cpu and window >= 2 * len(self.devices) else None

    def submit(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any], hand: Hand | None = None) -> Ticket:
        """Run a whole call, not cut, in one lane."""
        if self.pool.closed:
            msg = "the lanes are closed: submit inside the `with` block, and read what map yields before it ends"
            raise SessionError(msg)
        uncut = self._uncut(entry, args, kwargs)
        rows = uncut.rows if isinstance(uncut, Shard) else uncut[0].rows
        try:
            replicas = [] if self._has_no_lanes() or self._cannot_follow() else self.replicate()
        except LanesAwaitThread:
            replicas = []
        if not replicas:
            return Ticket(_done(lambda: self._run_plainly(entry, args, kwargs)), rows)
        if isinstance(uncut, Shard):
            ways = [self._way_into(entry, replica) for replica in replicas]
            future = self.pool.submit_to_any(UncutWork(ways, uncut, replicas[0].write_back, self.tally), hand)
        else:
            future = self._submit_apart(entry, replicas, *uncut)
        self._futures.add(future)
        self.tally.whole()
        return Ticket(future, rows)

    def _uncut(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shard | tuple[ShardPlan, FlatCall]:
        """A whole call as one shard, where nothing of it is to be brought anywhere, or else taken apart."""
        at_hand = self._stays_on_cpu and self.rules.keep_single
        if at_hand and not (kwargs or self._plans_every_call) and all(map(_is_plain_on_cpu, args)):
            return Shard(args, kwargs, self.cutters[entry.method].rows(args))
        plan, flat = self._whole(entry, args, kwargs)
        if at_hand and len(plan.sizes) == 1 and not self._sources(flat):
            return plan.scatter(flat, self.devices)[0]
        return plan, flat

    def _submit_apart(self, entry: Entry, replicas: Sequence[LaneReplica], plan: ShardPlan, flat: FlatCall) -> LaneFuture:
        """To the lane that has least to do, which brings the inputs to its device while it still runs what is before."""
        sources = self._sources(flat)
        lane = self.pool.least_loaded()
        works = self._works(entry, [replicas[lane.index]] * len(plan.sizes), plan, flat)

        def place() -> None:
            for work in works:
                work.place()

        def run() -> Any:
            return self.gather([work.run_placed() for work in works], plan.sizes, self._beside(flat))

        future = self.pool.submit(lane, run, place, sources)
        self.tally.rows(lane.index, plan.rows)
        return future

    def _whole(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[ShardPlan, FlatCall]:
        """The plan by which one lane gets the whole call."""
        return self.cutters[entry.method].whole(args, kwargs)

    def cancel(self) -> None:
        """Drop what was submitted and has not begun."""
        for future in list(self._futures):
            future.cancel()

    # Plain calls, in the caller's thread

    def must_run_plainly(self) -> bool:
        """Whether a call made now, by this thread, would be wrong or would wait for itself if it were cut."""
        return self._has_no_lanes() or self._cannot_follow() or self.pool.awaits_a_thread()

    def _has_no_lanes(self) -> bool:
        return current_lane() is not None or not self.pool.alive  # a lane does not wait for lanes

    def _cannot_follow(self) -> bool:
        """Whether something about the caller, or about a module that has yet to take shape, cannot go into lanes."""
        return (
            sees_only_its_own_thread()
            or (self._replicas is not None and not self._replicas.ready())
            or self.pool.backend.is_capturing()
        )

    def _run_without_lanes(self, call: Call) -> Any:
        return self._run_plainly(call.entry, call.args, call.kwargs)

    def _run_plainly(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.tally.plain()
        output = entry.plain(*args, **kwargs)
        return output if self.rules.keep_single else gather([output], (1,), self.rules, None)


def _is_plain_on_cpu(value: object) -> bool:
    return type(value) is torch.Tensor and value.is_cpu


def _done(work: Callable[[], Any]) -> LaneFuture:
    """A future that is there already."""
    future = LaneFuture()
    try:
        future.set_result(work())
    except Exception as error:  # noqa: BLE001
        return failed(error)
    return future
