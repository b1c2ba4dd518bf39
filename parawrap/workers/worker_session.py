"""The session of a block over workers.

It cuts and joins calls as `engine/call.py` does; `worker_lanes.py` runs them.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from functools import partial
from operator import is_
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch

from parawrap.backends import backend_of, device_of, warn_caller
from parawrap.engine.borrowed import WRITTEN_WHOLE, Borrowed, rules_of_entries
from parawrap.engine.call import Entry, must_run_plainly
from parawrap.engine.cut import Columns, Cutter, Shard, ShardPlan
from parawrap.engine.flat_call import FlatCall
from parawrap.engine.join import join
from parawrap.engine.join_rules import JoinRules
from parawrap.engine.lane_errors import raise_first_failure
from parawrap.engine.lanes import Modes, here, without_autocast
from parawrap.engine.stats import LaneStats, Stats
from parawrap.engine.streams import (
    Pending,
    Prepare,
    StreamSize,
    Tell,
    as_call,
    make_failed_future,
    make_future,
)
from parawrap.engine.survey import Survey
from parawrap.engine.trace import Recorder, Trace, record_call
from parawrap.errors import ReplicaError, SessionError, ShardError
from parawrap.launch import Platform
from parawrap.processes.held_signals import HeldSignals, do_nothing
from parawrap.processes.packing import Packer
from parawrap.processes.pickling import pack
from parawrap.tree import WholeLeaf, flatten
from parawrap.workers.chunk_size import MOST_BYTES, TARGET_NS, ChunkSize
from parawrap.workers.local_workers import LocalWorkers
from parawrap.workers.model import Build, SentModel, refuse_generators
from parawrap.workers.ray_workers import RayWorkers
from parawrap.workers.submitted_call import SubmittedCall
from parawrap.workers.worker import GRADIENTS, Form, pack_modes
from parawrap.workers.worker_lanes import Request, WorkerCall, WorkerLanes

_CPU = torch.device("cpu")
# The sizes of a call that was not cut. The rows of one output need not match them
_ONE_SHARD = (1,)
# The time between two looks for answers while the caller works: a look is a system call for all
# workers. A guess that no test has contradicted
_LOOK_NS = 200_000


class WorkerSession:
    """The calls of one target, over workers, until `close`. Thread-safe.

    There is one worker per device, or per rank of a platform for Ray. They start at the first call.
    If a worker dies, its call runs `retries` more times.

    Attributes:
        cutters: How calls are cut, by the name of the method.
        lanes: The workers, and the messages to them.
        output_device: The device of outputs; None for that of the model, or of the arguments.
        recorder: Records the calls while a trace is open.
        rules: How outputs are joined.
        shards: The sizes of the last cut call.
        target: The target of the block.
    """

    def __init__(
        self,
        target: Any,
        devices: Sequence[torch.device] | Platform,
        *,
        cutters: Mapping[str | None, Cutter],
        rules: JoinRules,
        output_device: torch.device | None = None,
        retries: int = 1,
    ) -> None:
        workers = RayWorkers(devices) if isinstance(devices, Platform) else LocalWorkers(devices)
        self.target = target
        self.lanes = WorkerLanes(workers, retries)
        self.cutters = cutters
        self.rules = rules
        self.output_device = output_device
        self.recorder = Recorder(target)
        self.shards: tuple[int, ...] = ()
        self._model = SentModel(target)
        # True if outputs are on the CPU for arguments on the CPU
        self._stays_on_cpu = {self._model.home, output_device} <= {None, _CPU}
        self._backend = backend_of(workers.devices[0].type)
        # One thread at a time reads the model. Reentrant: its pickling may call the block again
        self._reading = threading.RLock()
        # Guards the counters of calls and rows. No code of users runs while it is held
        self._counting = threading.Lock()
        self._plain_lock = threading.RLock()  # one plain call runs at a time
        self._calls = self._plain_calls = 0
        self._has_warned_of_plan = False
        self._is_closed = False
        self._end = weakref.finalize(self, self.lanes.end)
        self._end.atexit = False
        # At exit, before the hooks of Ray and of launches: workers need both. The hook of `weakref`
        # would run after them
        atexit.register(self._end)

    # Cut calls

    def call(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Scatter, apply, and gather; or run the call plainly if there is nothing to cut."""
        # Plain, or plan
        lanes = self.lanes.all
        gains_nothing = len(lanes) == 1 and self._stays_on_cpu
        if gains_nothing or not self._is_ready():
            return self.run_plainly(entry, args, kwargs)
        cutter = self.cutters[entry.method]
        flat = cutter.flatten(args, kwargs)
        plan = cutter.plan(flat, len(lanes))
        if plan.hint is not None and not self._has_warned_of_plan:
            self._has_warned_of_plan = True
            warn_caller(plan.hint)
        is_uncut = len(plan.sizes) == 1
        if is_uncut and self._stays_on_cpu and all(map(_is_on_cpu, flat.leaves)):
            return self.run_plainly(entry, args, kwargs)

        # Scatter and apply
        self._refuse_gradients(args, kwargs, has_grad=torch.is_grad_enabled())
        form = self._form(entry.method, is_whole=False)
        columns = plan.columns(flat, copy=False)
        shards = [plan.place(flat, columns, index, _CPU) for index in range(len(plan.sizes))]
        # Each worker gets its own copy of a whole argument, and their writes cannot be joined
        shares_arguments = not is_uncut and None in plan.dims
        versions = plan.read_versions(flat) if shares_arguments else []
        outputs = self._apply(entry, form, shards, plan)
        if versions and versions != plan.read_versions(flat):
            raise ShardError(WRITTEN_WHOLE)

        # Gather
        loans = [shard.loan for shard in shards]
        device = self._output_device(flat.leaves)
        borrowed = plan.find_borrowed(flat, (args, kwargs), loans)
        if borrowed is not None:
            outputs = self._join_borrowed(borrowed, outputs, plan.sizes, device)
        output = None
        if device is None:
            output = self._find_cut_argument(outputs, plan, flat, columns)
        if output is None:
            whole = plan.find_whole_leaves(flat)
            # For each worker, a function that returns the caller's value for its own
            finds = [partial(_find_value, {**whole, **shard.origins}) for shard in shards]
            with without_autocast(self._backend.type):
                output = join(outputs, plan.sizes, self.rules, device, lambda: finds)
        plan.write_back(flat, columns, loans)
        if borrowed is None:
            return output
        # Last: after an error above, the caller's containers are unchanged
        borrowed.enter()
        return borrowed.resolve(output)

    def _find_cut_argument(
        self, outputs: list[Any], plan: ShardPlan, flat: FlatCall, columns: Columns
    ) -> Any:
        """Return the argument whose parts are the outputs; None for other outputs.

        `Calls._cat_rows` has this loop too: there, one more function would cost every call.
        """
        dim = self.rules.row_dim_of_tensor
        if dim is not None:
            for leaf, column, cut_on in zip(flat.leaves, columns, plan.dims, strict=True):
                if cut_on == dim and all(map(is_, outputs, column)):
                    return leaf
        return None

    def _join_borrowed(
        self,
        borrowed: Borrowed,
        outputs: list[Any],
        sizes: tuple[int, ...],
        device: torch.device | None,
    ) -> list[Any]:
        """Join the changes of the caller's containers.

        Return the outputs with marks in the places of arguments.
        """

        def join_entries(values: Sequence[Any], place: Any, key: Any) -> Any:
            return join(values, sizes, rules_of_entries(self.rules, place, key), device)

        def join_outputs(shown: Sequence[Any]) -> Any:
            return join(shown, sizes, self.rules, device)

        borrowed.join_changes(join_entries, device, outputs, join_outputs)
        if self.rules.join == "list":  # each output stays as its worker returned it
            return outputs
        return [borrowed.mark_returned(output, index) for index, output in enumerate(outputs)]

    def _apply(
        self, entry: Entry, form: Form, shards: Sequence[Shard], plan: ShardPlan
    ) -> list[Any]:
        """Run the shards at the same time, and return their outputs.

        An error is raised once all have ended, but Ctrl-C at once.
        """
        parts = [WorkerCall(tuple(shard.args), dict(shard.kwargs)) for shard in shards]
        requests = [Request(form) for _ in parts]
        outputs: list[Any] = []
        errors: list[tuple[int, BaseException]] = []
        for part, request, rows in zip(parts, requests, plan.sizes, strict=True):
            part.request = request  # also if `_add` fails
            try:
                self._add(request, part, entry, rows)
                self.lanes.post(request)
            except Exception as error:  # noqa: BLE001 (raised once the other parts have ended)
                request.failure = error
        for index, part in enumerate(parts):
            try:
                self.lanes.wait(part.done)
                outputs.append(part.load())
            except BaseException as error:
                # A model in a worker may raise KeyboardInterrupt too: then its part has ended
                is_of_caller = not (isinstance(error, Exception) or part.done())
                if is_of_caller:
                    raise
                errors.append((index, error))
        if errors:
            outputs.clear()
            # A part that could not be sent has no lane. The message names the lane of its index
            pairs = zip(requests, self.lanes.all, strict=False)  # there may be fewer parts
            lanes = [request.lane or lane for request, lane in pairs]
            raise_first_failure(errors, len(parts), lanes, plan.describe)
        self._count(parts)
        self.shards = plan.sizes
        return outputs

    # Whole calls, each in one lane

    def submit(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
        """Run a call whole in one lane, and return a future of its output.

        Raises:
            UnsendableError: If an argument, or the target, cannot be pickled.
            SessionError: If the call needs gradients, or the block is closed.
        """
        form = self.get_ready(entry.method)
        if form is not None:
            return self._send(entry, args, kwargs, form)
        try:
            return make_future(self.run_plainly(entry, args, kwargs))
        except Exception as error:  # noqa: BLE001
            return make_failed_future(error)

    def get_ready(self, method: str | None, prepare: Prepare | None = None) -> Form | None:
        """Return the form of whole calls of a method; None if they must run plainly.

        Raises:
            SessionError: If the lanes are closed.
        """
        if self._is_ready():
            return self._form(method, prepare)
        if self._is_closed:
            msg = (
                "the lanes are closed: submit inside the `with` block, and read the outputs of map "
                "before it ends"
            )
            raise SessionError(msg)
        return None

    def open_stream(self, entry: Entry, prepare: Prepare | None, size: StreamSize) -> WorkerStream:
        """Return the starter of the batches of one stream."""
        return WorkerStream(self, entry, prepare, size)

    def run_plainly(
        self,
        entry: Entry,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        prepare: Prepare | None = None,
    ) -> Any:
        """Run a call in the caller's thread, one at a time.

        A target from `build` runs in a lane: only workers have the model.
        """
        if isinstance(self.target, Build) and self._is_ready():
            return self._send(entry, args, kwargs, self._form(entry.method, prepare)).result()
        record = None
        if self.recorder.traces and here.lane is None:  # the span of a lane covers calls in it
            rows = None
            record = partial(self.recorder.record, entry.method, entry.batch, rows)
        if prepare is not None:
            args, kwargs = as_call(prepare(*args))
        # A call within a lane must not wait: the caller that has the lock may wait for this lane.
        # After `close`, calls are the target's own, and need no order. A forked child takes no
        # lock: a thread of the parent may hold it, and is not here
        is_here = self.lanes.are_here
        needs_no_lock = self._is_closed or here.lane is not None or not is_here
        with nullcontext() if needs_no_lock else self._plain_lock:
            if self._is_ready():
                # As in a worker
                self._refuse_gradients(args, kwargs, has_grad=torch.is_grad_enabled())
            # Calls of the block that the target itself makes are part of this one
            before, here.lane = here.lane, self.lanes.all[0]
            try:
                lane = None  # the span is on the caller's track
                output = record_call(record, lane, entry.plain, *args, **kwargs)
            finally:
                here.lane = before
        if is_here:
            with self._counting:
                self._calls += 1
                self._plain_calls += 1
        return output if self.rules.keep_single else join([output], _ONE_SHARD, self.rules)

    def add_whole(self, request: Request, call: WorkerCall, entry: Entry) -> None:
        """Add a whole call to a message.

        Raises:
            UnsendableError: If an argument cannot be pickled.
            SessionError: If the call needs gradients.
        """
        # The mode of the form: a stream reads the modes once, and its caller may change them
        self._refuse_gradients(call.args, call.kwargs, has_grad=request.form.has_grad)
        cutter = self.cutters[entry.method]
        rows = None  # not known before `prepare` has computed the arguments in the worker
        if request.form.prepare is None:
            if call.is_simple:
                rows = cutter.rows(call.args)
            else:
                plan, _ = cutter.whole(call.args, call.kwargs or {})
                rows = plan.rows
        self._add(request, call, entry, rows)

    def finish(self, output: Any, call: WorkerCall) -> Any:
        """Return the caller's output from that of the worker, and count the call."""
        device = self._output_device(())  # whatever the device of the arguments, as in threads
        if device is not None or not self.rules.keep_single:
            output = join([output], _ONE_SHARD, self.rules, device)
        self._count([call])
        return output

    def _send(
        self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any], form: Form
    ) -> Future[Any]:
        """Send a whole call to the lane with the fewest messages, once it has room."""
        request, call = Request(form), SubmittedCall(args, kwargs, self.finish, self.lanes)
        self.add_whole(request, call, entry)
        # Futures take their lock in code of Python, where Ctrl-C could keep it
        held = HeldSignals(wake=do_nothing)
        try:
            self.lanes.post(request)
            self.lanes.receive_for_futures()
        finally:
            held.end()
        return call.future

    def _refuse_gradients(
        self, args: Sequence[Any], kwargs: Mapping[str, Any] | None, *, has_grad: bool
    ) -> None:
        """Raise SessionError if an argument or a parameter requires a gradient in this mode."""
        if not has_grad:
            return
        leaves = flatten((tuple(args), dict(kwargs or {})))[0]
        if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves):
            raise SessionError(GRADIENTS.format("an argument"))
        if any(parameter.requires_grad for parameter in self._model.parameters):
            raise SessionError(GRADIENTS.format("a parameter of the model"))

    # The block

    def cancel(self) -> None:
        """End the workers, also within a call. Calls without an answer are cancelled, or fail."""
        self.lanes.end()

    def renew(self) -> None:
        """Send the model again at the next call."""
        self._model.renew()

    def close(self) -> None:
        """Wait for the calls in flight, and end the workers. May be called again."""
        self._is_closed = True
        atexit.unregister(self._end)
        is_first = self._end.detach() is not None  # one thread alone gets the finalizer
        if is_first and self.lanes.are_here:
            # The thread that runs callbacks has a lane too (`WorkerLanes._receive_for_futures`). It
            # receives answers, and must not wait for itself
            if here.lane not in self.lanes.all:
                self.lanes.wait(self.lanes.is_idle)
            self.lanes.end()
            self._model.forget()

    def stats(self) -> Stats:
        """Return the counters."""
        of_lanes = tuple(
            LaneStats(lane.device, lane.label, lane.tasks, lane.rows, lane.busy_ns / 1e9)
            for lane in self.lanes.all
        )
        sent = self._model
        return Stats(
            self._calls, self._plain_calls, self.shards, sent.refreshes, sent.copied_bytes, of_lanes
        )

    def trace(self, path: str | Path) -> Trace:
        """Return a recorder of the calls of all lanes, which writes `path`."""
        return Trace(self.recorder, self.lanes.all, path)

    # Messages

    def _is_ready(self) -> bool:
        """True if a call of this thread may go to the lanes, and need not run plainly."""
        # `here.lane` is None outside of lanes and callbacks
        is_open = here.lane is None and not self._is_closed and self.lanes.are_here
        return is_open and not must_run_plainly(self._backend) and self._model.is_ready()

    def _form(
        self, method: str | None, prepare: Prepare | None = None, *, is_whole: bool = True
    ) -> Form:
        """Start the workers. Return the form of calls with the model and the modes as they are now.

        Raises:
            UnsendableError: If the target, or `prepare`, cannot be pickled.
            SessionError: If one of them draws from a random generator that it holds.
        """
        modes, packed = Modes.capture(self._backend.type), None
        if prepare is not None:
            # The survey refuses objects that lanes in threads cannot copy. Workers get pickles
            with suppress(ReplicaError):
                refuse_generators(Survey(prepare), "prepare")
            packed = pack(prepare, "prepare").to_bytes()
        with self._reading:
            model = self._model.read()
            self.lanes.start()
        packed_modes = pack_modes(modes)
        return Form(packed_modes, modes.grad, modes.inference, method, is_whole, packed, model)

    def _add(self, request: Request, call: WorkerCall, entry: Entry, rows: int | None) -> None:
        """Add a call to a message, with its row count; None if it is not known."""
        call.rows = rows or 0
        if self.recorder.traces:
            call.record = partial(self.recorder.record, entry.method, entry.batch, rows)
        request.add(call)

    def _count(self, parts: Sequence[WorkerCall]) -> None:
        """Count the parts as one call."""
        with self._counting:
            self._calls += 1
            for part in parts:
                if part.request is not None and part.request.lane is not None:
                    part.request.lane.rows += part.rows

    def _output_device(self, leaves: Sequence[Any]) -> torch.device | None:
        """Return the device that outputs are moved to; None for the CPU, where they arrive.

        Without one in the options or the model, it is that of the first tensor of the arguments.
        """
        device = self.output_device or self._model.home
        for leaf in leaves:
            device = device or device_of(leaf)
        return None if device == _CPU else device


def _find_value(by_id: Mapping[int, Any], value: Any) -> Any:
    return by_id.get(id(value))


def _is_on_cpu(leaf: Any) -> bool:
    """True for a tensor on the CPU, and for a value without a device."""
    if isinstance(leaf, WholeLeaf):  # its tensors may be anywhere
        return False
    return getattr(leaf, "is_cpu", True)


# Streams of whole calls


class StreamCall(WorkerCall):
    """A batch of a stream. Its output is loaded when it is read.

    It refers to the stream weakly: the generator of the outputs holds the stream, and a message in
    flight must not keep the block alive. `tell` takes the call at its end.
    """

    __slots__ = ("_stream",)

    def __init__(
        self,
        stream: weakref.ref[WorkerStream],
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        tell: Tell | None,
    ) -> None:
        super().__init__(args, kwargs)
        self._stream = stream
        if tell is not None:
            self.callbacks.append(tell)

    def result(self) -> Any:
        """Wait for the output."""
        stream = self._stream()
        assert stream is not None
        return stream.read(self)

    def cancel(self) -> bool:
        """Drop the batch, unless its chunk was sent."""
        self.is_cancelled = True
        return True


class WorkerStream:
    """Starts the batches of one stream, and reads their outputs. For one thread."""

    def __init__(
        self, session: WorkerSession, entry: Entry, prepare: Prepare | None, size: StreamSize
    ) -> None:
        self._own: weakref.ref[WorkerStream] = weakref.ref(self)
        self._session = session
        self._lanes = lanes = session.lanes
        self._entry = entry
        self._prepare = prepare
        self._size = ChunkSize(len(lanes.all), size, retries=lanes.retries, each_ns=lanes.each_ns)
        self.most = self._size.most
        self._form: Form | None = None  # from the first batch on
        self._chunk: Request | None = None  # the open chunk, which gets further batches
        # The times of the last look for answers, and of the last output that was read
        self._looked_at = self._read_at = 0

    # The interface of streams

    def start(self, number: int, batch: Any, tell: Tell | None, /) -> Pending:
        """Put a batch into the open chunk.

        An error goes into the pending call, and is raised in place of the output.
        """
        session, entry = self._session, self._entry
        if session.recorder.traces:
            entry = entry._replace(batch=number)
        try:
            if type(batch) is torch.Tensor or self._prepare is not None:
                args, kwargs = (batch,), None
            else:
                args, kwargs = as_call(batch)
            self._form = self._form or session.get_ready(entry.method, self._prepare)
            if self._form is None:
                return make_future(
                    session.run_plainly(entry, args, kwargs or {}, self._prepare), tell
                )
            call = StreamCall(self._own, args, kwargs, tell)
            chunk = self._chunk or self._open(self._form)
            session.add_whole(chunk, call, entry)
        except Exception as error:  # noqa: BLE001
            return make_failed_future(error, tell)
        if self._size.note_batch(len(chunk.calls), chunk.packer.size):
            self.flush()
        return call

    def has_room(self, unread: int, has_output: bool) -> bool:
        """True if the stream may read another batch before the caller gets an output.

        An output that has arrived waits until the workers have enough messages, but not for a slow
        source. `unread` is the number of batches whose outputs were not read.
        """
        now = perf_counter_ns()
        self._look(now)
        if unread >= self._size.ahead:
            return False
        if not has_output:
            return True
        is_source_slow = now - self._read_at >= TARGET_NS
        return self._lanes.wants_more and not is_source_slow

    def flush(self) -> None:
        """Send the open chunk, which gets no more batches."""
        chunk, self._chunk = self._chunk, None
        if chunk is not None and chunk.calls:  # it has none if its only batch could not be packed
            self._lanes.post(chunk)

    def wait_for(self, is_done: Callable[[], bool]) -> None:
        """Wait until `is_done`, with all batches sent."""
        if not is_done():
            self.flush()
            self._lanes.wait(is_done)

    def wait_for_some(self, _: Collection[Pending], /) -> int:
        """Wait for nothing: a message has the outputs of several batches.

        Return 1: one output may be read before the next call.
        """
        return 1

    def end(self) -> None:
        """Do nothing: workers got the model when the stream began."""

    # Chunks and outputs

    def _open(self, form: Form) -> Request:
        """Open a chunk."""
        batches = self._size.open(self._lanes.each_ns)
        # The caller may change a batch while the chunk waits for others: the packer copies it
        copies_up_to = 0 if batches == 1 else MOST_BYTES
        self._chunk = chunk = Request(form, Packer(copies_up_to=copies_up_to))
        return chunk

    def read(self, call: StreamCall) -> Any:
        """Return the output of a batch."""
        if call.done():
            self._look(perf_counter_ns())
        else:
            if call.request is self._chunk or self._lanes.wants_more:
                self.flush()
            self._lanes.wait(call.done)
        self._read_at = perf_counter_ns()
        return self._session.finish(call.load(), call)

    def _look(self, now: int) -> None:
        """Receive what has arrived, unless the last look was a moment ago."""
        if now - self._looked_at > _LOOK_NS:
            self._looked_at = now
            self._lanes.look()
