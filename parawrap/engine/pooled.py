"""Sessions over lanes elsewhere: worker processes, and NeuronCores.

The calls are cut and joined as in `call.py`; a `Pool` runs them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from time import perf_counter_ns
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

import torch

from parawrap.backends import Backend, device_of, warn_caller
from parawrap.engine.call import Entry, Lane, Modes, here, raise_first_failure, without_autocast
from parawrap.engine.cut import Cutter, Piece, Shard, ShardPlan
from parawrap.engine.device_streams import LaneFuture
from parawrap.engine.extents import FlatCall
from parawrap.engine.join import join, with_originals
from parawrap.engine.join_rules import JoinRules
from parawrap.engine.stats import LaneStats, Stats
from parawrap.engine.streams import Pending, Prepare, Starter, StreamSize, as_call, failed, succeeded
from parawrap.engine.trace import Recorder, Trace, timed
from parawrap.errors import SessionError, ShardError, add_note
from parawrap.tree import WholeLeaf

_CPU = torch.device("cpu")
_WRITTEN = (
    "the model wrote in place into a tensor that every lane gets whole, so each lane wrote once. Pass one copy per row, "
    "cut the tensor with in_dims, or use an out-of-place operation"
)

Record = Callable[..., None]
"""Takes the index of a lane, the start and the end of its work as ``perf_counter_ns``, and the error if it raised."""


class TaskOutcome(NamedTuple):
    """A value, or the exception that was raised instead, with the traceback that it had in its lane."""

    value: Any = None
    error: BaseException | None = None


class PartCall:
    """One lane's part of a cut call. The caller makes it, and a pool runs it once."""

    __slots__ = ("args", "entry", "kwargs", "lane", "piece", "record", "shard")

    def __init__(self, entry: Entry, lane: int, piece: Piece) -> None:
        self.entry = entry
        self.lane = lane
        self.piece = piece
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        self.shard: Shard | None = None  # once it is placed
        self.record: Record | None = None

    def place(self) -> None:
        """Copy the arguments to the CPU."""
        if self.shard is None:
            self.shard = self.piece.on(_CPU)
            self.args, self.kwargs = self.shard.args, self.shard.kwargs


class PooledCall:
    """A call that one lane runs whole. The caller makes it, and a pool runs it once.

    With `prepare`, the lane computes the arguments first, as ``prepare(*args)``. `finish` takes the output, and returns the
    caller's.
    """

    def __init__(
        self,
        entry: Entry,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        cutter: Cutter,
        finish: Callable[[Any, PooledCall, Lane], Any],
        prepare: Prepare | None = None,
    ) -> None:
        self.entry = entry
        self.args = args
        self.kwargs = kwargs
        self.prepare = prepare
        self.finish = finish
        self.record: Record | None = None
        self.record_prepare: Record | None = None
        self._cutter = cutter

    @property
    def rows(self) -> int | None:
        """The number of rows; None before `prepare` has run."""
        return None if self.prepare is not None else self._cutter.whole(self.args, self.kwargs)[0].rows

    def flatten(self) -> tuple[ShardPlan, FlatCall]:
        """Return the plan that gives the arguments whole to one lane, and the arguments taken apart."""
        return self._cutter.whole(self.args, self.kwargs)

    def record_call(self, lane: int, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls another one, and records when it ran."""
        rows = self.rows  # counted now: the function may change the arguments
        return function if self.record is None else partial(timed, partial(self.record, rows), lane, function)

    def make_arguments(self, lane: int | None) -> None:
        """Compute the arguments with `prepare`, in the thread of that lane."""
        if self.prepare is not None:
            prepare, self.prepare = self.prepare, None
            self.args, self.kwargs = as_call(timed(self.record_prepare, lane, prepare, *self.args))


class QueuedCall:
    """A whole call that waits for a lane in a thread of this process. `future` gets its value."""

    def __init__(self, task: Callable[[Lane], Any], modes: Modes) -> None:
        self.future = LaneFuture()
        self._task = task
        self._modes = modes

    def __call__(self, lane: Lane) -> None:
        """Run the call in the lane's thread, unless it was cancelled."""
        if not self.future.set_running_or_notify_cancel():
            return
        start = perf_counter_ns()
        with lane.lock:
            try:
                value, failure = self._modes.run(partial(self._task, lane), lane.device, None), None
            except BaseException as error:  # noqa: BLE001  # a lane outlives its calls
                add_note(error, f"in {lane}")
                value, failure = None, error
            lane.tasks += 1
            lane.busy_ns += perf_counter_ns() - start
        try:
            self.future.set_result(value) if failure is None else self.future.set_exception(failure)
        finally:
            del value, failure  # the frames in the error's traceback lead back to this one


class Pool(Protocol):
    """The lanes of one target, and its copies for them, in other processes or on NeuronCores."""

    @property
    def has_target_here(self) -> bool: ...
    @property
    def cuts_for_one_lane(self) -> bool: ...
    @property
    def refreshes(self) -> int: ...
    @property
    def copied_bytes(self) -> int: ...
    @property
    def lanes(self) -> Sequence[Lane]: ...
    @property
    def backend(self) -> Backend: ...
    @property
    def home(self) -> torch.device | None: ...
    @property
    def closed(self) -> bool: ...
    def is_ready(self) -> bool: ...
    def refresh(self) -> None: ...
    def renew(self) -> None: ...
    def original_of(self, value: Any, /) -> Any: ...
    def run(self, calls: Sequence[PartCall], modes: Modes, turns: str | None) -> list[TaskOutcome]: ...
    def submit(self, call: PooledCall, modes: Modes) -> LaneFuture: ...
    def run_plainly(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any], record: Record | None) -> Any: ...
    def cancel(self) -> None: ...
    def close(self) -> None: ...


class PooledSession:
    """The calls of one target, on the lanes of a pool, until `close`. Thread-safe."""

    def __init__(
        self,
        target: Any,
        pool: Pool,
        *,
        cutters: Mapping[str | None, Cutter],
        rules: JoinRules,
        output_device: torch.device | None = None,
    ) -> None:
        self.target = target
        self.pool = pool
        self.devices = (_CPU,) * len(pool.lanes)
        self.cutters = cutters
        self.rules = rules
        self.output_device = output_device
        self.recorder = Recorder(target)
        self.shards: tuple[int, ...] = ()
        self._counting = threading.Lock()
        self._plain_lock = threading.RLock()  # plain calls run one at a time
        self._calls = self._plain_calls = 0
        self._has_warned_of_plan = False
        self._futures: WeakSet[Future[Any]] = WeakSet()

    def call(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Scatter, apply, and gather; or run the call plainly if there is nothing to cut."""
        pool = self.pool
        if not pool.is_ready() or (len(pool.lanes) == 1 and not pool.cuts_for_one_lane and self._is_at_home()):
            return self.run_plainly(entry, args, kwargs)
        cutter = self.cutters[entry.method]
        flat = cutter.flatten(args, kwargs)
        plan = cutter.plan(flat, len(pool.lanes))
        if plan.hint is not None and not self._has_warned_of_plan:
            self._has_warned_of_plan = True
            warn_caller(plan.hint)
        if len(plan.sizes) == 1 and self._is_at_home() and all(map(_is_on_cpu, flat.leaves)):
            return self.run_plainly(entry, args, kwargs)
        pool.refresh()
        calls = [PartCall(entry, index % len(pool.lanes), piece) for index, piece in enumerate(plan.cut(flat))]
        for call, rows in zip(calls, plan.sizes, strict=True):
            call.place()
            if self.recorder.traces:
                call.record = partial(self.recorder.record, entry.method, entry.batch, rows)
        versions = plan.written(flat) if len(calls) > 1 and None in plan.dims else []
        in_order = torch.are_deterministic_algorithms_enabled() or any(
            type(leaf) is torch.Generator for leaf in flat.leaves
        )
        outcomes = pool.run(calls, Modes.capture(pool.backend.type), "all" if in_order else None)
        errors = [(index, outcome.error) for index, outcome in enumerate(outcomes) if outcome.error is not None]
        if errors:
            outcomes.clear()
            raise_first_failure(errors, len(calls), pool.lanes, plan.describe)
        if versions and versions != plan.written(flat):
            raise ShardError(_WRITTEN)
        shards = [call.shard for call in calls if call.shard is not None]
        if not flat.on_cpu:
            plan.update(flat, shards)
        outputs = [outcome.value for outcome in outcomes]
        with without_autocast(pool.backend.type):
            output = join(
                outputs, plan.sizes, self.rules, self._output_device(flat), partial(self._originals, plan, flat, shards)
            )
        with self._counting:
            self._calls += 1
            self.shards = plan.sizes
            for index, rows in enumerate(plan.sizes):
                pool.lanes[index % len(pool.lanes)].rows += rows
        return output

    # Whole calls, each in one lane

    def submit(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
        """Run a call whole in one lane."""
        modes = self.get_ready()
        if modes is None:
            try:
                future: Future[Any] = Future()
                future.set_result(self.run_plainly(entry, args, kwargs))
            except Exception as error:  # noqa: BLE001
                return failed(error)
            return future
        return self.send(self.make_call(entry, args, kwargs, None), modes)

    def get_ready(self) -> Modes | None:
        """Bring the copies up to date, and return the modes of the caller; None if whole calls must run plainly.

        Raises:
            SessionError: If the lanes are closed.
        """
        if not self.pool.is_ready():
            if self.pool.closed:
                msg = "the lanes are closed: submit inside the `with` block, and read the outputs of map before it ends"
                raise SessionError(msg)
            return None
        self.pool.refresh()
        return Modes.capture(self.pool.backend.type)

    def open_stream(self, entry: Entry, prepare: Prepare | None, _size: StreamSize) -> Starter:
        """Return what starts the batches of one stream."""
        return PooledStream(self, entry, prepare)

    def send(self, call: PooledCall, modes: Modes) -> Future[Any]:
        """Give a whole call to the pool."""
        future = self.pool.submit(call, modes)
        self._futures.add(future)
        return future

    def run_plainly(
        self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any], prepare: Prepare | None = None
    ) -> Any:
        """Run a call in the caller's thread, one at a time; in a lane if this process does not have the target."""
        if not self.pool.has_target_here and self.pool.is_ready():
            modes = self.get_ready()
            assert modes is not None
            return self.send(self.make_call(entry, args, kwargs, prepare), modes).result()
        record = prepare_record = None
        if self.recorder.traces and here.lane is None:  # a lane's own span has it already
            record = partial(self.recorder.record, entry.method, entry.batch, None)
            prepare_record = partial(self.recorder.record, "prepare", entry.batch, None)
        if prepare is not None:
            args, kwargs = as_call(timed(prepare_record, None, prepare, *args))
        if self.pool.closed or here.lane is not None:
            output = self.pool.run_plainly(entry, args, kwargs, record)
        else:
            with self._plain_lock:
                output = self.pool.run_plainly(entry, args, kwargs, record)
        with self._counting:
            self._calls += 1
            self._plain_calls += 1
        return output if self.rules.keep_single else join([output], (1,), self.rules)

    def cancel(self) -> None:
        """Drop submitted calls that have not started."""
        for future in list(self._futures):
            future.cancel()
        self.pool.cancel()

    def renew(self) -> None:
        """Copy everything to the lanes at the next call."""
        self.pool.renew()

    def close(self) -> None:
        """Let the lanes finish, and end them. A call in flight finishes too."""
        self.pool.close()
        unused = set.intersection(*(cutter.unused for cutter in self.cutters.values()))
        if unused and self._calls:
            warn_caller(
                f"in_dims names {min(unused)!r}, and no call passed a keyword argument of that name. Correct the name, or "
                "leave it out"
            )

    def stats(self) -> Stats:
        """Return the counters."""
        pool = self.pool
        of_lanes = tuple(
            LaneStats(lane.device, lane.label, lane.tasks, lane.rows, lane.busy_ns / 1e9) for lane in pool.lanes
        )
        return Stats(self._calls, self._plain_calls, self.shards, pool.refreshes, pool.copied_bytes, of_lanes)

    def trace(self, path: str | Path) -> Trace:
        """Return a recorder of the calls of each lane."""
        return Trace(self.recorder, self.pool.lanes, path)

    def make_call(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any], prepare: Prepare | None) -> PooledCall:
        """Return a whole call for the pool."""
        call = PooledCall(entry, args, kwargs, self.cutters[entry.method], self._finish, prepare)
        if self.recorder.traces:
            call.record_prepare = partial(self.recorder.record, "prepare", entry.batch, None)
            call.record = partial(self.recorder.record, entry.method, entry.batch)
        return call

    def _finish(self, output: Any, call: PooledCall, lane: Lane) -> Any:
        """Return the caller's output of a whole call. Runs in the lane's thread."""
        return self.finish_output(output, lane, call.rows or 0)

    def finish_output(self, output: Any, lane: Lane | None, rows: int) -> Any:
        """Return the caller's output of a whole call, and count the call."""
        output = with_originals(output, self.pool.original_of)
        device = self.output_device or (None if self.pool.home in (None, _CPU) else self.pool.home)
        if device is not None or not self.rules.keep_single:
            output = join([output], (1,), self.rules, device)
        with self._counting:
            self._calls += 1
            if lane is not None:
                lane.rows += rows
        return output

    def _originals(self, plan: ShardPlan, flat: FlatCall, shards: Sequence[Shard]) -> Sequence[Callable[[Any], Any]]:
        same = {id(value): value for leaf in plan.whole(flat) for value in (leaf, getattr(leaf, "value", leaf))}
        return [partial(self._find_original, {**same, **shard.origins}) for shard in shards]

    def _find_original(self, origins: Mapping[int, Any], value: Any) -> Any:
        found = origins.get(id(value))
        return self.pool.original_of(value) if found is None and isinstance(value, torch.Tensor) else found

    def _is_at_home(self) -> bool:
        return self.pool.home in (None, _CPU) and self.output_device in (None, _CPU)

    def _output_device(self, flat: FlatCall) -> torch.device | None:
        """Return where joined outputs go; None if they are there already, on the CPU."""
        devices = (device_of(leaf) for leaf in flat.leaves)
        found = self.output_device or self.pool.home or next((each for each in devices if each is not None), _CPU)
        return None if found == _CPU else found


class PooledStream:
    """Starts the batches of one stream on the lanes of a pool."""

    has_room = wait_for = None  # the lanes have threads

    def __init__(self, session: PooledSession, entry: Entry, prepare: Prepare | None) -> None:
        self.most = 2 * len(session.devices)  # for each lane one that runs, and one that waits
        self._session = session
        self._entry = entry
        self._prepare = prepare
        self._modes: Modes | None = None

    def start(self, number: int, batch: Any) -> Pending:
        """Start a batch. An error goes into the pending call, and is raised in place of the output."""
        session = self._session
        try:
            if self._modes is None:
                self._modes = session.get_ready()
            args, kwargs = as_call(batch) if self._prepare is None else ((batch,), {})
            entry = self._entry._replace(batch=number) if session.recorder.traces else self._entry
            if self._modes is None:
                return succeeded(session.run_plainly(entry, args, kwargs, self._prepare))
            return session.send(session.make_call(entry, args, kwargs, self._prepare), self._modes)
        except Exception as error:  # noqa: BLE001
            return failed(error)

    def flush(self) -> None:
        """Do nothing: lanes have the batches at once."""

    def end(self) -> None:
        """Do nothing: a pool reads the model when a stream begins."""


def _is_on_cpu(leaf: Any) -> bool:
    return getattr(leaf, "is_cpu", not isinstance(leaf, WholeLeaf))
