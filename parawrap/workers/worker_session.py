"""The session of a block over workers. Calls are cut and joined as in `engine/call.py`; `lanes.py` runs them."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from parawrap.backends import backend_of, device_of, warn_caller
from parawrap.engine.call import Entry, Modes, here, must_run_plainly, raise_first_failure, without_autocast
from parawrap.engine.cut import Cutter, Shard, ShardPlan
from parawrap.engine.extents import FlatCall
from parawrap.engine.join import join, with_originals
from parawrap.engine.join_rules import JoinRules
from parawrap.engine.stats import LaneStats, Stats
from parawrap.engine.streams import Prepare, StreamSize, as_call, failed, succeeded
from parawrap.engine.trace import Recorder, Trace, timed
from parawrap.errors import SessionError, ShardError
from parawrap.launch import Platform
from parawrap.processes.pickling import Packed, pack
from parawrap.tree import WholeLeaf, flatten
from parawrap.workers.lanes import Call, Form, Lanes, Request
from parawrap.workers.local_workers import LocalWorkers
from parawrap.workers.model import Build, SentModel
from parawrap.workers.ray_workers import RayWorkers
from parawrap.workers.worker import GRADIENTS, pack_modes
from parawrap.workers.worker_stream import WorkerStream

_CPU = torch.device("cpu")
_WRITTEN = (
    "the model wrote in place into a tensor that every lane gets whole, so each lane wrote once. Pass one copy per row, "
    "cut the tensor with in_dims, or use an out-of-place operation"
)
_open_sessions: weakref.WeakSet[WorkerSession] = weakref.WeakSet()


class _SubmittedCall(Call):
    """A whole call with a future. `finish` takes the output of the worker, and returns the caller's."""

    __slots__ = ("_finish", "future")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], finish: Callable[[Any, Call], Any]) -> None:
        super().__init__(args, kwargs)
        self._finish = finish
        self.future: Future[Any] = Future()

    def begin(self) -> bool:
        return self.future.set_running_or_notify_cancel()

    def end(self) -> None:
        if self.future.cancel():  # it was cancelled before, or its lanes ended before it was sent
            self.future.set_running_or_notify_cancel()  # otherwise concurrent.futures.wait would wait forever
            return
        try:
            output = self._finish(self.load(), self)
        except BaseException as error:  # noqa: BLE001 (the reader of the future gets it)
            self.future.set_exception(error.with_traceback(None))  # its frames refer to the future
        else:
            self.future.set_result(output)


class WorkerSession:
    """The calls of one target, over workers, until `close`. Thread-safe. Workers start at the first call.

    There is one worker per device, or per rank of a platform for Ray. If a worker dies, its call runs `retries` more times.
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
        self.lanes = Lanes(workers, retries)
        self.devices = (_CPU,) * len(workers.devices)
        self.cutters = cutters
        self.rules = rules
        self.output_device = output_device
        self.recorder = Recorder(target)
        self.shards: tuple[int, ...] = ()
        self._model = SentModel(target)
        self._backend = backend_of(workers.devices[0].type)
        self._reading = threading.RLock()  # of the model
        self._counting = threading.Lock()
        self._plain_lock = threading.RLock()  # plain calls run one at a time
        self._calls = self._plain_calls = 0
        self._has_warned_of_plan = False
        self._is_closed = False
        self._end = weakref.finalize(self, self.lanes.end)
        self._end.atexit = False
        _open_sessions.add(self)

    def call(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Scatter, apply, and gather; or run the call plainly if there is nothing to cut."""
        lanes = self.lanes.all
        if not self._is_ready() or (len(lanes) == 1 and self._is_at_home()):
            return self.run_plainly(entry, args, kwargs)
        cutter = self.cutters[entry.method]
        flat = cutter.flatten(args, kwargs)
        plan = cutter.plan(flat, len(lanes))
        if plan.hint is not None and not self._has_warned_of_plan:
            self._has_warned_of_plan = True
            warn_caller(plan.hint)
        if len(plan.sizes) == 1 and self._is_at_home() and all(map(_is_on_cpu, flat.leaves)):
            return self.run_plainly(entry, args, kwargs)
        self.refuse_gradients(args, kwargs)
        form = self._form(entry.method, is_whole=False)
        shards = plan.scatter(flat, self.devices[: len(plan.sizes)])
        versions = plan.written(flat) if len(shards) > 1 and None in plan.dims else []
        outputs, errors = self._apply(entry, form, shards, plan)
        if errors:
            outputs.clear()
            raise_first_failure(errors, len(shards), lanes, plan.describe)
        if versions and versions != plan.written(flat):
            raise ShardError(_WRITTEN)
        if not flat.on_cpu:
            plan.update(flat, shards)
        with without_autocast(self._backend.type):
            output = join(
                outputs, plan.sizes, self.rules, self._output_device(flat), partial(_find_originals, plan, flat, shards)
            )
        with self._counting:
            self._calls += 1
            self.shards = plan.sizes
            for lane, rows in zip(lanes, plan.sizes, strict=False):
                lane.rows += rows
        return output

    def _apply(
        self, entry: Entry, form: Form, shards: Sequence[Shard], plan: ShardPlan
    ) -> tuple[list[Any], list[tuple[int, BaseException]]]:
        """Run shard i in lane i, all at the same time. Return the values, and the errors with their lanes."""
        parts = [Call(tuple(shard.args), dict(shard.kwargs)) for shard in shards]
        for part, lane, rows in zip(parts, self.lanes.all, plan.sizes, strict=False):
            if self.recorder.traces:
                part.record = partial(self.recorder.record, entry.method, entry.batch, rows)
            part.request = request = Request(form)
            try:
                request.add(part)
                self.lanes.post(request, lane)
            except Exception as error:  # noqa: BLE001 (the other lanes must finish before it is raised)
                request.failure = error
        outputs: list[Any] = []
        errors: list[tuple[int, BaseException]] = []
        for index, part in enumerate(parts):
            try:
                self.lanes.wait(part.done)
                outputs.append(part.load())
            except BaseException as error:
                if not (isinstance(error, Exception) or part.done()):
                    raise  # Ctrl-C leaves at once
                errors.append((index, error))  # once the other lanes have finished
        return outputs, errors

    # Whole calls, each in one lane

    def submit(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
        """Run a call whole in one lane.

        Raises:
            UnsendableError: If an argument cannot be pickled.
            SessionError: If the call needs gradients, or the block is closed.
        """
        form = self.get_ready(entry.method)
        if form is not None:
            return self._send(entry, args, kwargs, form)
        try:
            return succeeded(self.run_plainly(entry, args, kwargs))
        except Exception as error:  # noqa: BLE001
            return failed(error)

    def get_ready(self, method: str | None, prepare: Prepare | None = None) -> Form | None:
        """Return what whole calls of a method share; None if they must run plainly.

        Raises:
            SessionError: If the lanes are closed.
        """
        if self._is_ready():
            return self._form(method, prepare)
        if self._is_closed:
            msg = "the lanes are closed: submit inside the `with` block, and read the outputs of map before it ends"
            raise SessionError(msg)
        return None

    def open_stream(self, entry: Entry, prepare: Prepare | None, size: StreamSize) -> WorkerStream:
        """Return what starts the batches of one stream."""
        return WorkerStream(self, entry, prepare, size)

    def run_plainly(
        self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any], prepare: Prepare | None = None
    ) -> Any:
        """Run a call in the caller's thread, one at a time; in a lane if this process does not have the target."""
        if isinstance(self.target, Build) and self._is_ready():
            return self._send(entry, args, kwargs, self._form(entry.method, prepare)).result()
        record = prepare_record = None
        if self.recorder.traces and here.lane is None:  # a lane's own span has it already
            record = partial(self.recorder.record, entry.method, entry.batch, None)
            prepare_record = partial(self.recorder.record, "prepare", entry.batch, None)
        if prepare is not None:
            args, kwargs = as_call(timed(prepare_record, None, prepare, *args))
        with nullcontext() if self._is_closed or here.lane is not None else self._plain_lock:
            if self._is_ready():
                self.refuse_gradients(args, kwargs)  # as in a worker
            before, here.lane = here.lane, self.lanes.all[0]
            try:
                output = timed(record, None, entry.plain, *args, **kwargs)
            finally:
                here.lane = before
                self._model.ran_plainly()
        with self._counting:
            self._calls += 1
            self._plain_calls += 1
        return output if self.rules.keep_single else join([output], (1,), self.rules)

    def finish_output(self, output: Any, call: Call) -> Any:
        """Return the caller's output of a whole call, and count the call."""
        output = with_originals(output, partial(_find_original, {}))
        device = self.output_device or (None if self._model.home in (None, _CPU) else self._model.home)
        if device is not None or not self.rules.keep_single:
            output = join([output], (1,), self.rules, device)
        with self._counting:
            self._calls += 1
            if call.request is not None and call.request.lane is not None:
                call.request.lane.rows += call.rows
        return output

    def count_rows(self, method: str | None, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> int:
        """Return the number of rows of a whole call."""
        cutter = self.cutters[method]
        if not kwargs and all(type(each) is torch.Tensor for each in args):
            return cutter.rows(args)
        return max(0, cutter.whole(args, kwargs or {})[0].rows)

    def refuse_gradients(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> None:
        """Raise SessionError if gradients are enabled, and an argument or a parameter requires one."""
        if not torch.is_grad_enabled():
            return
        leaves = flatten((tuple(args), dict(kwargs or {})))[0]
        if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves):
            raise SessionError(GRADIENTS.format("an argument"))
        if any(parameter.requires_grad for parameter in self._model.parameters):
            raise SessionError(GRADIENTS.format("a parameter of the model"))

    # The block

    def cancel(self) -> None:
        """Drop submitted calls that have not started, and end the workers, also in the middle of a call."""
        self.lanes.end()

    def renew(self) -> None:
        """Send the model again at the next call."""
        self._model.renew()

    def close(self) -> None:
        """Let the lanes finish, and end them. A call in flight finishes too. May be called again."""
        self._is_closed = True
        if self._end.detach() is not None and self.lanes.are_here:
            if here.lane not in self.lanes.all:  # a callback cannot wait for what its own thread receives
                self.lanes.wait(self.lanes.is_idle)
            self.lanes.end()
            self._model.forget()

    def stats(self) -> Stats:
        """Return the counters."""
        of_lanes = tuple(
            LaneStats(lane.device, lane.label, lane.tasks, lane.rows, lane.busy_ns / 1e9) for lane in self.lanes.all
        )
        sent = self._model
        return Stats(self._calls, self._plain_calls, self.shards, sent.refreshes, sent.copied_bytes, of_lanes)

    def trace(self, path: str | Path) -> Trace:
        """Return a recorder of the calls of each lane."""
        return Trace(self.recorder, self.lanes.all, path)

    # Messages

    def _is_ready(self) -> bool:
        """True if a call of this thread may go to the lanes: not in a callback, after `close`, or while it is traced."""
        is_open = here.lane is None and not self._is_closed and self.lanes.are_here
        return is_open and not must_run_plainly(self._backend) and self._model.is_ready()

    def _form(self, method: str | None, prepare: Prepare | None = None, *, is_whole: bool = True) -> Form:
        """Return what the calls of one message share."""
        modes = Modes.capture(self._backend.type)
        packed = None if prepare is None else pack(prepare, "prepare").to_bytes()
        return Form(pack_modes(modes), modes.inference, self._read_model(), method, packed, is_whole)

    def _read_model(self) -> Packed:
        """Start the workers, and return the model as it is now.

        Raises:
            SessionError: If gradients are enabled, and a parameter requires one.
            UnsendableError: If the target cannot be pickled.
        """
        self.refuse_gradients((), None)
        with self._reading:
            if not self._model.is_current():
                self._model.read()
            self.lanes.start()
            assert self._model.packed is not None
            return self._model.packed

    def _send(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any], form: Form) -> Future[Any]:
        """Send a whole call to the lane with the fewest messages, or keep it until a lane has room."""
        self.refuse_gradients(args, kwargs)
        rows = None if form.prepare is not None else self.count_rows(entry.method, args, kwargs)
        call = _SubmittedCall(args, kwargs, self.finish_output)
        call.rows = rows or 0
        if self.recorder.traces:
            call.record = partial(self.recorder.record, entry.method, entry.batch, rows)
        request = Request(form)
        request.add(call)
        self.lanes.post(request)
        self.lanes.receive()
        return call.future

    def _is_at_home(self) -> bool:
        return self._model.home in (None, _CPU) and self.output_device in (None, _CPU)

    def _output_device(self, flat: FlatCall) -> torch.device | None:
        """Return where joined outputs go; None if they are there already, on the CPU."""
        devices = (device_of(leaf) for leaf in flat.leaves)
        found = self.output_device or self._model.home or next((each for each in devices if each is not None), _CPU)
        return None if found == _CPU else found


def _find_originals(plan: ShardPlan, flat: FlatCall, shards: Sequence[Shard]) -> Sequence[Callable[[Any], Any]]:
    """Return one function per part. It maps a worker's copy of an uncut argument to the caller's value, or to None."""
    same = {id(value): value for leaf in plan.whole(flat) for value in (leaf, getattr(leaf, "value", leaf))}
    return [partial(_find_original, {**same, **shard.origins}) for shard in shards]


def _find_original(origins: Mapping[int, Any], value: Any) -> Any:
    return origins.get(id(value))


def _is_on_cpu(leaf: Any) -> bool:
    return getattr(leaf, "is_cpu", not isinstance(leaf, WholeLeaf))


@atexit.register  # before launches are cancelled
def _end_open_sessions() -> None:
    for session in list(_open_sessions):
        session._end()
