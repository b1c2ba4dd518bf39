"""The lanes of a block in other processes.

::

    callers ──► backlog ──► worker 0 (at most two messages) ──► the caller that waits, which receives for all
                       └──► worker 1

Guarantees:

- A worker answers its messages in the order of sending, and each call ends once: with its answer, or with an error.
- No thread belongs to a lane. Whoever waits for an answer receives all answers, and sends what waits. Futures of `submit`
  have one thread, as long as one of them is open.
- If a worker ends, the thread that receives starts another one, gives it the model, and sends its messages again. Only the
  oldest of them ran, so only that one counts the death.
- After `close`, no process is left.
"""

from __future__ import annotations

import copy
import threading
import warnings
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from itertools import count
from typing import Any, NamedTuple, Protocol

import torch

from parawrap.engine.call import Lane, here
from parawrap.errors import ParawrapError, SessionError, add_note
from parawrap.processes.pickling import Packed, unpack
from parawrap.workers.packing import Block, Packer, restore
from parawrap.workers.worker import Answer, Calls, SentWarning
from parawrap.workers.writes import write_back

AHEAD = 2  # messages per worker, so that the next one has arrived when an answer leaves
_given_warnings: dict[str, dict[Any, Any]] = {}  # by file: "once per line" holds for all workers together


class Reply(NamedTuple):
    """The answer to a message: its body, the block that the items lie in, and the start and end of the work."""

    body: Any
    block: Block
    start: int
    end: int


class Worker(Protocol):
    """A process that answers messages in the order of sending. One thread at a time uses it."""

    function: int  # the number of the last function that was sent

    @abstractmethod
    def send(self, body: tuple[Any, ...], packer: Packer) -> None:
        """Send calls. Raises ConnectionError if the process has ended; nothing is sent if it raises another error."""

    @abstractmethod
    def send_model(self, model: Packed | bytes) -> None:
        """Send a model, or a pickled call that builds it. The reply has the process id. Raises like `send`."""

    @abstractmethod
    def receive(self) -> Reply | BaseException | None:
        """Wait for the next reply, or the exception of a model that cannot be made; None if the process has ended."""

    @abstractmethod
    def death(self) -> ParawrapError:
        """Wait for the end of the process, and return the error that says how it ended."""

    @abstractmethod
    def close(self, *, at_once: bool = True) -> None:
        """End the process, and wait for its end. Unless `at_once`, an idle process gets time to exit on its own."""


class Workers(Protocol):
    """Starts the workers of one block, and waits for them."""

    devices: Sequence[torch.device]

    @abstractmethod
    def start(self, lane: int) -> Worker:
        """Start the worker of a lane."""

    @abstractmethod
    def poll(self, workers: Sequence[Worker], timeout_s: float | None) -> Collection[int]:
        """Wait until a worker has answered or ended, and return the positions of such workers."""

    @abstractmethod
    def end(self) -> None:
        """Release what the workers share. May be called again."""


class Form(NamedTuple):
    """The common part of the calls of a message. `prepare` is a number and a pickled function."""

    modes: bytes
    is_inference: bool
    method: str | None = None
    prepare: tuple[int, bytes] | None = None
    is_whole: bool = True


class Call:
    """A call in a message. `place` is its position there; `request` changes if the call is sent again alone."""

    __slots__ = ("args", "kwargs", "place", "record", "request")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        self.args = args
        self.kwargs = kwargs
        self.place = 0
        self.request: Request | None = None
        self.record: Callable[..., None] | None = None  # takes the lane, start, end, and error of a call that is traced

    def pack(self, packer: Packer) -> tuple[Any, bool]:
        """Add the arguments to a message. Return their item, and True if it has keyword arguments.

        Raises:
            UnsendableError: If an argument cannot be pickled.
        """
        if self.kwargs:
            return packer.add({"args": self.args, "kwargs": self.kwargs}, ""), True
        return packer.add(self.args, "args"), False

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
        lane, reply = request.lane, request.reply
        try:
            if reply is None:
                assert request.failure is not None
                raise _copy_of(request.failure)
            answer = Answer(*reply.body[self.place])
            warned: list[SentWarning] = [] if answer.warned is None else unpack(memoryview(bytearray(answer.warned)))
            for each in warned:
                warnings.warn_explicit(*each, registry=_given_warnings.setdefault(each.filename, {}))
            if answer.error is not None:
                raise error_from_worker(*answer.error, str(lane))
            with _in_mode(request.form.is_inference):
                if answer.written is not None:
                    write_back(restore(answer.written, reply.block), self.args, self.kwargs or {})
                return restore(answer.output, reply.block)
        except BaseException as error:
            if request.form.is_whole and lane is not None:
                add_note(error, f"in {lane}")
            raise
        finally:
            self._record_span(lane, reply)

    def _record_span(self, lane: WorkerLane | None, reply: Reply | None) -> None:
        if self.record is None or lane is None or reply is None:
            return
        answer = Answer(*reply.body[self.place])
        error = None if answer.error is None else unpack(memoryview(bytearray(answer.error[0])))
        self.record(lane.index, answer.start, answer.end, error)


class Request:
    """A message to a worker. `on_end` is called once its calls have ended, in the thread that receives."""

    __slots__ = ("calls", "deaths", "failure", "form", "items", "lane", "on_end", "packer", "reply", "was_sent")

    def __init__(
        self, calls: list[Call], form: Form, on_end: Callable[[Request], None] | None = None, packer: Packer | None = None
    ) -> None:
        self.calls = calls
        self.form = form
        self.on_end = on_end
        self.packer = packer
        self.items: list[tuple[Any, bool]] = []
        self.lane: WorkerLane | None = None
        self.reply: Reply | None = None
        self.failure: BaseException | None = None
        self.deaths = 0
        self.was_sent = False  # to the worker of now

    @property
    def is_done(self) -> bool:
        return self.reply is not None or self.failure is not None

    def start(self) -> bool:
        """Note that it is about to be sent; False if it was cancelled."""
        return True

    def pack(self) -> None:
        """Pack the calls from their arguments. Raises UnsendableError."""
        self.packer = Packer()
        self.items = [call.pack(self.packer) for call in self.calls]

    def send(self, worker: Worker) -> None:
        """Send the message to a worker. Raises as `Worker.send` does."""
        if self.packer is None:
            self.pack()
        assert self.packer is not None
        form, prepare = self.form, None
        if form.prepare is not None:
            number, pickled = form.prepare
            prepare = number, None if worker.function == number else pickled
        worker.send(tuple(Calls(form.modes, form.method, prepare, form.is_whole, self.items)), self.packer)
        if form.prepare is not None:
            worker.function = form.prepare[0]

    def note_reply(self, reply: Reply) -> None:
        """Take the answers."""
        lane = self.lane
        assert lane is not None
        lane.tasks += len(self.calls)
        lane.busy_ns += reply.end - reply.start
        self.reply, self.packer = reply, None


class ModelRequest(Request):
    """The whole model."""

    __slots__ = ("_model",)

    def __init__(self, model: Packed | bytes) -> None:
        super().__init__([], Form(b"", is_inference=False))
        self._model = model

    def send(self, worker: Worker) -> None:
        worker.send_model(self._model)

    def note_reply(self, reply: Reply) -> None:
        self.reply = reply


class WorkerLane(Lane):
    """One worker, the messages that it has not answered, and those that only it may get."""

    def __init__(self, index: int, device: torch.device) -> None:
        super().__init__(index, device, f"{device} (worker {index})")
        self.worker: Worker | None = None
        self.flying: deque[Request] = deque()
        self.queue: deque[Request] = deque()


class Lanes:
    """The workers of one block, and the messages to them. Thread-safe.

    `model` returns the packed model for a new worker. If a worker dies, its message is sent `retries` more times.
    """

    def __init__(self, workers: Workers, model: Callable[[], Packed | bytes], retries: int) -> None:
        self.all = tuple(WorkerLane(index, device) for index, device in enumerate(workers.devices))
        self.retries = retries
        self._open_futures = 0
        self._workers = workers
        self._model = model
        self._changed = threading.Condition(threading.RLock())  # of everything below; notified after each reply
        self._has_reader = False
        self._followers = 0
        self._receiver: threading.Thread | None = None
        self._backlog: deque[Request] = deque()
        self._ended: list[Request] = []  # their `on_end` is due
        self._is_over = False
        self._failure: BaseException | None = None  # of the last start of a worker

    @property
    def are_started(self) -> bool:
        return self.all[0].worker is not None

    @property
    def is_idle(self) -> bool:
        """True if no message waits for an answer."""
        return not (self._backlog or self._ended or any(lane.flying or lane.queue for lane in self.all))

    @property
    def wants_more(self) -> bool:
        """True if a worker would get the next message at once."""
        return not self._backlog and any(len(lane.flying) + len(lane.queue) < AHEAD for lane in self.all)

    def start(self) -> None:
        """Start all workers, and give them the model.

        Raises:
            RankDiedError: If a worker ends more than `retries` times while it starts.
            Exception: What the model raises when it is made in the worker.
        """
        with self._changed:
            if self._is_over:
                raise _end_error()
            try:
                for lane in self.all:
                    lane.worker = self._workers.start(lane.index)
                for lane in self.all:
                    self._install(lane)
            except BaseException:
                for lane in self.all:
                    if lane.worker is not None:
                        lane.worker.close()
                        lane.worker = None
                raise

    def post(self, request: Request, lane: WorkerLane | None = None) -> None:
        """Send a message to a lane, or to the first lane with room.

        Raises:
            SessionError: If the lanes have ended.
        """
        with self._changed:
            if self._is_over or not self.are_started:
                raise self._failure or _end_error()
            (self._backlog if lane is None else lane.queue).append(request)
            self._send_waiting()
        if self._ended:
            self._end_requests()

    def wait(self, is_done: Callable[[], bool]) -> None:
        """Wait until `is_done`. One of the threads that wait receives for all."""
        while True:
            with self._changed:
                while self._has_reader and not is_done():
                    self._followers += 1
                    try:
                        self._changed.wait()
                    finally:
                        self._followers -= 1
                if is_done():
                    return
                self._has_reader = True
            self._receive_for_all(None)

    def look(self) -> None:
        """Receive what has arrived, without waiting."""
        with self._changed:
            if self._has_reader or not self.are_started:
                return
            self._has_reader = True
        self._receive_for_all(0.0)

    def receive_for(self, future: Future[Any]) -> None:
        """Receive for a future in a thread, which ends once no such future is open."""
        with self._changed:
            self._open_futures += 1
        future.add_done_callback(self._count_end)
        with self._changed:
            if self._receiver is None and self._open_futures:
                self._receiver = threading.Thread(target=self._serve_futures, name="parawrap-lanes", daemon=True)
                self._receiver.start()

    def end(self) -> None:
        """End the workers. What they have not answered fails."""
        self._is_over = True  # a lane that is being replaced looks here
        working = [lane for lane in self.all if lane.worker is not None]
        closing = [
            threading.Thread(target=lane.worker.close, kwargs={"at_once": bool(lane.flying)}, name="parawrap-end")
            for lane in working
            if lane.worker is not None
        ]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()
        with self._changed:
            for lane in self.all:
                for request in (*lane.flying, *lane.queue):
                    self._fail(request, _end_error())
                lane.flying.clear()
                lane.queue.clear()
                lane.worker = None
            for request in self._backlog:
                self._fail(request, _end_error())
            self._backlog.clear()
            self._changed.notify_all()
        self._end_requests()

    # -- sending and receiving

    def _send_waiting(self) -> None:
        """Send what waits to lanes with room."""
        for lane in self.all:
            while lane.queue and len(lane.flying) < AHEAD:
                self._send(lane, lane.queue.popleft())
        while self._backlog:
            lane = min(self.all, key=_load)
            if _load(lane) >= AHEAD:
                return
            request = self._backlog.popleft()
            if request.start():
                self._send(lane, request)

    def _send(self, lane: WorkerLane, request: Request) -> None:
        assert lane.worker is not None
        request.lane, request.was_sent = lane, False
        lane.flying.append(request)
        try:
            request.send(lane.worker)
            request.was_sent = True
        except ConnectionError:
            pass  # the thread that receives sends it to the next worker
        except Exception as error:  # noqa: BLE001 (the reader gets it)
            lane.flying.remove(request)
            self._fail(request, _without_frames(error))
        except BaseException:  # Ctrl-C, perhaps in the middle of a message
            lane.worker.close()
            raise

    def _receive_for_all(self, timeout_s: float | None) -> None:
        """Receive as the only reader, and let another thread be it afterwards."""
        try:
            self._receive(timeout_s)
        finally:
            with self._changed:
                self._has_reader = False
                if self._followers:
                    self._changed.notify_all()

    def _receive(self, timeout_s: float | None) -> None:
        """Take the replies that arrive, and send what waits."""
        lanes = [lane for lane in self.all if lane.worker is not None]
        if not lanes:
            raise _end_error()
        found = self._workers.poll([lane.worker for lane in lanes if lane.worker is not None], timeout_s)
        with self._changed:
            for position in found:
                self._take_reply(lanes[position])
            self._send_waiting()
        if self._ended:
            self._end_requests()

    def _take_reply(self, lane: WorkerLane) -> None:
        worker = lane.worker
        if worker is None:
            return
        try:
            reply = worker.receive()
            if reply is None:
                if not self._is_over:
                    self._replace(lane)
                return
            request = lane.flying[0]
            if isinstance(reply, BaseException):
                self._fail(request, reply)
            elif not request.is_done:
                request.note_reply(reply)
                self._ended.append(request)
            lane.flying.popleft()
        except BaseException:  # Ctrl-C, perhaps between a message and its reply
            worker.close()
            raise

    def _end_requests(self) -> None:
        """Tell those who wait for requests that ended. Callbacks of futures must not wait for lanes."""
        before = here.lane
        while self._ended:
            try:
                request = self._ended.pop(0)
            except IndexError:  # another thread was quicker
                return
            if request.on_end is not None:
                here.lane = request.lane or self.all[0]
                try:
                    request.on_end(request)
                finally:
                    here.lane = before
            request.calls = []  # they refer to the request, and a cycle would keep the memory of their outputs
            del request

    def _serve_futures(self) -> None:
        while True:
            with suppress(BaseException):  # the requests that failed have the error
                self.wait(self._has_no_future)
            with self._changed:
                if not self._open_futures:
                    self._receiver = None
                    return

    def _has_no_future(self) -> bool:
        return not self._open_futures

    def _count_end(self, _: Future[Any]) -> None:
        with self._changed:
            self._open_futures -= 1
            self._changed.notify_all()

    def _fail(self, request: Request, error: BaseException) -> None:
        if not request.is_done:
            request.failure = error
            self._ended.append(request)

    # -- the lives of workers

    def _install(self, lane: WorkerLane) -> None:
        """Give a new worker the model. If the worker ends, start another one, at most `retries` times."""
        for deaths in count(1):
            worker = lane.worker
            assert worker is not None
            try:
                worker.send_model(self._model())
                reply = worker.receive()
            except ConnectionError:
                reply = None
            if isinstance(reply, BaseException):
                raise reply
            if reply is not None:
                return
            error = worker.death()
            if self._is_over:
                raise _end_error()
            if deaths > self.retries:
                add_note(error, f"in {lane}")
                raise error
            lane.worker = self._workers.start(lane.index)

    def _replace(self, lane: WorkerLane) -> None:
        """Start another worker in the place of one that ended, and send it what is unanswered."""
        assert lane.worker is not None
        self._note_death(lane, lane.worker.death())
        try:
            lane.worker = self._workers.start(lane.index)
            self._install(lane)
        except BaseException as error:
            for request in lane.flying:
                self._fail(request, error)
            lane.flying.clear()
            if lane.worker is not None:
                lane.worker.close()
            self._failure = error
            if isinstance(error, Exception):
                return
            raise
        again = [request for request in lane.flying if not request.is_done]
        lane.flying.clear()
        for request in again:
            request.packer = None  # the worker that died may have written its memory
        lane.queue.extendleft(reversed(again))

    def _note_death(self, lane: WorkerLane, error: BaseException) -> None:
        """Count a death for every call of the message that ran. Calls with one too many fail, and others are sent alone."""
        while lane.flying and lane.flying[0].is_done:  # Ctrl-C came just after its reply
            lane.flying.popleft()
        if not lane.flying or not lane.flying[0].was_sent:
            return
        request = lane.flying[0]
        request.deaths += 1
        calls = request.calls
        if request.deaths > self.retries:
            lane.flying.popleft()
            what = "this call" if len(calls) == 1 else f"this call or others of its chunk of {len(calls)}"
            failure = _copy_of(error)
            add_note(failure, f"{request.deaths} workers ended while they ran {what}. Other calls continue")
            self._fail(request, failure)
        elif len(calls) > 1:
            lane.flying.popleft()
            alone = [Request([call], request.form, request.on_end) for call in calls]
            for call, each in zip(calls, alone, strict=True):
                call.request, call.place, each.deaths, each.lane = each, 0, request.deaths, lane
            lane.flying.extendleft(reversed(alone))


def _load(lane: WorkerLane) -> int:
    return len(lane.flying) + len(lane.queue)


def _in_mode(is_inference: bool) -> Any:
    """Return a context for making tensors like those of the plain call."""
    same = torch.is_inference_mode_enabled() == is_inference
    return nullcontext() if same else torch.inference_mode(is_inference)


def error_from_worker(packed: bytes, traceback: str, label: str) -> BaseException:
    """Return an exception that was raised in a worker."""
    error: BaseException = unpack(memoryview(bytearray(packed)))
    add_note(error, f"raised in {label}, with this traceback:\n{traceback}")
    return error


def _copy_of(error: BaseException) -> BaseException:
    """Return an error for one of several calls, to get notes about that call."""
    try:
        copied = copy.copy(error)
    except Exception:  # noqa: BLE001 (classes of exceptions may raise anything)
        return error
    copied.__notes__ = [*getattr(error, "__notes__", ())]
    copied.__cause__ = error.__cause__
    return copied


def _without_frames(error: Exception) -> Exception:
    """Drop the tracebacks of an error of the sending, and of its causes: their frames refer to the call."""
    each: BaseException | None = error
    while each is not None:
        each.__traceback__ = None
        each = each.__cause__ or each.__context__
    return error


def _end_error() -> SessionError:
    return SessionError("the lanes are closed: the block ended before this call, and its workers are gone")
