"""The calls of one target: scatter, replicate, apply, and gather, in this order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from itertools import cycle, repeat
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

import torch

from parawrap.backends import Backend, device_of, record_use, warn_caller
from parawrap.engine._call_recorder import Recorder, Trace
from parawrap.engine._lane_calls import Entry, LaneCall, Prepare, Record, WholeCall, as_call, timed
from parawrap.engine._stats import Stats, Tally
from parawrap.engine._thread_pool import ThreadPool
from parawrap.engine.cut import Cutter, ShardPlan
from parawrap.engine.extents import FlatCall
from parawrap.engine.join import Originals, join, with_originals
from parawrap.engine.join_rules import JoinRules
from parawrap.errors import SessionError, ShardError
from parawrap.lanes import Lane, LaneFuture, Modes, TaskOutcome, Turns, TurnsOf, here, raise_first_failure
from parawrap.replicas import Freshness, LaneReplica
from parawrap.tree import WholeLeaf, flatten

__all__ = ["ChunkCall", "Ready", "Session", "make_failed_future"]

_CPU = torch.device("cpu")
_TENSOR = frozenset({torch.Tensor})
_on_cpu = attrgetter("is_cpu")
_WRITTEN = (
    "the model wrote in place into a tensor that every lane gets whole, so each lane wrote once. Pass one copy per row, "
    "cut the tensor with in_dims, or use an out-of-place operation"
)


ChunkCall = tuple[Entry, tuple[Any, ...], dict[str, Any]]
"""One of several calls that travel in one message."""


class Ready(NamedTuple):
    """The copies of the target for whole calls that run later, up to date with it, and the modes of the caller."""

    copies: Sequence[LaneReplica]
    modes: Modes


class Pool(Protocol):
    """The lanes of one target, and its copies for them: threads (`ThreadPool`), other processes, or NeuronCores."""

    @property
    def lanes(self) -> Sequence[Lane]: ...
    @property
    def backend(self) -> Backend: ...
    @property
    def home(self) -> torch.device | None: ...
    @property
    def closed(self) -> bool: ...
    @property
    def has_target_here(self) -> bool: ...
    @property
    def shares_generators(self) -> bool: ...
    @property
    def cuts_for_one_lane(self) -> bool: ...
    @property
    def generators(self) -> Collection[torch.Generator]: ...
    @property
    def learns(self) -> bool: ...
    @property
    def freshness(self) -> Freshness: ...
    def is_ready(self) -> bool: ...
    def is_at_home(self, device: torch.device) -> bool: ...
    def refresh(self) -> Sequence[LaneReplica]: ...
    def refresh_for_later(self) -> Sequence[LaneReplica]: ...
    def renew(self) -> None: ...
    def run(
        self, calls: Sequence[LaneCall], modes: Modes, sources: Collection[torch.device], turns: TurnsOf | None
    ) -> list[TaskOutcome]: ...
    def submit(self, call: WholeCall, copies: Sequence[LaneReplica], modes: Modes) -> LaneFuture: ...
    @property
    def submit_chunk(
        self,
    ) -> Callable[[Sequence[WholeCall], Sequence[LaneReplica], Modes], Sequence[LaneFuture]] | None: ...
    def run_plainly(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any], record: Record | None) -> Any: ...
    def cancel(self) -> None: ...
    def close(self) -> None: ...


class Session:
    """The calls of one target, on the lanes of one pool, until `close`. Thread-safe.

    `call` runs scatter, replicate, apply, and gather. A call depends on its arguments, the options, the target, and the
    modes of torch, and never on earlier calls. Without `pool`, lanes are threads of this process. `devices` has one entry
    per lane: where the lane gets its shard.
    """

    def __init__(
        self,
        target: Callable[..., Any],
        devices: Sequence[torch.device],
        *,
        cutters: Mapping[str | None, Cutter],
        rules: JoinRules,
        output_device: torch.device | None = None,
        pool: Pool | None = None,
    ) -> None:
        self.target = target
        self.devices = tuple(devices)
        self.cutters = cutters
        self.rules = rules
        self.output_device = output_device  # None: the device of the module, or of a callable's first tensor
        self.pool: Pool = pool or ThreadPool(target, devices)
        self.tally = Tally(len(self.devices))
        self.recorder = Recorder(target)
        self._turns = Turns(self.devices, share_generators=self.pool.shares_generators)
        self._has_warned_of_plan = False
        self._futures: WeakSet[Future[Any]] = WeakSet()
        self._lanes_are_on_cpu = all(each is None or each.type == "cpu" for each in (*devices, output_device))
        self._has_one_lane = len(self.devices) == 1 and not self.pool.cuts_for_one_lane

    def call(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Scatter, replicate, apply, and gather; or run the call plainly if there is nothing to cut."""
        if (self._has_one_lane and self._is_there(args, kwargs)) or not self.pool.is_ready():
            return self._run_plainly(entry, args, kwargs)
        cutter = self.cutters[entry.method]
        flat = cutter.flatten(args, kwargs)
        plan = cutter.plan(flat, len(self.devices))
        if plan.hint is not None and not self._has_warned_of_plan:
            self._has_warned_of_plan = True
            warn_caller(plan.hint)
        if self._is_whole_here(plan, flat):
            return self._run_plainly(entry, args, kwargs)
        sources = self._sources(flat)
        copies_rows = torch.is_grad_enabled()
        columns = plan.columns(flat, copies_rows)
        calls = self._scatter(entry, plan, flat, columns, self.pool.refresh(), sources)
        versions = plan.written(flat) if len(calls) > 1 and None in plan.dims else []
        modes = Modes.capture(self.pool.backend.type)
        outputs = self.apply(calls, flat.leaves, modes, sources or (), plan.describe)
        if versions and versions != plan.written(flat):
            raise ShardError(_WRITTEN)
        if copies_rows:
            plan.write_back(flat, columns)
        if not flat.on_cpu:
            plan.update(flat, [call.shard for call in calls if call.shard is not None])
        with modes.without_autocast() if modes.autocast else nullcontext():
            output = self._gather(outputs, plan.sizes, flat, partial(_originals_of, calls, plan, flat))
        self.tally.cut(plan.sizes)
        return output

    def apply(
        self,
        calls: Sequence[LaneCall],
        leaves: Sequence[Any],
        modes: Modes | None = None,
        sources: Collection[torch.device] = (),
        describe: Callable[[int], str] | None = None,
    ) -> list[Any]:
        """Run call i in lane i, and return their outputs in lane order.

        `leaves` are all arguments, taken apart. `sources` are devices with data for the calls, other than the module's.
        `describe` returns the contents of a shard for the note of an error.

        Raises:
            BaseException: If a lane fails: the error of the first such lane, with a note on lane, device, and shard. All
                other lanes have finished.
        """
        pool = self.pool
        modes = Modes.capture(pool.backend.type) if modes is None else modes
        turns = self._turns.decide(leaves, pool.generators, learns=pool.learns, target=self.target)
        generators = [] if turns else self._turns.read_generators()
        outcomes = pool.run(calls, modes, sources, turns)
        raise_first_failure(outcomes, pool.lanes, describe)
        self._turns.warn_of_draws(generators)
        outputs = [outcome.value for outcome in outcomes]
        if not self._stays_on_cpu:
            record_use(flatten(outputs)[0])
        return outputs

    # Whole calls, each in one lane

    def get_ready(self) -> Ready | None:
        """Return what a whole call needs, for one call or a stream of calls; None if they must run plainly.

        Raises:
            SessionError: If the lanes are closed.
            ReplicaError: If a copy cannot be made.
        """
        if not self.pool.is_ready():
            if self.pool.closed:
                msg = "the lanes are closed: submit inside the `with` block, and read the outputs of map before it ends"
                raise SessionError(msg)
            return None
        return Ready(self.pool.refresh_for_later(), Modes.capture(self.pool.backend.type))

    def submit(
        self,
        entry: Entry,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        prepare: Prepare | None = None,
        ready: Ready | None = None,
    ) -> LaneFuture:
        """Run a call whole in one lane.

        With `prepare`, the lane computes the arguments of the call first, as ``prepare(*args)``. A stream gives `ready`.
        """
        ready = ready or self.get_ready()
        if ready is None:
            return _done(partial(self._run_plainly, entry, args, kwargs, prepare))
        future = self.pool.submit(self._make_whole_call(entry, args, kwargs, prepare), *ready)
        self._futures.add(future)
        return future

    def submit_chunk(self, calls: Sequence[ChunkCall], prepare: Prepare | None, ready: Ready) -> Sequence[LaneFuture]:
        """Run several calls, each whole in one lane; they travel to a worker in one message. If it raises, none is sent."""
        assert self.pool.submit_chunk is not None
        futures = self.pool.submit_chunk([self._make_whole_call(*call, prepare) for call in calls], *ready)
        self._futures.update(futures)
        return futures

    def cancel(self) -> None:
        """Drop submitted calls that have not started."""
        for future in list(self._futures):
            future.cancel()
        self.pool.cancel()

    def refresh(self) -> None:
        """Copy everything to the lanes at the next call."""
        self.pool.renew()

    def close(self) -> None:
        """Let the lanes finish, and end them. A call in flight finishes too."""
        self.pool.close()
        unused = set.intersection(*(cutter.unused for cutter in self.cutters.values()))
        if unused and self.tally.calls:
            warn_caller(
                f"in_dims names {min(unused)!r}, and no call passed a keyword argument of that name. Correct the name, or "
                "leave it out"
            )

    def stats(self) -> Stats:
        """Return the counters."""
        return self.tally.stats(self.pool.lanes, self.pool.freshness)

    def trace(self, path: str | Path) -> Trace:
        """Return a recorder of the calls of each lane."""
        return Trace(self.recorder, self.pool.lanes, path)

    # The steps of a call

    def _make_whole_call(
        self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any], prepare: Prepare | None
    ) -> WholeCall:
        call = WholeCall(entry, args, kwargs, self.cutters[entry.method], self._finish, prepare)
        call.sources = self._sources_of(call)
        if self.recorder.traces:
            call.record_prepare = partial(self.recorder.record, "prepare", entry.batch, None)
            call.record = partial(self.recorder.record, entry.method, entry.batch)
        return call

    def _run_plainly(
        self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any], prepare: Prepare | None = None
    ) -> Any:
        """Run a call in the caller's thread; in a lane if this process does not have the target."""
        if not self.pool.has_target_here and self.pool.is_ready():
            return self.submit(entry, args, kwargs, prepare).result()
        record = None
        if self.recorder.traces and here.lane is None:  # a lane's own span has it already
            record = partial(self.recorder.record, entry.method, entry.batch, None)
        if prepare is not None:
            args, kwargs = as_call(timed(partial(self.recorder.record, "prepare", entry.batch, None), None, prepare, *args))
        output = self.pool.run_plainly(entry, args, kwargs, record)
        output = output if self.rules.keep_single else join([output], (1,), self.rules)
        self.tally.plain()
        return output

    def _scatter(
        self,
        entry: Entry,
        plan: ShardPlan,
        flat: FlatCall,
        columns: Sequence[Sequence[Any]],
        copies: Sequence[LaneReplica],
        sources: Collection[torch.device] | None,
    ) -> list[LaneCall]:
        """Return one call per shard."""
        if flat.on_cpu and self._stays_on_cpu:
            calls = list(map(LaneCall, repeat(entry), cycle(copies), zip(*columns, strict=True)))
        else:
            calls = [
                LaneCall(entry, copy, piece=piece)
                for copy, piece in zip(cycle(copies), plan.cut(flat, columns), strict=False)
            ]
            for call in calls if sources is None else ():
                call.place(_CPU)
        if self.recorder.traces:
            for call, rows in zip(calls, plan.sizes, strict=True):
                call.record = partial(self.recorder.record, entry.method, entry.batch, rows)
        return calls

    def _gather(self, outputs: Sequence[Any], sizes: Sequence[int], flat: FlatCall, originals: Originals) -> Any:
        """Join the outputs of shards of those sizes on the output device."""
        device = None  # all outputs are already on the CPU
        if not self._stays_on_cpu or (self.pool.home is None and self.output_device is None and not flat.on_cpu):
            device = self.output_device or self.pool.home or _first_device(flat.leaves) or self.devices[0]
            self.pool.backend.flush(outputs)  # in one call: otherwise each output would be a separate graph
        return join(outputs, sizes, self.rules, device, originals)

    def _finish(self, output: Any, call: WholeCall, copy: LaneReplica, lane: int) -> Any:
        """Return the caller's output of a whole call. Runs in the lane's thread."""
        if call.shard is None:
            output = with_originals(output, copy.original_of)
            output = output if self.rules.keep_single else join([output], (1,), self.rules)
        else:
            plan, flat = call.flatten()
            output = self._gather([output], plan.sizes, flat, lambda: [copy.original_of])
            plan.update(flat, [call.shard])
        self.tally.whole(lane, call.rows or 0)
        return output

    # Devices

    @property
    def _stays_on_cpu(self) -> bool:
        """True if the lanes, the output, and the model, where it was at the last refresh, are on the CPU."""
        home = self.pool.home
        return self._lanes_are_on_cpu and (home is None or home.type == "cpu")

    def _sources(self, flat: FlatCall) -> Collection[torch.device] | None:
        """Return the devices of inputs and output, other than the module's; None if everything is on the CPU."""
        if self._stays_on_cpu and (flat.on_cpu or all(map(_is_on_cpu, flat.leaves))):
            return None
        devices = (*map(device_of, flat.leaves), self.output_device)
        return {device for device in devices if device is not None and device != self.pool.home}

    def _sources_of(self, call: WholeCall) -> Collection[torch.device] | None:
        """Return the same for a whole call. `prepare` may read from any device."""
        stays_on_cpu = self._stays_on_cpu
        if stays_on_cpu and call.prepare is not None:
            return None
        if call.prepare is not None:
            devices = (*map(device_of, flatten(call.args)[0]), *self.devices, self.output_device)
            return {device for device in devices if device is not None}
        if stays_on_cpu and not call.kwargs and _TENSOR.issuperset(map(type, call.args)) and all(map(_on_cpu, call.args)):
            return None
        return self._sources(call.flatten()[1])

    def _is_there(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """True if target, arguments, and output are on the device of the one lane. False if it takes long to find out."""
        (device,) = self.devices
        if self._lanes_are_on_cpu:
            return self.pool.is_at_home(device)
        is_there = not kwargs and all(type(each) is torch.Tensor and each.device == device for each in args)
        return is_there and self.output_device in (None, device) and self.pool.is_at_home(device)

    def _is_whole_here(self, plan: ShardPlan, flat: FlatCall) -> bool:
        """True if a call is not cut, and the module, the arguments, and the output are all on the device of lane 0."""
        if len(plan.sizes) > 1:
            return False
        device = self.devices[0]
        return (
            self.pool.is_at_home(device)
            and self.output_device in (None, device)
            and ((flat.on_cpu and device.type == "cpu") or all(device_of(leaf) in (None, device) for leaf in flat.leaves))
        )


def _is_on_cpu(leaf: Any) -> bool:
    return getattr(leaf, "is_cpu", not isinstance(leaf, WholeLeaf))


def _first_device(leaves: Sequence[Any]) -> torch.device | None:
    return next((device for leaf in leaves if (device := device_of(leaf)) is not None), None)


def _originals_of(calls: Sequence[LaneCall], plan: ShardPlan, flat: FlatCall) -> Sequence[Callable[[Any], Any]]:
    """Return one function per call. It maps a lane's copy of a value to the caller's value, or to None."""
    same = {id(value): value for leaf in plan.whole(flat) for value in (leaf, getattr(leaf, "value", leaf))}
    origins = [same if call.shard is None else {**same, **call.shard.origins} for call in calls]
    return [partial(_find_origin, found, call.copy.original_of) for found, call in zip(origins, calls, strict=True)]


def _find_origin(origins: Mapping[int, Any], find: Callable[[Any], Any], value: Any) -> Any:
    found = origins.get(id(value))
    return find(value) if found is None and isinstance(value, torch.Tensor) else found


def _done(run: Callable[[], Any]) -> LaneFuture:
    """Return a future that is done."""
    try:
        output = run()
    except Exception as error:  # noqa: BLE001
        return make_failed_future(error)
    future = LaneFuture()
    future.set_result(output)
    return future


def make_failed_future(error: Exception) -> LaneFuture:
    """Return a future with an error. The frames of its traceback do not hold the future: that would be a cycle."""
    future = LaneFuture()
    future.set_exception(error)
    return future
