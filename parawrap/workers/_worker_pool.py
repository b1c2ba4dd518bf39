"""The lanes of a session with workers: cut calls go to every lane, whole calls to the lane with the fewest requests."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, Protocol

import torch

from parawrap.backends import Backend, backend_of
from parawrap.errors import SessionError
from parawrap.lanes import LaneFuture, Modes, Outcome, here
from parawrap.workers._worker_lane import Request, WorkerLane

__all__ = ["ShardCall", "WorkerPool"]

_AHEAD = 2  # requests per worker, so that the next one has arrived when an answer leaves
_EXIT_PATIENCE_S = 5.0
_load = attrgetter("load")


class ShardCall(Protocol):
    """A lane's part of a cut call."""

    def request(self, modes: Modes) -> Request:
        """Return the request for the lane's worker."""
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

    def __init__(self, lanes: Sequence[WorkerLane]) -> None:
        self.lanes = tuple(lanes)
        self.backend: Backend = backend_of(lanes[0].device.type)
        self.closed = False
        self._process = os.getpid()
        self._gate = threading.Lock()
        self._backlog: deque[Request] = deque()
        for lane in lanes:
            lane.freed = _Freed(self._gate, self._backlog)
        self._end = weakref.finalize(self, _abandon, self.lanes)

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
        in_turns: bool = False,
    ) -> list[Outcome]:
        """Send task i to lane i and return all outcomes. Tasks beyond the lanes go to the last one.

        In turns, the first failure ends the call.
        """
        calls = [task() for task in tasks]
        lanes = (*self.lanes, *self.lanes[-1:] * (len(calls) - len(self.lanes)))
        if not in_turns:
            futures = [self._post(lane, call.request(modes)) for lane, call in zip(lanes, calls, strict=False)]
            return [_outcome(call, future) for call, future in zip(calls, futures, strict=True)]
        outcomes = [Outcome()] * len(calls)
        for slot, (lane, call) in enumerate(zip(lanes, calls, strict=False)):
            outcomes[slot] = _outcome(call, self._post(lane, call.request(modes)))
            if outcomes[slot].error is not None:
                break
        return outcomes

    def submit(self, request: Request) -> LaneFuture:
        """Send a request to the lane with the fewest requests, or keep it until a lane has room.

        Raises:
            UnsendableError: If the request cannot be pickled.
            SessionError: If the pool is closed.
        """
        with self._gate:
            if not self.alive:
                msg = "the lanes are closed: call inside the `with` block, or make a new parallel(...)"
                raise SessionError(msg)
            lane = min(self.lanes, key=_load)
            if lane.load >= _AHEAD:
                self._backlog.append(request)
                return request.future
            lane.load += 1
        request.future.set_running_or_notify_cancel()
        _send(lane, request, self._gate)
        return request.future

    def request_all(self, make: Callable[[], Request]) -> None:
        """Send a request to every lane, and wait for the answers.

        Raises:
            BaseException: The error of the first lane that failed.
        """
        futures = [self._post(lane, make()) for lane in self.lanes]
        for error in [future.exception() for future in futures]:
            if error is not None:
                raise error

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Wait for the requests that were sent before. Then run the block."""
        wait([request.future for lane in self.lanes for request in lane.unanswered])
        yield

    def cancel(self) -> None:
        """Drop calls that were not sent, and end the workers, also in the middle of a call."""
        with self._gate:
            dropped = list(self._backlog)
            self._backlog.clear()
        for request in dropped:
            request.future.cancel()
        if self._process == os.getpid():
            _end(self.lanes)

    def close(self) -> None:
        """End the workers once they have answered what was sent to them. May be called again."""
        with self._gate:
            self.closed = True
            is_first = self._end.detach() is not None
        if is_first and self._process == os.getpid():
            if here.lane not in self.lanes:  # a callback runs in a lane, which cannot wait for itself
                wait([request.future for request in self._pending()])
            _end(self.lanes)

    def _pending(self) -> list[Request]:
        with self._gate:
            return [*self._backlog, *(request for lane in self.lanes for request in lane.unanswered)]

    def _post(self, lane: WorkerLane, request: Request) -> Future[Any]:
        """Send a request of a cut call. An error of the sending goes into the future."""
        with self._gate:
            lane.load += 1
        request.future.set_running_or_notify_cancel()
        try:
            _send(lane, request, self._gate)
        except Exception as error:  # noqa: BLE001
            request.future.set_exception(error)
        return request.future


class _Freed:
    """Gives a lane that answered a request the next one from the backlog. It does not refer to the pool."""

    def __init__(self, gate: threading.Lock, backlog: deque[Request]) -> None:
        self._gate = gate
        self._backlog = backlog

    def __call__(self, lane: WorkerLane) -> None:
        while (request := self._next(lane)) is not None:
            try:
                lane.post(request)
            except Exception as error:  # noqa: BLE001 (the reader of the future gets it)
                request.future.set_exception(error)
            else:
                return

    def _next(self, lane: WorkerLane) -> Request | None:
        with self._gate:
            while self._backlog and lane.load <= _AHEAD:
                request = self._backlog.popleft()
                if request.future.set_running_or_notify_cancel():
                    return request
            lane.load -= 1
            return None


def _send(lane: WorkerLane, request: Request, gate: threading.Lock) -> None:
    try:
        lane.post(request)
    except BaseException:
        with gate:
            lane.load -= 1
        raise


def _outcome(call: ShardCall, future: Future[Any]) -> Outcome:
    """Wait for an answer. Ctrl-C leaves at once."""
    error = future.exception()
    return Outcome(call.land(future.result())) if error is None else Outcome(error=error)


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
