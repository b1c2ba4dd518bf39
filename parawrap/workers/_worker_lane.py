"""The lane of one worker: its requests in order, and the thread that receives the answers.

Guarantees:

- A worker answers its requests in the order of sending. Any number of threads may send.
- The lane's thread receives the answers. If the worker ends, the thread starts another one, gives it the model, and sends
  the unanswered requests again. Only the oldest of them was running, so only that one counts the death.
- Each request ends once: with the worker's answer, or with an error.
- After `end` and `join`, the process and the thread are gone.
"""

from __future__ import annotations

import copy
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import count
from operator import attrgetter
from typing import Any, NamedTuple, NoReturn, Protocol

import torch

from parawrap.engine.call import Lane, here
from parawrap.engine.device_streams import LaneFuture
from parawrap.errors import ParawrapError, SessionError, UnsendableError, add_note
from parawrap.processes.pickling import unpack

__all__ = ["Answer", "Backlog", "ModelFile", "Request", "Worker", "WorkerLane", "raise_from_worker"]

_AHEAD = 2  # requests per worker, so that the next one has arrived when an answer leaves
_load = attrgetter("load")


class Answer(NamedTuple):
    """The answer to a request. `start` and `end` are when the worker was busy, as ``perf_counter_ns``.

    `read` returns the value, or raises what the request raised. Call it before the next answer is received.
    """

    number: int
    start: int
    end: int
    read: Callable[[], Any]


class ModelFile:
    """An open file with a pickled model. A change of the model makes another one."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class Worker(Protocol):
    """A process that answers requests in the order of sending. One thread sends at a time, and one thread receives."""

    label: str
    function: int  # the number of the last function that was sent

    @abstractmethod
    def send_model(self, number: int, file: ModelFile) -> None:
        """Send a pickled model. Raises like `send`."""

    @abstractmethod
    def send(self, number: int, word: str, value: Any, address: str) -> None:
        """Send a request. Raises ConnectionError if the process has ended; nothing is sent if it raises another error."""

    @abstractmethod
    def receive(self) -> Answer | None:
        """Wait for the next answer; None if the process has ended."""

    @abstractmethod
    def death(self) -> ParawrapError:
        """Wait for the end of the process, and return the error that says how it ended."""

    @abstractmethod
    def interrupt(self) -> None:
        """End the thread that receives, and let the process end."""

    @abstractmethod
    def close(self, *, at_once: bool = True) -> None:
        """End the process, and wait for its end. Unless `at_once`, an idle process gets time to exit on its own."""


class Request(ABC):
    """A request to a worker. `future` gets the result. Errors of a whole call get a note on the lane.

    While a trace is open, `record` takes the lane's index, the start and end of the work, and the error if it raised.
    """

    is_whole = False
    __slots__ = ("deaths", "future", "number", "record", "was_sent")

    def __init__(self) -> None:
        self.number = 0
        self.deaths = 0
        self.was_sent = False  # to the worker of now
        self.future = LaneFuture()
        self.record: Callable[[int, int, int, BaseException | None], None] | None = None

    @property
    def calls(self) -> int:
        """The number of calls in it."""
        return 0

    def parts(self) -> Sequence[Request]:
        """The requests that can be sent one by one in its place."""
        return (self,)

    def start(self) -> bool:
        """Note that it is sent; False if it was cancelled."""
        return self.future.set_running_or_notify_cancel()

    def cancel(self) -> None:
        """Cancel it before it is sent."""
        if self.future.cancel():
            self.future.set_running_or_notify_cancel()

    def fail(self, error: BaseException) -> None:
        """End it with an error."""
        self.future.set_exception(error)

    @abstractmethod
    def send(self, worker: Worker) -> None:
        """Send the request to a worker, with its number."""

    @abstractmethod
    def result(self, answer: Answer, lane: Lane) -> Any:
        """Return the result of an answer, or raise its exception. Runs in the lane's thread."""

    def finish(self, answer: Answer, lane: WorkerLane) -> None:
        """Set the result or the exception of the future."""
        try:
            value = self.result(answer, lane)
        except BaseException as error:  # noqa: BLE001 (the reader of the future gets it)
            if self.record is not None:
                self.record(lane.index, answer.start, answer.end, error)
            if self.is_whole:
                add_note(error, f"in {lane}")
            self.future.set_exception(error.with_traceback(None))  # its frames refer to the future
        else:
            if self.record is not None:
                self.record(lane.index, answer.start, answer.end, None)
            self.future.set_result(value)


class Backlog:
    """The calls that wait for a lane with room, and the loads of the lanes. Thread-safe."""

    def __init__(self) -> None:
        self._gate = threading.Lock()
        self._requests: deque[Request] = deque()

    def requests(self) -> list[Request]:
        """Return the calls that wait."""
        with self._gate:
            return list(self._requests)

    def count(self, lane: WorkerLane, change: int = 1) -> None:
        """Count a request for a lane."""
        with self._gate:
            lane.load += change

    def place(self, request: Request, lanes: Sequence[WorkerLane]) -> WorkerLane | None:
        """Return the lane with the fewest requests, and count the request there. If no lane has room, keep the request."""
        with self._gate:
            lane = min(lanes, key=_load)
            if lane.load >= _AHEAD:
                self._requests.append(request)
                return None
            lane.load += 1
            return lane

    def next_for(self, lane: WorkerLane) -> Request | None:
        """Return the next call for a lane that has ended a request."""
        with self._gate:
            while self._requests and lane.load <= _AHEAD:
                request = self._requests.popleft()
                if request.start():
                    return request
            lane.load -= 1
            return None

    def drop(self) -> None:
        """Cancel the calls that wait."""
        with self._gate:
            dropped = list(self._requests)
            self._requests.clear()
        for request in dropped:
            request.cancel()


class WorkerLane(Lane):
    """One worker, and the requests that it has not answered yet. Thread-safe.

    `start_worker` starts a process. `install` gives it the model, and returns its process id. `load` is the number of
    requests for this lane, which `backlog` counts. If the lane `is_over`, it does not replace its worker any more. The
    thread refers to the lane and not to the pool, so that an abandoned pool can be collected.
    """

    def __init__(
        self,
        index: int,
        device: torch.device,
        start_worker: Callable[[int], Worker],
        install: Callable[[Worker], int],
        retries: int,
        backlog: Backlog,
    ) -> None:
        super().__init__(index, device, f"{device} (worker {index})")
        self.load = 0
        self.backlog = backlog
        self.pid = 0
        self._start_worker = start_worker
        self._install = install
        self._retries = retries
        self._sending = threading.Lock()
        self._unanswered: deque[Request] = deque()
        self._numbers = count(1)
        self._worker: Worker | None = None
        self._is_ready = False  # the worker has the model, and no connection error was seen
        self._is_installed = False  # the worker has the model
        self.is_over = False
        self._failure: BaseException | None = None  # that ended the thread

    @property
    def unanswered(self) -> list[Request]:
        """The requests without an answer."""
        return list(self._unanswered)

    def begin(self) -> Future[None]:
        """Start the thread and the worker. Return a future that is done when the worker has the model."""
        ready: Future[None] = Future()
        self.thread = threading.Thread(target=self._run, args=(ready,), name=f"parawrap-{self}", daemon=True)
        self.thread.start()
        return ready

    def post(self, request: Request) -> None:
        """Send a request that was counted for this lane.

        Raises:
            UnsendableError: If the value cannot be pickled. Nothing is sent then.
            SessionError: If the lane has ended, or memory lacks room for the tensors of the value.
        """
        try:
            self._post(request)
            return
        except UnsendableError:
            if len(request.parts()) == 1:
                raise
        self.post_parts(request)  # so that only the parts that cannot be pickled fail

    def post_parts(self, request: Request) -> None:
        """Send the parts of a request one by one in its place. An error of the sending ends that part."""
        for part in request.parts():
            self.backlog.count(self)
            try:
                self._post(part)
            except Exception as error:  # noqa: BLE001 (the reader of the future gets it)
                part.fail(_drop_frames(error))

    def _post(self, request: Request) -> None:
        try:
            with self._sending:
                if self.is_over or self.thread is None:
                    raise self._failure or _make_end_error()
                request.number = next(self._numbers)
                self._unanswered.append(request)
                if self._is_ready:
                    self._send(request)
        except BaseException as error:
            if request in self._unanswered:
                self._unanswered.remove(request)
            if not isinstance(error, Exception) and self._worker is not None:
                self._worker.interrupt()  # Ctrl-C, perhaps in the middle of a message
            self.backlog.count(self, -1)
            raise

    def end(self) -> None:
        """End the worker, also in the middle of a request, which then fails with SessionError."""
        worker = self._worker  # the thread drops it
        self.is_over = True
        if worker is not None:
            worker.close(at_once=bool(self._unanswered))

    def join(self, timeout: float | None = None) -> None:
        """Wait for the thread, unless it is the calling one."""
        thread = self.thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def _send(self, request: Request) -> None:
        assert self._worker is not None
        request.was_sent = False
        try:
            request.send(self._worker)
            request.was_sent = True
        except ConnectionError:
            self._is_ready = False  # the lane's thread sends the request to the next worker

    def _run(self, ready: Future[None]) -> None:
        """Serve the lane, in its thread."""
        here.lane = self  # callbacks of futures run in this thread, and must not wait for lanes
        try:
            while self._replace_worker():
                if not ready.done():
                    ready.set_result(None)
                self._receive_all()
            failure: BaseException = _make_end_error()
        except BaseException as error:  # noqa: BLE001 (the callers get it)
            failure = error
        self._give_up(failure)
        if not ready.done():
            ready.set_exception(failure)
        del failure, ready

    def _receive_all(self) -> None:
        """Receive answers until the worker ends."""
        assert self._worker is not None
        receive = self._worker.receive
        while (answer := receive()) is not None:
            request = self._unanswered.popleft()
            while request.number != answer.number:  # the sending of this request was interrupted
                request.fail(_make_end_error())
                self._take_next()
                request = self._unanswered.popleft()
            if request.calls:
                self.tasks += request.calls
                self.busy_ns += answer.end - answer.start
            self._take_next()
            request.finish(answer, self)
            del request, answer  # a waiting lane keeps nothing of its last call alive

    def _take_next(self) -> None:
        """Send the next call of the backlog, in the place of a request that has ended."""
        while (request := self.backlog.next_for(self)) is not None:
            try:
                self.post(request)
            except Exception as error:  # noqa: BLE001 (the reader of the future gets it)
                self.backlog.count(self)  # for the call after this one
                request.fail(_drop_frames(error))
            else:
                return

    def _replace_worker(self) -> bool:
        """Start a worker, or another one in the place of a worker that ended. False if the lane is over."""
        deaths = 0
        while not self.is_over:
            with self._sending:
                self._is_ready = False
            if self._worker is not None:
                error = self._worker.death()
                if self.is_over:
                    break
                if self._is_installed:
                    self._note_death(error)
                else:
                    deaths += 1
                    if deaths > self._retries:
                        raise error
                del error
            self._is_installed = False
            self._worker = self._start_worker(self.index)
            if self.is_over:  # `end` may not have seen this worker
                self._worker.close()
                break
            if self._set_up():
                return True
        return False

    def _set_up(self) -> bool:
        """Give a new worker the model and the unanswered requests. False if it ended."""
        assert self._worker is not None
        try:
            self.pid = self._install(self._worker)
        except ConnectionError:
            return False
        self._is_installed = True
        with self._sending:
            self._is_ready = True
            for request in list(self._unanswered):
                self._send(request)
        return True

    def _note_death(self, error: BaseException) -> None:
        """Count a death for every part of the request that ran. Parts with one too many fail, and others are sent alone."""
        if not self._unanswered or not self._unanswered[0].was_sent:
            return
        request = self._unanswered[0]
        parts = request.parts()
        self.backlog.count(self, len(parts) - 1)
        left = []
        for part in parts:
            part.deaths += 1
            if part.deaths <= self._retries:
                left.append(part)
                part.number = next(self._numbers)
                continue
            self._take_next()
            what = "this call" if len(parts) == 1 else f"this call or others of its chunk of {len(parts)}"
            failure = copy.copy(error)
            failure.__notes__ = [*getattr(error, "__notes__", ())]
            add_note(failure, f"in {self}. {part.deaths} workers ended while they ran {what}. Other calls continue")
            part.fail(failure)
        if left != [request]:
            self._unanswered.extendleft(reversed(left))  # before the removal: `unanswered` may be read meanwhile
            self._unanswered.remove(request)

    def _give_up(self, error: BaseException) -> None:
        """Fail all requests. A later `begin` starts again unless the lane is over."""
        if self._worker is not None and not self.is_over:  # otherwise `end` closes it
            self._worker.close()
        with self._sending:
            self._worker = self.thread = None
            self._is_ready = False
            left = list(self._unanswered)
            self._unanswered.clear()
        add_note(error, f"in {self}")
        self._failure = None if self.is_over else error
        for request in left:
            self._take_next()
            request.fail(error)


def raise_from_worker(packed: bytes, traceback: str, label: str) -> NoReturn:
    """Raise an exception that a request raised in a worker."""
    error = unpack(memoryview(bytearray(packed)))
    add_note(error, f"raised in {label}, with this traceback:\n{traceback}")
    raise error


def _drop_frames(error: Exception) -> Exception:
    """Drop the tracebacks of an error of the sending, and of its causes: their frames refer to the future of the error."""
    each: BaseException | None = error
    while each is not None:
        each.__traceback__ = None
        each = each.__cause__ or each.__context__
    return error


def _make_end_error() -> SessionError:
    return SessionError("the block ended before this call: its workers are gone")
