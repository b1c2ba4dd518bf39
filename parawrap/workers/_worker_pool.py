"""The lanes of a session with workers: cut calls go to every lane, whole calls to the lane with the fewest requests."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from parawrap.backends import Backend, backend_of
from parawrap.errors import SessionError
from parawrap.lanes import LaneFuture, Modes, Outcome, TurnsOf, here
from parawrap.workers._worker_lane import Backlog, Request, WorkerLane

__all__ = ["ShardCall", "WorkerPool", "post"]

_EXIT_PATIENCE_S = 5.0
_open_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


class ShardCall(Protocol):
    """A lane's part of a cut call."""

    def request(self, modes: Modes, rng_state: torch.Tensor | None = None) -> Request:
        """Return the request for the lane's worker. With `rng_state`, it continues these random numbers."""
        ...

    def land(self, value: Any) -> Any:
        """Return the output, given the result of the request. Runs in the caller's thread."""
        ...


class WorkerPool:
    """The lanes of one session. Any number of threads may use it at once.

    A lane has at most two whole calls; further ones wait for the first lane with room.
    """

    home: torch.device | None = None
    threads: int | None = None  # the caller's own thread count stays

    def __init__(self, lanes: Sequence[WorkerLane], backlog: Backlog) -> None:
        self.lanes = tuple(lanes)
        self.backend: Backend = backend_of(lanes[0].device.type)
        self.closed = False
        self._process = os.getpid()
        self._backlog = backlog
        self._end = weakref.finalize(self, _abandon, self.lanes)
        self._end.atexit = False
        _open_pools.add(self)

    @property
    def alive(self) -> bool:
        """False after `close`, and in a forked child of the process that made the pool."""
        return not self.closed and self._process == os.getpid()

    def run(
        self,
        tasks: Sequence[Callable[[], ShardCall]],
        modes: Modes,
        sources: Collection[torch.device] = (),
        *,
        turns: TurnsOf | None = None,
    ) -> list[Outcome]:
        """Send task i to lane i, at the same time or in `turns`, and return all outcomes.

        In turns, each lane continues the caller's random numbers, and the first failure ends the call.
        """
        calls = [task() for task in tasks]
        if turns is None:
            futures = [post(lane, call.request(modes)) for lane, call in zip(self.lanes, calls, strict=False)]
            return [_outcome(call, future) for call, future in zip(calls, futures, strict=True)]
        outcomes = [Outcome()] * len(calls)
        for slot, (lane, call) in enumerate(zip(self.lanes, calls, strict=False)):
            outcomes[slot] = _outcome(call, post(lane, call.request(modes, torch.get_rng_state())))
            if outcomes[slot].error is not None:
                break
        return outcomes

    def submit(self, request: Request) -> LaneFuture:
        """Send a request to the lane with the fewest requests, or keep it until a lane has room.

        Raises:
            UnsendableError: If the request cannot be pickled.
            SessionError: If the pool is closed.
        """
        if not self.alive:
            msg = "the lanes are closed: call inside the `with` block, or make a new parallel(...)"
            raise SessionError(msg)
        lane = self._backlog.place(request, self.lanes)
        if lane is not None:
            request.future.set_running_or_notify_cancel()
            lane.post(request)
        return request.future

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Wait for the requests that were sent before. Then run the block."""
        wait([request.future for lane in self.lanes for request in lane.unanswered])
        yield

    def run_on_model(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function that runs the model of this process: workers have their own models."""
        return function(*args, **kwargs)

    def cancel(self) -> None:
        """Drop calls that were not sent, and end the workers, also in the middle of a call."""
        self._backlog.drop()
        if self._process == os.getpid():
            _end(self.lanes)

    def close(self) -> None:
        """End the workers once they have answered what was sent to them. May be called again."""
        self.closed = True
        if self._end.detach() is None or self._process != os.getpid():
            return
        if here.lane not in self.lanes:  # a callback runs in a lane, which cannot wait for itself
            wait([request.future for request in self._backlog.requests()])
            wait([request.future for lane in self.lanes for request in lane.unanswered])
        _end(self.lanes)


def post(lane: WorkerLane, request: Request) -> Future[Any]:
    """Send a request to a certain lane. An error of the sending goes into the future."""
    lane.backlog.count(lane)
    request.future.set_running_or_notify_cancel()
    try:
        lane.post(request)
    except Exception as error:  # noqa: BLE001
        request.future.set_exception(error)
    return request.future


def _outcome(call: ShardCall, future: Future[Any]) -> Outcome:
    """Wait for an answer. Ctrl-C leaves at once."""
    error = future.exception()
    if error is not None:
        return Outcome(error=error)
    try:
        return Outcome(call.land(future.result()))
    except Exception as refused:  # noqa: BLE001 (the other lanes must finish before it is raised)
        return Outcome(error=refused)


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


def _abandon(lanes: Sequence[WorkerLane]) -> None:
    """End what a pool that was never closed has started."""
    for lane in lanes:
        lane.end()
    for lane in lanes:
        lane.join(_EXIT_PATIENCE_S)


@atexit.register  # before launches are cancelled: a lane would replace a worker that ends without it
def _abandon_open_pools() -> None:
    for pool in list(_open_pools):
        if pool._process == os.getpid():
            pool._end()
