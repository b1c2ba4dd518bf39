"""The lanes of a block in other processes.

::

    callers ──► backlog ──► worker 0 (at most two messages) ──► the caller that waits, which receives for all
                       └──► worker 1

Guarantees:

- A worker answers its messages in the order of sending, and each call ends once: with its answer, or with an error.
- No thread belongs to a lane. Whoever waits for an answer receives all answers, and sends what waits. Futures of `submit`
  have one thread, until all lanes are idle.
- If a worker ends, its messages are sent again, and its lane starts another one for its next message. Only the oldest
  message ran, so only that one counts the death.
- After `end`, no process is left.
"""

from __future__ import annotations

import copy
import os
import threading
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext, suppress
from itertools import count
from typing import Any

import torch

from parawrap.engine.borrowed import Given
from parawrap.engine.lanes import Lane, here
from parawrap.errors import SessionError, add_note
from parawrap.processes.pickling import Packed, unpack
from parawrap.workers.local_workers import LocalWorker, LocalWorkers
from parawrap.workers.model import SEEDS
from parawrap.workers.packing import Packer, restore
from parawrap.workers.ray_workers import RayWorker, RayWorkers
from parawrap.workers.worker import Answer, Form
from parawrap.workers.writes import Written, write_back

_AHEAD = 2  # messages per worker, so that the next one has arrived when an answer leaves
_given_warnings: dict[str, dict[Any, Any]] = {}  # by file: "once per line" holds for all workers together


class Call:
    """A call in a message. `place` is its position there; `request` changes if the call is sent again alone.

    `given` are the arguments as they are when the call is sent: the caller may change containers before the answer comes.
    """

    __slots__ = ("args", "callbacks", "given", "is_cancelled", "kwargs", "place", "record", "request", "rows")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        self.args = args
        self.kwargs = kwargs
        self.callbacks: list[Callable[[Any], object]] = []  # for the end of the call
        self.is_cancelled = False
        self.place = self.rows = 0
        self.given: Given | None = None  # None: tensors alone, or arguments that the worker computes
        self.request: Request | None = None
        self.record: Callable[..., None] | None = None  # takes the lane, start, end, and error of a call that is traced

    def begin(self) -> bool:
        """Note that the call is about to be sent; False if it was cancelled."""
        return not self.is_cancelled

    def end(self) -> None:
        """Tell those who wait that the call has ended. Called in the thread that received the answer."""
        with suppress(IndexError):  # another thread calls them
            while self.callbacks:
                self.callbacks.pop()(self)

    def done(self) -> bool:
        """True if the call has ended."""
        return self.request is not None and self.request.is_done

    def load(self) -> Any:
        """Return the output. Repeat the warnings of the call here, and its writes into arguments.

        Raises:
            Exception: What the call raised, or an error of the worker.
        """
        request = self.request
        assert request is not None
        lane, block = request.lane, request.block
        try:
            if request.failure is not None:
                raise copy.deepcopy(request.failure)  # each call of the message adds its own notes
            answer = Answer(*request.answers[self.place])
            for text, category, filename, line in [] if answer.warned is None else unpack(answer.warned):
                registry = _given_warnings.setdefault(filename, {})
                warnings.warn_explicit(text, category, filename, line, registry=registry)
            error: BaseException | None = None if answer.error is None else unpack(answer.error[0])
            if self.record is not None and lane is not None:
                self.record(lane.index, answer.start, answer.end, error)
            if answer.error is not None and error is not None:
                add_note(error, f"raised in {lane}, with this traceback:\n{answer.error[1]}")
                raise error
            same = torch.is_inference_mode_enabled() == request.form.is_inference
            with nullcontext() if same else torch.inference_mode(request.form.is_inference):  # of the plain call's tensors
                output = restore(answer.output, block)
                if answer.written is None:
                    return output
                written: Written = restore(answer.written, block)
                given = self.given or Given((self.args, self.kwargs or {}))
                write_back(written, given)
                return given.resolve(output) if written.is_returned else output
        except BaseException as error:
            if request.form.is_whole and lane is not None:
                add_note(error, f"in {lane}")
            raise


class Request:
    """A message to a worker."""

    __slots__ = ("answers", "block", "calls", "deaths", "failure", "form", "items", "lane", "packer", "was_sent")

    def __init__(self, form: Form, packer: Packer | None = None) -> None:
        self.form = form
        self.calls: list[Call] = []
        self.items: list[Any] = []
        self.packer = packer or Packer()
        self.lane: WorkerLane | None = None  # the last one that got it
        self.answers: list[tuple[Any, ...]] = []
        self.block = memoryview(b"")  # of the answers
        self.failure: BaseException | None = None
        self.deaths = 0
        self.was_sent = False  # to the worker of now

    @property
    def is_done(self) -> bool:
        return bool(self.answers) or self.failure is not None

    def add(self, call: Call) -> None:
        """Add a call, and pack its arguments.

        Raises:
            UnsendableError: If an argument cannot be pickled.
        """
        is_simple = not call.kwargs and all(type(each) is torch.Tensor for each in call.args)
        if self.form.prepare is None and not is_simple:
            call.given = Given((call.args, call.kwargs or {}))
        if call.kwargs:
            self.items.append(self.packer.add({"args": call.args, "kwargs": call.kwargs}, ""))
        else:
            self.items.append(self.packer.add(call.args, "args"))
        call.request, call.place = self, len(self.calls)
        self.calls.append(call)


class WorkerLane(Lane):
    """One worker, and the messages that it has not answered. `model` and `prepare` are those that it has."""

    def __init__(self, index: int, device: torch.device) -> None:
        super().__init__(index, device, f"{device} (worker {index})", deque(), threading.Lock())
        self.worker: LocalWorker | RayWorker | None = None
        self.model: Packed | None = None
        self.prepare: bytes | None = None
        self.has_answered = False
        self.flying: deque[Request] = deque()


class WorkerLanes:
    """The workers of one block, and the messages to them. Thread-safe.

    If a worker dies, its message is sent `retries` more times.
    """

    def __init__(self, workers: LocalWorkers | RayWorkers, retries: int) -> None:
        self.all = tuple(WorkerLane(index, device) for index, device in enumerate(workers.devices))
        self.retries = retries
        self.each_ns: float | None = None  # that a whole call takes: the average of the last messages
        self._process = os.getpid()
        self._workers = workers
        self._numbers = count(1)  # of the workers: each has its own random numbers
        self._changed = threading.Condition(threading.RLock())  # of everything below; notified after each answer
        self._is_started = False
        self._has_reader = False
        self._receiver: threading.Thread | None = None
        self._backlog: deque[Request] = deque()
        self._ended: deque[Request] = deque()  # their callbacks have not run yet
        self._is_over = False

    @property
    def are_here(self) -> bool:
        """False in a forked child of the process that made the lanes."""
        return self._process == os.getpid()

    def is_idle(self) -> bool:
        """True if no message waits for an answer."""
        return not (self._backlog or any(lane.flying for lane in self.all))

    @property
    def wants_more(self) -> bool:
        """True if a worker would get the next message at once."""
        return not self._backlog and any(len(lane.flying) < _AHEAD for lane in self.all)

    def start(self) -> None:
        """Start all workers, if they were not started.

        Raises:
            LaunchError: If a worker cannot be started.
            SessionError: If the lanes have ended.
        """
        with self._changed:
            for lane in () if self._is_started else self.all:
                if lane.worker is None:
                    self._start(lane)
            self._is_started = True

    def post(self, request: Request) -> None:
        """Send a message to the first lane with room. Parts of a cut call come before whole calls.

        Raises:
            SessionError: If the lanes have ended.
        """
        with self._changed:
            if self._is_over:
                raise _end_error()
            if request.form.is_whole:
                self._backlog.append(request)
            else:
                self._backlog.appendleft(request)
            self._send_waiting()
        self._end_requests()

    def wait(self, is_done: Callable[[], bool]) -> None:
        """Wait until `is_done`. One of the threads that wait receives for all."""
        while True:
            with self._changed:
                while (self._has_reader or self._is_over) and not is_done():
                    self._changed.wait()
                if is_done():
                    return
                self._has_reader = True
            self._receive(None)

    def look(self) -> None:
        """Receive what has arrived, without waiting. A forked child has no workers."""
        if not self.are_here:
            return
        with self._changed:
            if self._has_reader or self._is_over or not any(lane.flying for lane in self.all):
                return
            self._has_reader = True
        self._receive(0.0)

    def receive(self) -> None:
        """Receive in a thread, which ends once no message waits for an answer."""
        with self._changed:
            if self._receiver is None:
                self._receiver = threading.Thread(target=self._receive_until_idle, name="parawrap-lanes", daemon=True)
                self._receiver.start()

    def end(self) -> None:
        """End the workers. What they have not answered fails. May be called again."""
        if not self.are_here:
            return
        self._is_over = True
        self._workers.end()  # a thread that waits for their start raises
        working = [(lane.worker, bool(lane.flying)) for lane in self.all if lane.worker is not None]
        for worker, is_busy in working:
            worker.stop(at_once=is_busy)
        for worker, _ in working:
            worker.join()
        with self._changed:
            for lane in self.all:
                self._backlog += lane.flying
                lane.flying.clear()
                lane.worker = lane.model = None
            for request in self._backlog:
                self._fail(request, _end_error())
            self._backlog.clear()
            self._workers.end()  # also what that thread has reserved meanwhile
            self._changed.notify_all()
        self._end_requests()

    # -- sending

    def _send_waiting(self) -> None:
        """Send what waits to lanes with room."""
        while self._backlog:
            lane = min(self.all, key=lambda lane: len(lane.flying))
            if len(lane.flying) >= _AHEAD:
                return
            request = self._backlog.popleft()
            if request.lane is not None or any(call.begin() for call in request.calls):
                self._send(lane, request)

    def _start(self, lane: WorkerLane) -> LocalWorker | RayWorker:
        seed = (torch.initial_seed() + next(self._numbers)) % SEEDS
        lane.worker = worker = self._workers.start(lane.index, seed)
        lane.model, lane.prepare, lane.has_answered = None, None, False
        if self._is_over:  # `end` in another thread may have missed it
            worker.stop(at_once=True)
            raise _end_error()
        return worker

    def _send(self, lane: WorkerLane, request: Request) -> None:
        request.lane, request.was_sent, form = lane, False, request.form
        lane.flying.append(request)
        try:
            worker = lane.worker or self._start(lane)
            is_known = form.prepare is not None and form.prepare is lane.prepare
            body = form._replace(prepare=b"" if is_known else form.prepare, model=None)
            worker.send((tuple(body), request.items), request.packer, None if form.model is lane.model else form.model)
            lane.model, lane.prepare = form.model, form.prepare or lane.prepare
            request.was_sent = True
        except ConnectionError:
            pass  # the thread that receives sends it to the next worker
        except Exception as error:  # noqa: BLE001 (the reader gets it)
            lane.flying.remove(request)
            self._fail(request, error.with_traceback(None))  # its frames refer to the request
        except BaseException:  # Ctrl-C, perhaps before a part of the message was noted
            if lane.worker is not None:
                lane.worker.stop(at_once=True)
            raise

    # -- receiving

    def _receive(self, timeout_s: float | None) -> None:
        """Take the answers that arrive, and send what waits. Let another thread be the reader afterwards."""
        try:
            lanes = [(lane, lane.worker) for lane in self.all if lane.worker is not None]
            if not lanes:
                raise _end_error()
            found = self._workers.poll([worker for _, worker in lanes], timeout_s)
            with self._changed:
                for position in found:
                    self._take_answer(*lanes[position])
                self._send_waiting()
            self._end_requests()
        finally:
            with self._changed:
                self._has_reader = False
                self._changed.notify_all()

    def _take_answer(self, lane: WorkerLane, worker: LocalWorker | RayWorker) -> None:
        try:
            received = worker.receive()
            if received is None:
                if not self._is_over:
                    self._bury(lane, worker)
                return
            request = lane.flying.popleft()
            if not request.is_done:
                request.answers, request.block = received
                lane.has_answered = True
                lane.tasks += len(request.calls)
                took_ns = sum(end - start for *_, start, end in request.answers)
                lane.busy_ns += took_ns
                if request.form.is_whole:
                    each_ns = took_ns / len(request.calls)
                    self.each_ns = each_ns if self.each_ns is None else self.each_ns + (each_ns - self.each_ns) / 4
                self._ended.append(request)
        except BaseException:  # Ctrl-C, perhaps between an answer and its request
            worker.stop(at_once=True)
            raise

    def _end_requests(self) -> None:
        """Tell those who wait for requests that ended. Callbacks of futures must not wait for lanes."""
        before = here.lane
        while self._ended:
            try:
                request = self._ended.popleft()
            except IndexError:  # another thread was quicker
                return
            here.lane = request.lane or self.all[0]
            try:
                for call in request.calls:
                    call.end()
            finally:
                here.lane = before
            request.calls = []  # they refer to the request, and a cycle would keep the memory of their outputs
            del request

    def _receive_until_idle(self) -> None:
        while True:
            with suppress(BaseException):  # the requests that failed have the error
                self.wait(self.is_idle)
            with self._changed:
                if self.is_idle():
                    self._receiver = None
                    return

    def _fail(self, request: Request, error: BaseException) -> None:
        if not request.is_done:
            request.failure = error
            self._ended.append(request)

    def _bury(self, lane: WorkerLane, worker: LocalWorker | RayWorker) -> None:
        """Send again what a dead worker has not answered, before everything else.

        Its oldest message counts the death. A worker that has answered nothing may have died before it could be sent one.
        """
        error = worker.death()
        lost = [request for request in lane.flying if not request.is_done]
        lane.flying.clear()
        lane.worker = None
        if lost and (lost[0].was_sent or not lane.has_answered):
            lost[:1] = self._count_death(lost[0], error)
        self._backlog.extendleft(reversed(lost))

    def _count_death(self, request: Request, error: BaseException) -> list[Request]:
        """Return what to send again: nothing after too many deaths, and the calls of a chunk alone."""
        request.deaths += 1
        calls = request.calls
        if request.deaths > self.retries:
            what = "this call" if len(calls) == 1 else f"this call or others of its chunk of {len(calls)}"
            add_note(error, f"{request.deaths} workers ended while they ran {what}. Other calls continue")
            self._fail(request, error)
            return []
        if len(calls) == 1:
            return [request]
        found = [Request(request.form, request.packer) for _ in calls]
        for call, alone in zip(calls, found, strict=True):
            alone.items, alone.calls = [request.items[call.place]], [call]
            alone.deaths, alone.lane = request.deaths, request.lane
            call.request, call.place = alone, 0
        return found


def _end_error() -> SessionError:
    return SessionError("the lanes are closed: the block ended before this call, and its workers are gone")
