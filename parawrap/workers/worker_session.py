"""The session of a block over workers. Calls are cut and joined as in `engine/call.py`; the pool runs them.

The batches of `map` travel in chunks, which are as large as they must be for the messages to cost little. A chunk holds
about 5 ms of work, by the time that batches took before. Only the schedule depends on time, never a value.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch

from parawrap.backends import device_of, warn_caller
from parawrap.engine.call import Entry, Lane, Modes, here, raise_first_failure, without_autocast
from parawrap.engine.cut import Cutter, Shard, ShardPlan
from parawrap.engine.extents import FlatCall
from parawrap.engine.join import join, with_originals
from parawrap.engine.join_rules import JoinRules
from parawrap.engine.stats import LaneStats, Stats
from parawrap.engine.streams import Pending, Prepare, StreamSize, as_call, failed, succeeded
from parawrap.engine.trace import Recorder, Trace, timed
from parawrap.errors import SessionError, ShardError
from parawrap.tree import WholeLeaf
from parawrap.workers.lanes import Call, Form, Reply, Request
from parawrap.workers.packing import Packer
from parawrap.workers.worker import SentModes
from parawrap.workers.worker_pool import WorkerPool

_CPU = torch.device("cpu")
_WRITTEN = (
    "the model wrote in place into a tensor that every lane gets whole, so each lane wrote once. Pass one copy per row, "
    "cut the tensor with in_dims, or use an out-of-place operation"
)
_TARGET_NS = 5_000_000  # of work in one message
_MOST = 64  # batches in one message
_MOST_BYTES = 256 << 10  # of their tensors; a larger one is the last of its message, so it is not copied
_LOOK_NS = 200_000  # between two looks for answers while the caller works
_READ_AHEAD = 3  # chunks per lane that the caller has not read: two in the worker, and one to replace them


class StreamCall(Call):
    """A batch of a stream. Its output is loaded when it is read.

    It refers to the stream weakly: the generator holds the stream, and a message in flight must not keep the block alive.
    """

    __slots__ = ("_callbacks", "_stream", "is_cancelled", "rows")

    def __init__(self, stream: weakref.ref[WorkerStream], args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        super().__init__(args, kwargs)
        self._stream = stream
        self._callbacks: list[Callable[[Any], object]] = []
        self.is_cancelled = False
        self.rows = 0

    def result(self) -> Any:
        """Wait for the output."""
        stream = self._stream()
        assert stream is not None
        return stream.read(self)

    def cancel(self) -> bool:
        """Drop the batch, unless a worker has it."""
        self.is_cancelled = True
        return True

    def add_done_callback(self, function: Callable[[Any], object], /) -> None:
        """Call a function once the batch has ended."""
        self._callbacks.append(function)  # before the look: another thread may receive the end
        if self.done():
            self.call_back()

    def call_back(self) -> None:
        """Call the functions that wait for the end."""
        with suppress(IndexError):  # another thread calls them
            while self._callbacks:
                self._callbacks.pop()(self)


class _Chunk(Request):
    """The batches of one message."""

    __slots__ = ()

    def start(self) -> bool:
        return not all(call.is_cancelled for call in self.calls if isinstance(call, StreamCall))


class WorkerStream:
    """Starts the batches of one stream, and reads their outputs. For one thread.

    Args:
        session: The session of the block.
        pool: Its workers.
        entry: The method.
        prepare: The function of one batch that runs in the worker.
        size: The sizes that are known. Without a size of chunks, it adapts to the time that batches take.
    """

    def __init__(
        self, session: WorkerSession, pool: WorkerPool, entry: Entry, prepare: Prepare | None, size: StreamSize
    ) -> None:
        self._own: weakref.ref[WorkerStream] = weakref.ref(self)
        self._session = session
        self._pool = pool
        self._lanes = pool.workers
        self._entry = entry
        self._prepare = prepare
        self.most = _READ_AHEAD * len(self._lanes.all) * (size.chunksize or _MOST)
        self._chunksize = size.chunksize
        if self._chunksize is None and self._lanes.retries == 0:
            self._chunksize = 1  # the batches of a chunk must not run again because one killed the worker
        self._most = _MOST if size.buffersize is None else max(1, size.buffersize // (2 * len(self._lanes.all)))
        self._left = size.total
        self._size = self._chunksize or self._size_for(self._pool.pace.each_ns)
        self._goal = 1
        self._form: Form | None = None
        self._chunk: _Chunk | None = None
        self._until = 0
        self._looked_at = self._ready_since = 0

    # The interface of streams

    def start(self, number: int, batch: Any) -> Pending:
        """Put a batch into the open chunk. An error goes into the pending call, and is raised in place of the output."""
        try:
            if type(batch) is torch.Tensor or self._prepare is not None:
                args, kwargs = (batch,), None
            else:
                args, kwargs = as_call(batch)
            if self._form is None and not self._begin():
                entry = self._entry._replace(batch=number)
                return succeeded(self._session.run_plainly(entry, args, kwargs or {}, self._prepare))
            self._pool.refuse_gradients(args, kwargs)
            call = StreamCall(self._own, args, kwargs)
            chunk = self._chunk or self._open()
            assert chunk.packer is not None
            items = call.pack(chunk.packer)
            self._note(call, number)
        except Exception as error:  # noqa: BLE001
            return failed(error)
        call.request, call.place = chunk, len(chunk.calls)
        chunk.calls.append(call)
        chunk.items.append(items)
        if self._left is not None:
            self._left -= 1
        if self._is_full(chunk):
            self._close()
        return call

    def has_room(self, unread: int, has_output: bool) -> bool:
        """True if the stream may read another batch before the caller gets an output.

        An output that is there waits until the workers have enough to do, but not for a source that takes its time.
        """
        now = perf_counter_ns()
        if now - self._looked_at > _LOOK_NS:
            self._looked_at = now
            self._lanes.look()
        if unread >= _READ_AHEAD * len(self._lanes.all) * self._size:
            return False
        if not has_output:
            self._ready_since = 0
            return True
        if not self._lanes.wants_more:
            self._ready_since = 0
            return False
        self._ready_since = self._ready_since or now
        return now - self._ready_since < _TARGET_NS

    def flush(self) -> None:
        """Send the open chunk, which gets no more batches."""
        self._close()

    def wait_for(self, is_done: Callable[[], bool]) -> None:
        """Wait until `is_done`, with all batches sent."""
        if not is_done():
            self.flush()
            self._lanes.wait(is_done)

    def end(self) -> None:
        """Do nothing: workers read the model when a stream begins."""

    # Chunks

    def _begin(self) -> bool:
        """Bring the workers up to date; False if the batches must run plainly."""
        modes = self._session.get_ready()
        if modes is None:
            return False
        prepare = None if self._prepare is None else self._pool.number_function(self._prepare)
        self._form = Form(SentModes.pack(modes), modes.inference, self._entry.method, prepare)
        return True

    def _open(self) -> _Chunk:
        assert self._form is not None
        size = self._size
        if self._chunksize is None and self._left is not None:  # smaller near the end, for all workers to end together
            size = max(1, min(size, max(size // 4, self._left // (2 * len(self._lanes.all)))))
        self._chunk = chunk = _Chunk(
            [], self._form, partial(_on_end, self._own), Packer(copied=0 if size == 1 else _MOST_BYTES)
        )
        self._goal, self._until = size, perf_counter_ns() + _TARGET_NS
        return chunk

    def _is_full(self, chunk: _Chunk) -> bool:
        assert chunk.packer is not None
        if len(chunk.calls) >= self._goal or chunk.packer.size > _MOST_BYTES:
            return True
        return self._chunksize is None and perf_counter_ns() > self._until  # of a source that takes its time

    def _close(self) -> None:
        chunk, self._chunk = self._chunk, None
        if chunk is not None and chunk.calls:  # else its only batch could not be sent
            self._lanes.post(chunk)

    def note(self, reply: Reply, batches: int) -> None:
        """Adapt the size of chunks to the time of one."""
        if self._chunksize is None:
            each_ns = self._pool.pace.note(reply.end - reply.start, batches)
            self._size = min(self._size_for(each_ns), 4 * self._size)

    def _size_for(self, each_ns: float | None) -> int:
        return 1 if not each_ns else max(1, min(self._most, int(_TARGET_NS / each_ns)))

    # Outputs

    def read(self, call: StreamCall) -> Any:
        """Return the output of a batch."""
        request = call.request
        if request is None or not request.is_done:
            if self._chunk is not None and (request is self._chunk or self._lanes.wants_more):
                self._close()
            self._lanes.wait(call.done)
        elif (now := perf_counter_ns()) - self._looked_at > _LOOK_NS:
            self._looked_at = now
            self._lanes.look()
        lane = None if call.request is None else call.request.lane
        return self._session.finish_output(call.load(), lane, call.rows)

    def _count_rows(self, call: StreamCall) -> int:
        cutter = self._session.cutters[self._entry.method]
        if not call.kwargs and all(type(each) is torch.Tensor for each in call.args):
            return cutter.rows(call.args)
        return max(0, cutter.whole(call.args, call.kwargs or {})[0].rows)

    def _note(self, call: StreamCall, number: int) -> None:
        if self._prepare is None:
            call.rows = self._count_rows(call)
        if self._session.recorder.traces:
            rows = None if self._prepare is not None else call.rows
            call.record = partial(self._session.recorder.record, self._entry.method, number, rows)


class WorkerSession:
    """The calls of one target, over workers, until `close`. Thread-safe."""

    def __init__(
        self,
        target: Any,
        pool: WorkerPool,
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
        self._futures: weakref.WeakSet[Future[Any]] = weakref.WeakSet()

    def call(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Scatter, apply, and gather; or run the call plainly if there is nothing to cut."""
        pool = self.pool
        if not pool.is_ready() or (len(pool.lanes) == 1 and self._is_at_home()):
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
        shards = plan.scatter(flat, self.devices[: len(plan.sizes)])
        records = None
        if self.recorder.traces:
            records = [partial(self.recorder.record, entry.method, entry.batch, rows) for rows in plan.sizes]
        versions = plan.written(flat) if len(shards) > 1 and None in plan.dims else []
        outputs, errors = pool.run(entry.method, shards, Modes.capture(pool.backend.type), records)
        if errors:
            outputs.clear()
            raise_first_failure(errors, len(shards), pool.lanes, plan.describe)
        if versions and versions != plan.written(flat):
            raise ShardError(_WRITTEN)
        if not flat.on_cpu:
            plan.update(flat, shards)
        with without_autocast(pool.backend.type):
            output = join(
                outputs, plan.sizes, self.rules, self._output_device(flat), partial(_find_originals, plan, flat, shards)
            )
        with self._counting:
            self._calls += 1
            self.shards = plan.sizes
            for lane, rows in zip(pool.lanes, plan.sizes, strict=False):
                lane.rows += rows
        return output

    # Whole calls, each in one lane

    def submit(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
        """Run a call whole in one lane."""
        modes = self.get_ready()
        if modes is not None:
            return self._send(entry, args, kwargs, None, modes)
        try:
            return succeeded(self.run_plainly(entry, args, kwargs))
        except Exception as error:  # noqa: BLE001
            return failed(error)

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

    def open_stream(self, entry: Entry, prepare: Prepare | None, size: StreamSize) -> WorkerStream:
        """Return what starts the batches of one stream."""
        return WorkerStream(self, self.pool, entry, prepare, size)

    def run_plainly(
        self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any], prepare: Prepare | None = None
    ) -> Any:
        """Run a call in the caller's thread, one at a time; in a lane if this process does not have the target."""
        if not self.pool.has_target_here and self.pool.is_ready():
            modes = self.get_ready()
            assert modes is not None
            return self._send(entry, args, kwargs, prepare, modes).result()
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

    def finish_output(self, output: Any, lane: Lane | None, rows: int) -> Any:
        """Return the caller's output of a whole call, and count the call."""
        output = with_originals(output, partial(_find_original, {}))
        device = self.output_device or (None if self.pool.home in (None, _CPU) else self.pool.home)
        if device is not None or not self.rules.keep_single:
            output = join([output], (1,), self.rules, device)
        with self._counting:
            self._calls += 1
            if lane is not None:
                lane.rows += rows
        return output

    def cancel(self) -> None:
        """Drop submitted calls that have not started."""
        with self._counting:
            futures = list(self._futures)
        for future in futures:
            future.cancel()
        self.pool.cancel()

    def renew(self) -> None:
        """Copy everything to the lanes at the next call."""
        self.pool.renew()

    def close(self) -> None:
        """Let the lanes finish, and end them. A call in flight finishes too."""
        self.pool.close()

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

    def _send(
        self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any], prepare: Prepare | None, modes: Modes
    ) -> Future[Any]:
        """Give a whole call to the pool."""
        rows = None if prepare is not None else self.cutters[entry.method].whole(args, kwargs)[0].rows
        record = None
        if self.recorder.traces:
            record = partial(self.recorder.record, entry.method, entry.batch, rows)
        finish = partial(self.finish_output, rows=rows or 0)
        future = self.pool.submit(entry.method, args, kwargs, prepare, modes, record, finish)
        with self._counting:
            self._futures.add(future)
        return future

    def _is_at_home(self) -> bool:
        return self.pool.home in (None, _CPU) and self.output_device in (None, _CPU)

    def _output_device(self, flat: FlatCall) -> torch.device | None:
        """Return where joined outputs go; None if they are there already, on the CPU."""
        devices = (device_of(leaf) for leaf in flat.leaves)
        found = self.output_device or self.pool.home or next((each for each in devices if each is not None), _CPU)
        return None if found == _CPU else found


def _find_originals(plan: ShardPlan, flat: FlatCall, shards: Sequence[Shard]) -> Sequence[Callable[[Any], Any]]:
    """Return one function per part. It maps a worker's copy of an uncut argument to the caller's value, or to None."""
    same = {id(value): value for leaf in plan.whole(flat) for value in (leaf, getattr(leaf, "value", leaf))}
    return [partial(_find_original, {**same, **shard.origins}) for shard in shards]


def _find_original(origins: Mapping[int, Any], value: Any) -> Any:
    return origins.get(id(value))


def _is_on_cpu(leaf: Any) -> bool:
    return getattr(leaf, "is_cpu", not isinstance(leaf, WholeLeaf))


def _on_end(own: weakref.ref[WorkerStream], chunk: Request) -> None:
    """Note the end of a chunk, in the thread that received it."""
    stream = own()
    if stream is not None and chunk.reply is not None:
        stream.note(chunk.reply, len(chunk.calls))
    for call in chunk.calls:
        assert isinstance(call, StreamCall)
        call.call_back()
