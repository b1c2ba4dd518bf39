"""The workers of a block: cut calls, submitted calls, and the state of the model that both need."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

import torch

from parawrap.backends import Backend, backend_of
from parawrap.engine.call import Entry, Lane, Modes, here, must_run_plainly
from parawrap.engine.cut import Shard
from parawrap.engine.session import LaneFuture
from parawrap.engine.streams import Prepare
from parawrap.engine.trace import timed
from parawrap.errors import SessionError
from parawrap.tree import flatten
from parawrap.workers.built_model import Build
from parawrap.workers.lanes import Call, Form, Lanes, ModelRequest, Request, Workers
from parawrap.workers.model import SentModel
from parawrap.workers.worker import SentModes, pickle_function

_GRADIENTS = (
    "{} requires a gradient, and gradients do not travel between processes. For inference, call inside torch.no_grad(). To "
    "train on several processes, use @wrapper with DistributedDataParallel"
)
_open_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()

Record = Callable[..., None]
"""Takes the index of a lane, the start and the end of its work as ``perf_counter_ns``, and the error if it raised."""


class _Submitted(Call):
    """A whole call with a future. `finish` takes the worker's output and the lane, and returns the caller's output."""

    __slots__ = ("finish", "future")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], finish: Callable[[Any, Lane], Any]) -> None:
        super().__init__(args, kwargs)
        self.finish = finish
        self.future = LaneFuture()


class _SubmittedRequest(Request):
    """The message of a submitted call."""

    __slots__ = ()

    def start(self) -> bool:
        (call,) = self.calls
        assert isinstance(call, _Submitted)
        return call.future.set_running_or_notify_cancel()


class Pace:
    """How long a batch takes: the size of the first chunks of the next stream."""

    each_ns: float | None = None

    def note(self, took_ns: int, batches: int) -> float:
        """Take the time of a chunk, and return the average of the last ones."""
        each = took_ns / batches
        self.each_ns = each if self.each_ns is None else self.each_ns + (each - self.each_ns) / 4
        return self.each_ns


class WorkerPool:
    """The workers of one target. Any number of threads may use it at once. Workers start at the first `refresh`."""

    def __init__(self, target: Any, workers: Workers, retries: int) -> None:
        self.model = SentModel(target)
        self.backend: Backend = backend_of(workers.devices[0].type)
        self.closed = False
        self.workers = Lanes(workers, self.model.pack, retries)
        self.lanes = self.workers.all
        self.pace = Pace()
        self._starter = workers
        self._prepare = 0, b""
        self._prepares = count(1)
        self._changing = threading.RLock()
        self._process = os.getpid()
        self._end = weakref.finalize(self, _abandon, self.workers, workers)
        self._end.atexit = False
        _open_pools.add(self)

    @property
    def home(self) -> torch.device | None:
        """The device of the model in this process."""
        return self.model.home

    @property
    def has_target_here(self) -> bool:
        """False if each worker built its own model."""
        return not isinstance(self.model.target, Build)

    @property
    def refreshes(self) -> int:
        """How often a changed model was sent."""
        return self.model.refreshes

    @property
    def copied_bytes(self) -> int:
        """The size of the changed models that were sent, in bytes."""
        return self.model.copied_bytes

    def is_ready(self) -> bool:
        """True if a call of this thread may go to the lanes: not in a callback, after `close`, or while it is traced."""
        return here.lane is None and self.is_open and not must_run_plainly(self.backend) and self.model.is_ready()

    @property
    def is_open(self) -> bool:
        """False after `close`, and in a forked child of the process that made the pool."""
        return not self.closed and self._process == os.getpid()

    def refresh(self) -> None:
        """Start the workers if they do not run, or send them the target if it changed.

        Raises:
            SessionError: If gradients are enabled, and a parameter requires one.
            UnsendableError: If the target cannot be pickled.
            RankDiedError: If a worker ends while it starts.
        """
        self.refuse_gradients((), None)
        with self._changing:
            if self.workers.are_started and self.model.is_current():
                return
            self.workers.wait(self._is_idle)
            if not self.model.is_current():
                self.model.read_target()
            try:
                if self.workers.are_started:
                    self._send_model()
                else:
                    self.workers.start()
            except BaseException:
                self.model.renew()  # a worker may have the model as it was before
                raise

    def renew(self) -> None:
        """Send the whole model at the next refresh. It does not wait: a callback in a lane may call it."""
        self.model.renew()

    def run(
        self, method: str | None, shards: Sequence[Shard], modes: Modes, records: Sequence[Record] | None
    ) -> tuple[list[Any], list[tuple[int, BaseException]]]:
        """Run shard i in lane i, all at the same time. Return the values, and the errors with their lanes.

        Raises:
            SessionError: If the call needs gradients.
        """
        sent: list[Call] = []
        with self._changing:  # no lane gets changes of the model between two parts of one call
            for shard in shards:
                self.refuse_gradients(shard.args, shard.kwargs)
            form = Form(SentModes.pack(modes), modes.inference, method, is_whole=False)
            for index, (shard, lane) in enumerate(zip(shards, self.lanes, strict=False)):
                sent.append(part := Call(tuple(shard.args), dict(shard.kwargs)))
                part.record = None if records is None else records[index]
                part.request = request = Request([part], form)
                try:
                    request.pack()
                    self.workers.post(request, lane)
                except Exception as error:  # noqa: BLE001 (the other lanes must finish before it is raised)
                    request.failure = error
        outputs: list[Any] = []
        errors: list[tuple[int, BaseException]] = []
        for index, part in enumerate(sent):
            try:
                self.workers.wait(part.done)
                outputs.append(part.load())
            except BaseException as error:
                if not (isinstance(error, Exception) or part.done()):
                    raise  # Ctrl-C leaves at once
                errors.append((index, error))  # once the other lanes have finished
        return outputs, errors

    def submit(
        self,
        method: str | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        prepare: Prepare | None,
        modes: Modes,
        record: Record | None,
        finish: Callable[[Any, Lane], Any],
    ) -> LaneFuture:
        """Send a whole call to the lane with the fewest messages, or keep it until a lane has room.

        Raises:
            UnsendableError: If an argument or `prepare` cannot be pickled.
            SessionError: If the call needs gradients, or the pool is closed.
        """
        self.refuse_gradients(args, kwargs)
        numbered = None if prepare is None else self.number_function(prepare)
        form = Form(SentModes.pack(modes), modes.inference, method, numbered)
        sent = _Submitted(args, kwargs, finish)
        sent.record = record
        sent.request = request = _SubmittedRequest([sent], form, self._finish_submitted)
        request.pack()
        self.workers.post(request)
        self.workers.receive_for(sent.future)
        return sent.future

    def run_plainly(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any], record: Record | None) -> Any:
        """Run the model of this process: workers have their own models.

        Raises:
            SessionError: If the call needs gradients: it would in a worker.
        """
        if self.is_ready():
            self.refuse_gradients(args, kwargs)
        before, here.lane = here.lane, self.lanes[0]
        try:
            return timed(record, None, entry.plain, *args, **kwargs)
        finally:
            here.lane = before
            self.model.ran_plainly()

    def cancel(self) -> None:
        """End the workers, also in the middle of a call. Everything that waits fails."""
        if self._process != os.getpid():
            return
        self.workers.end()
        self._starter.end()

    def close(self) -> None:
        """End the workers once they have answered what was sent to them. May be called again."""
        self.closed = True
        if self._end.detach() is None or self._process != os.getpid():
            return
        if here.lane not in self.lanes:  # a callback cannot wait for what its own thread receives
            self.workers.wait(self._is_idle)
        self.workers.end()
        self._starter.end()
        self.model.forget()

    def refuse_gradients(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> None:
        """Raise SessionError if gradients are enabled, and an argument or a parameter requires one."""
        if not torch.is_grad_enabled():
            return
        leaves = flatten((tuple(args), dict(kwargs or {})))[0]
        if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves):
            raise SessionError(_GRADIENTS.format("an argument"))
        if any(parameter.requires_grad for parameter in self.model.parameters):
            raise SessionError(_GRADIENTS.format("a parameter of the model"))

    def number_function(self, prepare: Prepare) -> tuple[int, bytes]:
        """Return a number and the pickle of a function. Pickled each time, because what it refers to may have changed."""
        pickled = pickle_function(prepare, "prepare")
        numbered = self._prepare  # another thread may number another function
        if pickled != numbered[1]:
            self._prepare = numbered = next(self._prepares), pickled
        return numbered

    def _is_idle(self) -> bool:
        return self.workers.is_idle

    def _send_model(self) -> None:
        requests = [ModelRequest(self.model.pack()) for _ in self.lanes]
        for request, lane in zip(requests, self.lanes, strict=True):
            self.workers.post(request, lane)
        self.workers.wait(lambda: all(request.is_done for request in requests))
        for request in requests:
            if request.failure is not None:
                raise request.failure

    def _finish_submitted(self, request: Request) -> None:
        for call in request.calls:
            assert isinstance(call, _Submitted)
            if call.future.cancelled():
                continue
            try:
                value = call.finish(call.load(), request.lane or self.lanes[0])
            except BaseException as error:  # noqa: BLE001 (the reader of the future gets it)
                call.future.set_exception(error.with_traceback(None))  # its frames refer to the future
            else:
                call.future.set_result(value)


def _abandon(lanes: Lanes, workers: Workers) -> None:
    """End what a pool that was never closed has started."""
    lanes.end()
    workers.end()


@atexit.register  # before launches are cancelled
def _abandon_open_pools() -> None:
    for pool in list(_open_pools):
        if pool._process == os.getpid():
            pool._end()
