"""Lanes in other processes, each with its own copy of one target.

    Session ── run, submit ──> WorkerPool ── requests ──> WorkerLane ══ a line or an actor ══> serve_lane ── Server
       ^                           |                          |                                        |
       └──── outcomes, futures ────┴───────── answers ────────┴════════════════════════════════════════┘

Cut calls go to every lane, whole calls to the lane with the fewest requests.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from itertools import count
from typing import Any, Protocol

import torch

from parawrap.backends import Backend, backend_of
from parawrap.engine.call import Entry, Lane, Modes, here, must_run_plainly
from parawrap.engine.device_streams import LaneFuture
from parawrap.engine.pooled import PartCall, PooledCall, Record, TaskOutcome
from parawrap.engine.streams import Prepare
from parawrap.engine.trace import timed
from parawrap.errors import SessionError
from parawrap.tree import flatten
from parawrap.workers._build import Build
from parawrap.workers._given_arguments import GivenArguments
from parawrap.workers._requests import CallRequest, ChunkRequest, ModelRequest, PackedModes, warn_again
from parawrap.workers._sent_model import SEEDS, SentModel
from parawrap.workers._server import CallOutput, WorkerCall, pickle_function
from parawrap.workers._worker_lane import Backlog, Request, Worker, WorkerLane

__all__ = ["WorkerPool", "Workers"]

_EXIT_PATIENCE_S = 5.0  # for a thread that only waits for its worker
_NO_KWARGS: Mapping[str, Any] = {}
_open_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()
_GRADIENTS = (
    "{} requires a gradient, and gradients do not travel between processes. For inference, call inside torch.no_grad(). To "
    "train on several processes, use @wrapper with DistributedDataParallel"
)


class Workers(Protocol):
    """Starts the workers of one pool."""

    devices: Sequence[torch.device]

    @abstractmethod
    def start(self, lane: int, seed: int) -> Worker:
        """Start the worker of a lane."""

    @abstractmethod
    def end(self) -> None:
        """Release what the workers share. May be called again."""


class WorkerPool:
    """The lanes of one target, and its copies in their workers. Any number of threads may use it at once.

    A lane has at most two whole calls; further ones wait for the first lane with room. A call whose worker died runs
    `retries` more times. Workers start at the first `refresh`.
    """

    takes_chunks = True
    cuts_for_one_lane = False

    def __init__(self, target: Any, workers: Workers, retries: int) -> None:
        self._model = model = SentModel(target)
        self._backlog = Backlog()
        start = partial(_start, workers, count(1))
        self.lanes = tuple(
            WorkerLane(index, device, start, model.install, retries, self._backlog)
            for index, device in enumerate(workers.devices)
        )
        self.backend: Backend = backend_of(workers.devices[0].type)
        self.closed = False
        self._workers = workers
        self._packed_modes = PackedModes(workers.devices[0].type)
        self._parameters = [*target.parameters()] if isinstance(target, torch.nn.Module) else []
        self._prepare = 0, b""
        self._prepares = count(1)
        self._changing = threading.RLock()
        self._process = os.getpid()
        self._end = weakref.finalize(self, _abandon, self.lanes, workers)
        self._end.atexit = False
        _open_pools.add(self)

    @property
    def home(self) -> torch.device | None:
        """The device of the model in this process."""
        return self._model.home

    @property
    def has_target_here(self) -> bool:
        """False if each worker built its own model."""
        return not isinstance(self._model.target, Build)

    @property
    def refreshes(self) -> int:
        """How often a changed model was sent."""
        return self._model.refreshes

    @property
    def copied_bytes(self) -> int:
        """The size of the changed models that were sent, in bytes."""
        return self._model.copied_bytes

    def original_of(self, value: Any) -> Any:
        """Return the value if it is a tensor of the model; None for any other."""
        return self._model.original_of(value)

    def is_ready(self) -> bool:
        """True if a call of this thread may go to the lanes: not in a callback, after `close`, or while it is traced."""
        return here.lane is None and self._is_open() and not must_run_plainly(self.backend) and self._model.is_ready()

    def refresh(self) -> None:
        """Start the workers that do not run, and send the others the target if it changed.

        Raises:
            SessionError: If gradients are enabled, and a parameter requires one.
            UnsendableError: If the target cannot be pickled.
            RankDiedError: If a worker ends while it starts.
        """
        self._refuse_gradients()
        with self._changing:
            if None in [lane.thread for lane in self.lanes] or not self._model.is_current():
                self._send_model()

    def renew(self) -> None:
        """Send the whole model at the next refresh. It does not wait: a callback in a lane may call it."""
        self._model.renew()

    def run(self, calls: Sequence[PartCall], modes: Modes, turns: str | None) -> list[TaskOutcome]:
        """Send call i to lane i, at the same time or in `turns`. The buffers that lane 0 wrote go to the model.

        In turns, each lane continues the caller's random numbers, and the first failure ends the call.

        Raises:
            SessionError: If the call needs gradients.
        """
        for call in calls:
            call.place()
            self._refuse_gradients(call.args, call.kwargs)
        if turns is None:
            with self._changing:  # no lane gets changes of the model between two parts of one call
                futures = [post(self.lanes[call.lane], self._request(call, modes)) for call in calls]
            return [self._outcome(call, future) for call, future in zip(calls, futures, strict=True)]
        outcomes = [TaskOutcome()] * len(calls)
        with self._changing:
            for index, call in enumerate(calls):
                request = self._request(call, modes, torch.get_rng_state())
                outcomes[index] = self._outcome(call, post(self.lanes[call.lane], request))
                if outcomes[index].error is not None:
                    break
        return outcomes

    def submit(self, call: PooledCall, modes: Modes) -> LaneFuture:
        """Send a whole call to the lane with the fewest requests, or keep it until a lane has room.

        Raises:
            UnsendableError: If an argument or `prepare` cannot be pickled.
            SessionError: If the call needs gradients, or the pool is closed.
        """
        request = self._whole_request(call, modes)
        self._place(request)
        return request.future

    def submit_chunk(self, calls: Sequence[PooledCall], modes: Modes) -> list[LaneFuture]:
        """Send whole calls, in one message, to the lane with the fewest requests, or keep them until a lane has room.

        Raises:
            UnsendableError: If `prepare` cannot be pickled.
            SessionError: If a call needs gradients, or the pool is closed.
        """
        requests = [self._whole_request(call, modes) for call in calls]
        self._place(ChunkRequest(requests))
        return [each.future for each in requests]

    def _place(self, request: Request) -> None:
        lane = self._backlog.place(request, self.lanes)
        if lane is not None:
            request.start()
            lane.post(request)

    def _whole_request(self, call: PooledCall, modes: Modes) -> CallRequest:
        if not self._is_open():
            msg = "the lanes are closed: call inside the `with` block, or make a new parallel(...)"
            raise SessionError(msg)
        self._refuse_gradients(call.args, call.kwargs)
        sent = WorkerCall(call.entry.method, None, self._packed_modes(modes), None, True, False, call.args, call.kwargs)
        prepare = None if call.prepare is None else self._number_function(call.prepare)
        given = GivenArguments(call.args, call.kwargs)  # now: the caller may change the arguments
        request = CallRequest(sent, partial(self._finish, call, given), prepare, is_inference=modes.inference)
        rows = call.rows  # counted now: the caller may change the arguments
        if call.record is not None:
            request.record = partial(call.record, rows)
        return request

    def run_plainly(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any], record: Record | None) -> Any:
        """Run the model of this process: workers have their own models.

        Raises:
            SessionError: If the call needs gradients: it would in a worker.
        """
        if self.is_ready():
            self._refuse_gradients(args, kwargs)
        before, here.lane = here.lane, self.lanes[0]
        try:
            return timed(record, None, entry.plain, *args, **kwargs)
        finally:
            here.lane = before
            self._model.ran_plainly()

    def cancel(self) -> None:
        """Drop calls that were not sent, and end the workers, also in the middle of a call."""
        for lane in self.lanes:
            lane.is_over = True  # it does not replace its worker any more
        self._workers.end()  # a lane may be waiting for a cluster
        self._backlog.drop()
        if self._process == os.getpid():
            _end(self.lanes)

    def close(self) -> None:
        """End the workers once they have answered what was sent to them. May be called again."""
        self.closed = True
        if self._end.detach() is None or self._process != os.getpid():
            return
        if here.lane in self.lanes:  # a callback: its lane cannot wait for itself, or for a thread that waits for the lane
            _end(self.lanes)
            self._workers.end()
            return
        wait([request.future for request in self._backlog.requests()])
        self._wait_until_idle()
        _end(self.lanes)
        with self._changing:
            self._workers.end()
            self._model.forget()

    def _is_open(self) -> bool:
        """False after `close`, and in a forked child of the process that made the pool."""
        return not self.closed and self._process == os.getpid()

    def _send_model(self) -> None:
        self._wait_until_idle()
        if not self._model.is_current():
            self._model.read_target()
        new = [lane for lane in self.lanes if lane.thread is None]
        started = [lane.begin() for lane in new]
        if self._model.is_unsent:
            started += [post(lane, ModelRequest(self._model.send)) for lane in self.lanes if lane not in new]
        for future in started:
            future.result()
        self._model.sent()

    def _wait_until_idle(self) -> None:
        """Wait for the requests that were sent before."""
        wait([request.future for lane in self.lanes for request in lane.unanswered])

    def _request(self, call: PartCall, modes: Modes, rng_state: torch.Tensor | None = None) -> CallRequest:
        """Return the request for a part of a cut call. With `rng_state`, it continues these random numbers."""
        packed, is_first = self._packed_modes(modes), call.lane == 0
        sent = WorkerCall(call.entry.method, None, packed, rng_state, False, is_first, tuple(call.args), dict(call.kwargs))
        request = CallRequest(sent, is_inference=modes.inference)
        request.record = call.record
        return request

    def _outcome(self, call: PartCall, future: Future[Any]) -> TaskOutcome:
        """Wait for the answer to a part of a cut call. Ctrl-C leaves at once."""
        error = future.exception()
        if error is not None:
            return TaskOutcome(error=error)
        returned: CallOutput = future.result()
        try:
            if returned.rng_state is not None:
                torch.set_rng_state(returned.rng_state)
            if returned.buffers:
                with self._changing:
                    self._model.take_buffers(returned.buffers)
            return TaskOutcome(self._take_output(returned, GivenArguments(call.args, call.kwargs)))
        except Exception as refused:  # noqa: BLE001 (the other lanes must finish before it is raised)
            return TaskOutcome(error=refused)

    def _finish(self, call: PooledCall, given: GivenArguments, returned: CallOutput, lane: Lane) -> Any:
        output = self._take_output(returned, given)
        return call.finish(output, call, lane)

    def _take_output(self, returned: CallOutput, given: GivenArguments) -> Any:
        """Return the output of a call. Repeat its warnings here, and its writes into arguments."""
        warn_again(returned.warned)
        given.take(returned.written, returned.changed)
        return self._model.of_model(returned.output) if returned.has_model_tensors else returned.output

    def _refuse_gradients(self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] = _NO_KWARGS) -> None:
        """Raise SessionError if gradients are enabled, and an argument or a parameter requires one."""
        if not torch.is_grad_enabled():
            return
        leaves = flatten((tuple(args), dict(kwargs)))[0]
        if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves):
            raise SessionError(_GRADIENTS.format("an argument"))
        if any(parameter.requires_grad for parameter in self._parameters):
            raise SessionError(_GRADIENTS.format("a parameter of the model"))

    def _number_function(self, prepare: Prepare) -> tuple[int, bytes]:
        """Return a number and the pickle of a function. Pickled each time, because what it refers to may have changed."""
        pickled = pickle_function(prepare, "prepare")
        if pickled != self._prepare[1]:
            self._prepare = next(self._prepares), pickled
        return self._prepare


def post(lane: WorkerLane, request: Request) -> Future[Any]:
    """Send a request to a certain lane. An error of the sending goes into the future."""
    lane.backlog.count(lane)
    request.start()
    try:
        lane.post(request)
    except Exception as error:  # noqa: BLE001
        request.future.set_exception(error.with_traceback(None))  # its frames refer to the future
    return request.future


def _start(workers: Workers, numbers: Iterator[int], lane: int) -> Worker:
    """Start a worker for a lane. Each one has its own random numbers."""
    return workers.start(lane, (torch.initial_seed() + next(numbers)) % SEEDS)


def _end(lanes: Sequence[WorkerLane]) -> None:
    """End all workers at the same time."""
    threads = [threading.Thread(target=lane.end, name="parawrap-end") for lane in lanes[1:]]
    for thread in threads:
        thread.start()
    for lane in lanes[:1]:
        lane.end()
    for thread in threads:
        thread.join()
    for lane in lanes:
        lane.join()


def _abandon(lanes: Sequence[WorkerLane], workers: Workers) -> None:
    """End what a pool that was never closed has started."""
    for lane in lanes:
        lane.end()
    for lane in lanes:
        lane.join(_EXIT_PATIENCE_S)
    workers.end()


@atexit.register  # before launches are cancelled: a lane would replace a worker that ends without it
def _abandon_open_pools() -> None:
    for pool in list(_open_pools):
        if pool._process == os.getpid():
            pool._end()
