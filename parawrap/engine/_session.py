"""The calls of one target: scatter, replicate, apply, and gather, in this order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

import torch

from parawrap.backends import Backend, device_of, record_use, warn_caller
from parawrap.engine._call_recorder import Recorder, Trace, Work
from parawrap.engine._shard_task import Placed
from parawrap.engine._stats import Stats, Tally
from parawrap.engine._turns import Turns
from parawrap.engine._whole_call import Prepare, WholeCall, originals_of, prepared
from parawrap.errors import ReplicaError, SessionError, ShardError
from parawrap.lanes import (
    Lane,
    LaneFuture,
    LanePool,
    Modes,
    Outcome,
    Task,
    TurnsOf,
    first_failure,
    here,
    intra_op_threads,
    sees_only_its_own_thread,
)
from parawrap.replicas import Freshness, LaneReplica, ReplicaSet
from parawrap.shards import (
    Cutter,
    FlatCall,
    JoinRules,
    Originals,
    Shard,
    ShardPlan,
    join,
    with_originals,
)
from parawrap.tree import Opaque, flatten

__all__ = ["Entry", "Ready", "Session", "failed_future"]

_NOWHERE: tuple[torch.device, ...] = ()
_TENSOR = frozenset({torch.Tensor})
_on_cpu = attrgetter("is_cpu")
_WRITTEN = (
    "the model wrote in place into a tensor that every lane gets whole, so each lane wrote once. Pass one copy per row, "
    "cut the tensor with in_dims, or use an out-of-place operation"
)


class Entry(NamedTuple):
    """The functions that run a call of the target.

    `plain` is the call without parawrap. `in_lane` is the same for a lane that runs the target itself. `method` is the name
    of a method of a replica; None calls the replica itself, including its hooks. `batch` is the number of a batch in its
    stream, for traces.
    """

    plain: Callable[..., Any]
    method: str | None = None
    in_lane: Callable[..., Any] | None = None
    batch: int | None = None

    def of(self, replica: Any) -> Callable[..., Any]:
        return replica if self.method is None else getattr(replica, self.method)  # type: ignore[no-any-return]


class Ready(NamedTuple):
    """The replicas of all lanes, up to date with the model, and the modes of the caller."""

    replicas: list[LaneReplica]
    modes: Modes


class Replicas(Protocol):
    """The copies of the target that a session's lanes use, one per lane: `ReplicaSet`, or copies in other processes."""

    is_ready: bool
    generators: tuple[torch.Generator, ...]
    freshness: Freshness
    home: torch.device | None

    @property
    def has_model(self) -> bool: ...
    @property
    def learns(self) -> bool: ...
    @property
    def current(self) -> Sequence[Any]: ...
    def for_later(self) -> list[Any]: ...
    def ready(self) -> bool: ...
    def is_on(self, device: torch.device) -> bool: ...
    def stale(self) -> bool: ...
    def ran_plainly(self) -> None: ...
    def warn(self) -> None: ...
    def refresh(self) -> None: ...
    def renew(self) -> None: ...
    def forget(self) -> None: ...


class Pool(Protocol):
    """The lanes of cut calls: `LanePool`, or lanes that work in other processes."""

    backend: Backend
    threads: int | None
    closed: bool

    @property
    def home(self) -> torch.device | None: ...
    @home.setter
    def home(self, device: torch.device | None) -> None: ...
    @property
    def lanes(self) -> tuple[Lane, ...]: ...
    @property
    def alive(self) -> bool: ...
    def run(
        self,
        tasks: Sequence[Task],
        modes: Modes,
        sources: Collection[torch.device] = ...,
        *,
        turns: TurnsOf | None = ...,
    ) -> list[Outcome]: ...
    def idle(self) -> AbstractContextManager[None]: ...
    def run_on_model(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...
    def close(self) -> None: ...


class Session:
    """Owns the lanes and the replicas of one target until `close`. Thread-safe.

    `call` runs scatter, replicate, apply, and gather. Each of them may also be called alone, like the methods of
    torch.nn.DataParallel. A call depends on its arguments, the options, the model, and the modes of torch, and never on
    earlier calls. Lanes that work in other processes bring their own `replicas` and `pool`, and submit whole calls in their
    own way.
    """

    def __init__(
        self,
        target: Callable[..., Any],
        devices: Sequence[torch.device],
        *,
        cutters: Mapping[str | None, Cutter],
        rules: JoinRules,
        output_device: torch.device | None = None,
        replicas: Replicas | None = None,
        pool: Pool | None = None,
    ) -> None:
        self.target = target
        self.devices = tuple(devices)
        self.cutters = cutters
        self.rules = rules
        self.output_device = output_device  # None: the device of the module, or of a callable's first tensor
        replicas = ReplicaSet(target, devices) if replicas is None else replicas
        self._replicas = replicas if replicas.has_model or isinstance(target, torch.nn.Module) else None
        home = replicas.home
        self._turns = Turns(self.devices, share_generators=pool is None)
        if pool is None:
            self._lane_pool = pool = LanePool(self.devices, home)
        self.pool: Pool = pool
        self.tally = Tally(len(self.devices))
        self.recorder = Recorder(target)
        self._refreshing = threading.Lock()
        self._has_warned_of_plan = False
        self._futures: WeakSet[Future[Any]] = WeakSet()
        self._stays_on_cpu = all(d is None or d.type == "cpu" for d in (*self.devices, home, output_device))
        self._is_one_cpu_lane = self._stays_on_cpu and len(self.devices) == 1

    def call(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Scatter, replicate, apply, and gather; or run the call plainly if there is nothing to cut."""
        if self._is_one_cpu_lane or self.must_run_plainly():
            return self._run_plainly(entry, args, kwargs)
        cutter, lanes = self.cutters[entry.method], len(self.devices)
        flat = cutter.flatten(args, kwargs)
        plan = cutter.plan(flat, lanes)
        if plan.hint is not None and not self._has_warned_of_plan:
            self._has_warned_of_plan = True
            warn_caller(plan.hint)
        if self._is_whole_here(plan, flat):
            return self._run_plainly(entry, args, kwargs)
        replicas = self.replicate()
        modes = Modes.capture(self.pool.backend.type)
        turns = self.decide_turns(flat.leaves)
        sources = _NOWHERE if self._stays_on_cpu and flat.on_cpu else self._sources(flat)
        versions = plan.written(flat) if None in plan.dims and len(plan.sizes) > 1 else []
        with intra_op_threads(None if turns else self.pool.threads):
            tasks, shards = self.scatter(entry, replicas, plan, flat, sources)
            outputs = self.apply(tasks, modes, sources, turns=turns, first=replicas[0])
            if versions and versions != plan.written(flat):
                raise ShardError(_WRITTEN)
            if not (flat.on_cpu and self._stays_on_cpu):
                shards = shards or [task.shard for task in tasks]
                plan.update(flat, shards)
            device = None if self._stays_on_cpu else self.device_of_output(flat)
            originals = partial(originals_of, replicas, len(plan.sizes), shards, plan.whole(flat))
            with modes.without_autocast() if modes.autocast else nullcontext():
                output = self.gather(outputs, plan.sizes, device, originals)
        self.tally.cut(plan.sizes)
        return output

    # The four verbs

    def scatter(
        self,
        entry: Entry,
        replicas: list[LaneReplica],
        plan: ShardPlan,
        flat: FlatCall,
        sources: Collection[torch.device],
        *,
        whole: bool = False,
    ) -> tuple[list[Any], list[Shard]]:
        """Return one task per shard, and the shards that this method made.

        There are none if each task makes its own, or if the call has only positional tensors on the CPU.
        """
        replicas = replicas[: len(plan.sizes)]
        functions = [self._function_of(entry, replica, whole=whole) for replica in replicas]
        if self.recorder.traces:
            works = [self.recorder.work(entry.method, entry.batch, size) for size in plan.sizes]
            functions = [self._recorded(*each) for each in zip(works, replicas, functions, strict=True)]
        if flat.on_cpu and self._stays_on_cpu:
            return list(map(partial, functions, *plan.columns(flat))), []
        devices = [self.devices[replica.lane] for replica in replicas]
        if self._stays_on_cpu and not sources:
            shards = plan.scatter(flat, devices)
            return [
                partial(function, *shard.args, **shard.kwargs) for function, shard in zip(functions, shards, strict=True)
            ], shards
        return list(map(Placed, functions, plan.cut(flat), devices)), []

    def replicate(self, lanes: int | None = None) -> list[LaneReplica]:
        """Return the replicas of the first `lanes` lanes, up to date with the original.

        Raises:
            ReplicaError: If a replica cannot be made.
        """
        lanes = len(self.devices) if lanes is None else lanes
        if self._replicas is None:
            return [LaneReplica(lane, self.target, _no_original) for lane in range(lanes)]
        with self._refreshing:
            if self._replicas.stale():
                with self.pool.idle():
                    self._replicas.refresh()
                self.pool.home = self._replicas.home
            return list(self._replicas.current[:lanes])

    def apply(
        self,
        tasks: Sequence[Task],
        modes: Modes | None = None,
        sources: Collection[torch.device] = (),
        *,
        turns: TurnsOf | None = None,
        first: LaneReplica | None = None,
    ) -> list[Any]:
        """Run task i in lane i and return their values in lane order.

        `sources` are devices with data for the tasks, other than the module's device. `turns` as `decide_turns` returns it.
        If lane 0's replica is given as `first`, the buffers that lane 0 wrote are copied back to the model, also after an
        error.

        Raises:
            BaseException: If a lane fails: the error of the first such lane, with a note on lane, device, and shard. All
                other lanes have finished.
        """
        modes = Modes.capture(self.pool.backend.type) if modes is None else modes
        generators = [] if turns else self._turns.read_generators()
        outcomes = self.pool.run(tasks, modes, sources, turns=turns)
        has_failed = any(outcome.error is not None for outcome in outcomes)
        if first is not None and first.write_back is not None:
            with self._refreshing, self.pool.idle():
                try:
                    first.write_back()
                except ReplicaError:
                    if not has_failed:  # the error of a lane comes first
                        raise
        if self._replicas is not None:
            self._replicas.warn()
        if has_failed:
            raise first_failure(outcomes, self.pool.lanes)
        values = [outcome.value for outcome in outcomes]
        self._turns.warn_of_draws(generators)
        if not self._stays_on_cpu:
            record_use(leaf for value in values for leaf in flatten(value)[0])
        return values

    def gather(
        self,
        outputs: Sequence[Any],
        sizes: Sequence[int],
        device: torch.device | None = None,
        originals: Originals | None = None,
    ) -> Any:
        """Join the outputs of shards of those sizes, on `device` or else on the output device."""
        if self._stays_on_cpu:
            device = None  # all outputs are already on the CPU
        else:
            device = device or self.output_device or self.pool.home or self.devices[0]
            self.pool.backend.flush(outputs)  # in one call: otherwise each output would be a separate graph
        return join(outputs, sizes, self.rules, device, originals)

    def decide_turns(self, leaves: Sequence[Any]) -> TurnsOf | None:
        """Return the lanes of a call that run one after another. `leaves` are its arguments, taken apart."""
        replicas = self._replicas
        learns = replicas is not None and replicas.learns
        return self._turns.decide(leaves, replicas.generators if replicas else (), learns=learns, target=self.target)

    # Whole calls, each in one lane

    def get_ready(self) -> Ready | None:
        """Return what a whole call needs, for one call or a stream of calls; None if they must run plainly.

        Raises:
            SessionError: If the lanes are closed.
            ReplicaError: If a replica cannot be made.
        """
        if self.must_run_plainly():
            if self.pool.closed:
                msg = "the lanes are closed: submit inside the `with` block, and read the outputs of map before it ends"
                raise SessionError(msg)
            return None
        replicas = self.replicate()
        if self._replicas is not None:
            replicas = self._replicas.for_later()
            self._replicas.warn()  # of earlier calls: warnings of a lane's thread do not point at the user's line
        return Ready(replicas, Modes.capture(self.pool.backend.type))

    def submit(
        self,
        entry: Entry,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        prepare: Prepare | None = None,
        ready: Ready | None = None,
    ) -> LaneFuture:
        """Run a call whole in one lane: on the CPU the first free lane, on other devices the lane with the least work.

        With `prepare`, the lane computes the arguments of the call first, as ``prepare(*args)``. A stream gives `ready`.
        """
        ready = ready or self.get_ready()
        if ready is None:
            return _done(partial(self._run_plainly_prepared, entry, args, kwargs, prepare))
        replicas, modes = ready
        if prepare is not None:
            future = self._submit_prepared(entry, replicas, args, modes, prepare)
        elif self._stays_on_cpu and not kwargs and _TENSOR.issuperset(map(type, args)) and all(map(_on_cpu, args)):
            rows = self.cutters[entry.method].rows(args)
            future = self._lane_pool.submit_to_any(partial(self._run_whole, entry, replicas, rows, args, kwargs), modes)
        else:
            future = self._submit_flat(entry, replicas, args, kwargs, modes)
        self._futures.add(future)
        return future

    def cancel(self) -> None:
        """Drop submitted calls that have not started."""
        for future in list(self._futures):
            future.cancel()

    def refresh(self) -> None:
        """Copy everything into the replicas at the next call."""
        if self._replicas is not None:
            with self._refreshing:
                self._replicas.renew()

    def close(self) -> None:
        """Let the lanes finish, end their threads, and drop the replicas. A call in flight finishes too."""
        self.pool.close()
        unused = set[str]().union(*(cutter.unused for cutter in self.cutters.values()))
        unused.intersection_update(*(cutter.unused for cutter in self.cutters.values()))
        if unused and self.tally.calls:
            warn_caller(
                f"in_dims names {min(unused)!r}, and no call passed a keyword argument of that name. Correct the name, or "
                "leave it out"
            )
        with self._refreshing:
            if self._replicas is not None:
                self._replicas.warn()
                self._replicas.forget()

    def stats(self) -> Stats:
        """Return the counters."""
        fresh = self._replicas.freshness if self._replicas is not None else Freshness()
        return self.tally.stats(self.pool.lanes, fresh)

    def trace(self, path: str | Path) -> Trace:
        """Return a recorder of the calls of each lane."""
        return Trace(self.recorder, self.pool.lanes, path)

    def _recorded(self, work: Work, replica: LaneReplica, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function`, for tasks of the replica's lane, with a record of when it runs."""
        return partial(self.recorder.run, work, replica.lane, function)

    # Plain calls, in the caller's thread

    def must_run_plainly(self) -> bool:
        """True if a call of this thread must not be cut now: inside a lane, after the block, or while traced."""
        return (
            here.lane is not None
            or not self.pool.alive
            or sees_only_its_own_thread()
            or (self._replicas is not None and not (self._replicas.is_ready or self._replicas.ready()))
            or (not self._stays_on_cpu and self.pool.backend.is_capturing())
        )

    def _run_plainly(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call in the caller's thread."""
        plain = entry.plain
        if self.recorder.traces and here.lane is None:  # inside a lane, the call is part of that lane's span
            plain = partial(self.recorder.run, self.recorder.work(entry.method, entry.batch, None), None, plain)
        if self._replicas is None:
            output = plain(*args, **kwargs)
        else:
            try:
                output = self.pool.run_on_model(plain, args, kwargs)
            finally:
                self._replicas.ran_plainly()
        output = output if self.rules.keep_single else join([output], (1,), self.rules)
        self.tally.plain()
        return output

    # The steps of a call

    def _function_of(self, entry: Entry, replica: LaneReplica, *, whole: bool = False) -> Callable[..., Any]:
        if replica.module is self.target:
            return entry.in_lane or entry.plain
        function = replica.module if entry.method is None else getattr(replica.module, entry.method)
        return replica.whole(function) if whole else replica.prepared(function)

    def _submit_flat(
        self,
        entry: Entry,
        replicas: list[LaneReplica],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        modes: Modes,
    ) -> LaneFuture:
        """Submit a call with other arguments than CPU tensors.

        On an accelerator, the lane with the least work runs it, and copies the inputs while its earlier work runs.
        """
        plan, flat = self.cutters[entry.method].whole(args, kwargs)
        sources = self._sources(flat)
        if self._stays_on_cpu and not sources:
            task = partial(self._run_whole, entry, replicas, plan.rows, args, kwargs)
            return self._lane_pool.submit_to_any(task, modes)
        lane = self._lane_pool.least_loaded()
        call = WholeCall(self, entry, replicas[lane.index], sources)
        call.take(plan, flat)
        return self._lane_pool.submit(lane, call.run, modes, call.place, sources)

    def _submit_prepared(
        self, entry: Entry, replicas: list[LaneReplica], batch: tuple[Any, ...], modes: Modes, prepare: Prepare
    ) -> LaneFuture:
        """Submit a call with `prepare`. On an accelerator, `prepare` too runs next to earlier work."""
        if self._stays_on_cpu:
            return self._lane_pool.submit_to_any(partial(self._run_prepared, entry, replicas, batch, prepare), modes)
        lane = self._lane_pool.least_loaded()
        devices = (*map(device_of, flatten(batch)[0]), *self.devices, self.output_device)  # `prepare` may read from any
        sources = {device for device in devices if device is not None}
        call = WholeCall(self, entry, replicas[lane.index], sources)

        def stage() -> None:
            call.take(*self.cutters[entry.method].whole(*prepared(prepare, batch, self.recorder, entry.batch, lane.index)))
            call.place()

        return self._lane_pool.submit(lane, call.run, modes, stage, sources)

    def _run_prepared(
        self, entry: Entry, replicas: Sequence[LaneReplica], batch: tuple[Any, ...], prepare: Prepare, lane: Lane
    ) -> Any:
        args, kwargs = prepared(prepare, batch, self.recorder, entry.batch, lane.index)
        plan, _ = self.cutters[entry.method].whole(args, kwargs)
        return self._run_whole(entry, replicas, plan.rows, args, kwargs, lane)

    def _run_plainly_prepared(
        self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any], prepare: Prepare | None
    ) -> Any:
        if prepare is not None:
            args, kwargs = prepared(prepare, args, self.recorder, entry.batch, None)
        return self._run_plainly(entry, args, kwargs)

    def _run_whole(
        self,
        entry: Entry,
        replicas: Sequence[LaneReplica],
        rows: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        lane: Lane,
    ) -> Any:
        """Run a call whole as the task of a lane."""
        replica = replicas[lane.index]
        function = self._function_of(entry, replica, whole=True)
        if self.recorder.traces:
            function = self._recorded(self.recorder.work(entry.method, entry.batch, rows), replica, function)
        output = function(*args, **kwargs)
        output = with_originals(output, replica.original_of)
        output = output if self.rules.keep_single else join([output], (1,), self.rules)
        self.tally.whole(lane.index, rows)
        return output

    # Devices

    def device_of_output(self, flat: FlatCall) -> torch.device | None:
        """Return the output device, or for a callable the device of its first tensor, as in the plain call."""
        if self.output_device is not None or self.pool.home is not None:
            return self.output_device
        return next((device for leaf in flat.leaves if (device := device_of(leaf)) is not None), None)

    def _sources(self, flat: FlatCall) -> Collection[torch.device]:
        """Return the devices of inputs and output, other than the module's; none if everything is on the CPU."""
        if self._stays_on_cpu and all(getattr(leaf, "is_cpu", not isinstance(leaf, Opaque)) for leaf in flat.leaves):
            return _NOWHERE
        devices = (*map(device_of, flat.leaves), self.output_device)
        return {device for device in devices if device is not None and device != self.pool.home}

    def _is_whole_here(self, plan: ShardPlan, flat: FlatCall) -> bool:
        """True if a call is not cut, and the module, the arguments, and the output are all on the device of lane 0."""
        if len(plan.sizes) > 1 or self._stays_on_cpu:
            return len(plan.sizes) == 1
        leaves, device = flat.leaves, self.devices[0]
        return (
            self._replicas is not None
            and self._replicas.is_on(device)
            and self.output_device in (None, device)
            and all(device_of(leaf) in (None, device) for leaf in leaves)
        )


def _no_original(value: Any) -> None:
    """Return None: a target that is not a module has no copies."""


def _done(run: Callable[[], Any]) -> LaneFuture:
    """Return a future that is done."""
    try:
        output = run()
    except Exception as error:  # noqa: BLE001
        return failed_future(error)
    future = LaneFuture()
    future.set_result(output)
    return future


def failed_future(error: Exception) -> LaneFuture:
    """Return a future with an error. The frames of its traceback do not hold the future: that would be a cycle."""
    future = LaneFuture()
    future.set_exception(error)
    return future
