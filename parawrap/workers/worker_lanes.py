"""The lanes of a block in other processes.

::

    callers ──► backlog ──► worker 0 (at most two messages) ──► the caller that receives for all
                       └──► worker 1

Guarantees:

- A worker answers its messages in the order of sending, and each call ends once: with its answer,
  or with an error.
- No thread belongs to a lane. A thread that waits for an answer receives all answers, and sends
  the backlog. One thread receives for futures without a reader, such as those with a callback.
- If a worker ends, its messages are sent again, and its lane starts another one for its next
  message. Only the oldest message ran, so only that one counts the death.
- After `end`, no process is left.

A `Request` is a message to a worker: one call, or a chunk, which is several batches of a stream.

Threads that take answers:

- The reader (`_has_reader`) receives for all. It is a caller that waits, or the receiver.
- The receiver (`_receiver`) waits for futures without a reader. It alone runs callbacks of users,
  so other readers leave such requests to it (`_for_receiver`).
- A caller of `result` receives faster than the receiver could wake it. After such a caller has read
  (`_callers_read`), the receiver leaves new answers to callers for a moment, unless `_unread` wakes
  it.
"""

from __future__ import annotations

import copy
import os
import threading
import warnings
from collections import deque
from collections.abc import Callable, Collection
from contextlib import nullcontext, suppress
from itertools import count
from time import monotonic
from typing import Any

import torch

from parawrap.engine.given_arguments import Given
from parawrap.engine.lanes import Lane, here
from parawrap.errors import LaunchError, SessionError, add_note
from parawrap.processes.events import NEVER
from parawrap.processes.latch import SIGNAL_POLL_S
from parawrap.processes.packing import Packer, restore
from parawrap.processes.pickling import Packed, unpack
from parawrap.workers.local_workers import LocalWorker, LocalWorkers
from parawrap.workers.model import SEEDS
from parawrap.workers.ray_workers import RayWorker, RayWorkers
from parawrap.workers.worker import Form, WorkerAnswer
from parawrap.workers.writes import Written, write_back

# The receiving thread stays for this time without a call: another start takes longer than a small
# call
_RECEIVER_IDLE_S = 1.0
# It leaves an answer to the caller of `result` for this time, if such callers received the last
# ones. A guess that no test has contradicted
_UNREAD_S = 0.005
# A wait for answers has pieces of this length, because the changes of other threads end no poll
_PIECE_S = 0.2
_FORKED = (
    "a forked child has no workers: read the outputs of map in the process that made the block"
)
_AHEAD = 2  # messages per worker, so that the next one has arrived when an answer leaves
_request_numbers = count()  # `next` is one atomic step
# The registries of warnings by file: "once per line" holds for all workers together
_given_warnings: dict[str, dict[Any, Any]] = {}


class WorkerCall:
    """A call in a message.

    `position` is its index there; `request` changes if the call is sent again alone.

    `given` are the arguments as they are when the call is sent: the caller may change containers
    before the answer comes.
    """

    __slots__ = (
        "args",
        "callbacks",
        "given",
        "is_cancelled",
        "kwargs",
        "position",
        "record",
        "request",
        "rows",
    )

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        self.args = args
        self.kwargs = kwargs
        self.callbacks: list[Callable[[Any], object]] = []  # for the end of the call
        self.is_cancelled = False
        self.position = self.rows = 0
        # None for tensors alone, and for arguments that the worker computes
        self.given: Given | None = None
        self.request: Request | None = None
        # Takes the lane, start, end, and error of a call that is traced
        self.record: Callable[..., None] | None = None

    @property
    def has_callbacks(self) -> bool:
        """True if code of the user runs at its end."""
        return False

    def begin(self) -> bool:
        """Note that the call is about to be sent; False if it was cancelled."""
        return not self.is_cancelled

    def end(self) -> None:
        """Call the callbacks, in the thread that received the answer."""
        # Another thread may take the last one after the look. `pop` gives each to one thread
        with suppress(IndexError):
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
            answer = WorkerAnswer(*request.answers[self.position])
            if answer.warned is not None:
                _repeat_warnings(answer.warned)
            error: BaseException | None = None
            where = ""
            if answer.error is not None:
                packed_error, where = answer.error
                error = unpack(packed_error)
            if self.record is not None and lane is not None:
                self.record(lane.index, answer.start, answer.end, error)
            if error is not None:
                add_note(error, f"raised in {lane}, with this traceback:\n{where}")
                raise error
            # As by a plain call, tensors get the mode of the call. The reader may have another one
            is_inference = request.form.is_inference
            is_mode = torch.is_inference_mode_enabled() == is_inference
            with nullcontext() if is_mode else torch.inference_mode(is_inference):
                output = restore(answer.output, block)
                if answer.written is None:
                    return output
                written: Written = restore(answer.written, block)
                given = self.given or Given((self.args, self.kwargs or {}))
                write_back(written, given)
                return given.resolve(output) if written.has_marks else output
        except BaseException as error:
            if request.form.is_whole and lane is not None:
                add_note(error, f"in {lane}")
            raise


def _repeat_warnings(packed: bytes) -> None:
    """Give the warnings of a worker here. The filters of this process decide about them."""
    for text, category, filename, line in unpack(packed):
        registry = _given_warnings.setdefault(filename, {})
        warnings.warn_explicit(text, category, filename, line, registry=registry)


class Request:
    """A message to a worker.

    One that has a call of `submit` has no other: it is sent unless that call was cancelled.
    """

    __slots__ = (
        "answers",
        "block",
        "calls",
        "deaths",
        "failure",
        "form",
        "items",
        "lane",
        "number",
        "packer",
        "was_sent",
    )

    def __init__(self, form: Form, packer: Packer | None = None) -> None:
        self.form = form
        self.number = next(_request_numbers)  # the answers have it too
        self.calls: list[WorkerCall] = []
        self.items: list[Any] = []
        self.packer = packer or Packer()
        self.lane: WorkerLane | None = None  # the lane that it was given last
        self.answers: list[tuple[Any, ...]] = []
        self.block = memoryview(b"")  # of the answers
        self.failure: BaseException | None = None
        self.deaths = 0
        self.was_sent = False  # to the worker that the lane has now

    @property
    def is_done(self) -> bool:
        return bool(self.answers) or self.failure is not None

    def add(self, call: WorkerCall) -> None:
        """Add a call, and pack its arguments.

        Raises:
            UnsendableError: If an argument cannot be pickled.
        """
        is_simple = not call.kwargs and all(type(each) is torch.Tensor for each in call.args)
        # Before the arguments are packed: what the caller changes later must not count as a write
        if self.form.prepare is None and not is_simple:
            call.given = Given((call.args, call.kwargs or {}))
        if call.kwargs:
            self.items.append(self.packer.add({"args": call.args, "kwargs": call.kwargs}, ""))
        else:
            self.items.append(self.packer.add(call.args, "args"))
        call.request, call.position = self, len(self.calls)
        self.calls.append(call)


class WorkerLane(Lane):
    """One worker, and the messages that it has not answered.

    `model` and `prepare` are those that it has.
    """

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
        # The time of a whole call: the average of the last messages
        self.each_ns: float | None = None
        self._process = os.getpid()
        self._workers = workers
        self._numbers = count(1)  # of the workers: each has its own random numbers
        # It guards everything below, and the messages of the lanes. It is entered itself, not
        # through its conditions: they are code of Python, where Ctrl-C could keep the lock
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # notified after each answer
        self._is_started = False
        self._has_reader = False  # True while a thread receives for all
        self._receiver: threading.Thread | None = None
        # Notified if the receiver must not leave the answers to callers
        self._unread = threading.Condition(self._lock)
        # True if callers of `result` received the last answers to futures
        self._callers_read = False
        self._backlog: deque[Request] = deque()
        # The two have ended, and their calls do not know it yet. Code of users runs at the end of
        # calls in the second
        self._ended: deque[Request] = deque()
        self._for_receiver: deque[Request] = deque()
        # Written without the lock: `end` must not wait for a thread that starts workers
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
        with self._lock:
            if self._is_started:
                return
            for lane in self.all:
                if lane.worker is None:  # an earlier attempt may have failed after some starts
                    self._start(lane)
            self._is_started = True

    def post(self, request: Request) -> None:
        """Send a message to the first lane with room. Parts of a cut call come before whole calls.

        Raises:
            SessionError: If the lanes have ended, or in a forked child.
        """
        if self._process != os.getpid():  # before the lock: another thread may have held it
            raise SessionError(_FORKED)
        with self._lock:
            if self._is_over:
                raise _end_error()
            if request.form.is_whole:
                self._backlog.append(request)
            else:
                self._backlog.appendleft(request)
            self._send_waiting()
        if self._ended:  # calls that could not be sent
            self._pass_on()

    def wait(self, is_done: Callable[[], bool], until: float = NEVER) -> None:
        """Wait until `is_done`, or until a time by the monotonic clock.

        One of the threads that wait receives for all.

        Raises:
            SessionError: In a forked child.
        """
        if self._process != os.getpid():  # before the lock: another thread may have held it
            raise SessionError(_FORKED)
        while True:
            is_reader = False
            try:
                with self._lock:
                    self._wait_for_turn(is_done, until)
                    if is_done() or until <= monotonic():
                        return
                    self._has_reader = is_reader = True  # Ctrl-C cannot come between the two
                # In short pieces: another thread may resolve the awaited future without a message
                self._receive(min(_PIECE_S, max(0.0, until - monotonic())))
            finally:
                if is_reader:
                    # Others may read from here on. They look once per second: Ctrl-C may keep this
                    # thread from notifying them
                    self._has_reader = False
            self._pass_on()

    @property
    def is_receiver(self) -> bool:
        """True in the thread that receives for futures, and calls their callbacks."""
        return threading.current_thread() is self._receiver

    def wait_in_callback(self, is_done: Callable[[], bool], until: float) -> None:
        """Wait like `wait` in the receiver. It ends futures with callbacks itself meanwhile."""
        while not is_done() and monotonic() < until:
            self._end_requests()
            self.wait(lambda: is_done() or bool(self._for_receiver), until)

    def _wait_for_turn(self, is_done: Callable[[], bool], until: float) -> None:
        """Wait with the lock held until no thread receives for all, `is_done`, or that time.

        A function of its own: see the rule about `while` in `Lanes.send`.
        """
        while (self._has_reader or self._is_over) and not is_done():
            wait_s = until - monotonic()
            if wait_s <= 0:
                return
            # In pieces: a signal that arrives just before the wait does not end it
            self._changed.wait(min(wait_s, SIGNAL_POLL_S))

    def look(self) -> None:
        """Receive what has arrived, without waiting. A forked child has no workers."""
        if not self.are_here:
            return
        is_reader = False
        try:
            with self._lock:
                is_idle = not any(lane.flying for lane in self.all)
                if self._has_reader or self._is_over or is_idle:
                    return
                self._has_reader = is_reader = True
            self._receive(0.0)
        finally:
            if is_reader:
                self._has_reader = False
        self._pass_on()

    def receive_for_futures(self, *, at_once: bool = False) -> None:
        """Have a thread receive the answers to futures, unless callers of `result` do.

        `at_once`: there are callbacks, which only this thread calls.
        """
        with self._lock:
            self._callers_read = self._callers_read and not at_once
            if self._receiver is None:
                name = "parawrap-lanes"
                self._receiver = threading.Thread(
                    target=self._receive_for_futures, name=name, daemon=True
                )
                try:
                    self._receiver.start()
                except RuntimeError:  # the process has too many threads: the next call tries again
                    self._receiver = None
                    raise
            elif not self._callers_read:
                self._unread.notify()

    def end(self) -> None:
        """End the workers. What they have not answered fails. May be called again."""
        if not self.are_here:
            return
        self._is_over = True
        self._workers.end()  # a thread that waits for their start raises
        working = []
        for lane, worker in self._lanes_with_workers():
            working.append(worker)
            worker.stop(at_once=bool(lane.flying))
        for worker in working:
            worker.join()
        # Only now: a thread may hold the lock while it sends, at most until its worker has ended
        with self._lock:
            for lane in self.all:
                self._backlog += lane.flying
                lane.flying.clear()
                lane.worker = lane.model = None
            for request in self._backlog:
                self._fail(request, _end_error())
            self._backlog.clear()
            self._workers.close()  # also workers that another thread has started meanwhile
        self._end_requests()
        self._tell_waiting()
        with self._lock:
            self._unread.notify()  # the receiver leaves

    def _lanes_with_workers(self) -> list[tuple[WorkerLane, LocalWorker | RayWorker]]:
        """Return the lanes that have workers now, with these."""
        found = []
        for lane in self.all:
            worker = lane.worker  # read once: another thread may bury it
            if worker is not None:
                found.append((lane, worker))
        return found

    def _pass_on(self) -> None:
        """Wake threads that wait for messages, then end futures: a callback may be slow."""
        self._tell_waiting()
        if self._ended or self._for_receiver:
            self._end_requests()
            self._tell_waiting()

    def _tell_waiting(self) -> None:
        with self._lock:
            self._changed.notify_all()

    # -- sending

    def _send_waiting(self) -> None:
        """Send what waits to lanes with room."""
        while self._backlog:
            lane = min(self.all, key=lambda lane: len(lane.flying))
            if len(lane.flying) >= _AHEAD:
                return
            request = self._backlog[0]  # until it is in the lane: Ctrl-C must not lose it
            was_begun = request.lane is not None  # it goes again, after a death or Ctrl-C
            # `begin` changes only a call of `submit`, which is alone in its message
            if was_begun or any(call.begin() for call in request.calls):
                self._send(lane, request)
            else:  # all of it was cancelled
                self._backlog.remove(request)

    def _start(self, lane: WorkerLane) -> LocalWorker | RayWorker:
        seed = (torch.initial_seed() + next(self._numbers)) % SEEDS
        lane.worker = worker = self._workers.start(lane.index, seed)
        lane.model, lane.prepare, lane.has_answered = None, None, False
        if self._is_over:  # `end` in another thread may have missed it
            worker.stop(at_once=True)
            raise _end_error()
        return worker

    def _send(self, lane: WorkerLane, request: Request) -> None:
        form = request.form
        try:
            # Ctrl-C may have come between the two lines below that move a message
            if request.lane is not None and request in request.lane.flying:
                request.lane.flying.remove(request)
            request.lane, request.was_sent = lane, False
            # In this order: a message in both places is found again, and one in none is lost
            lane.flying.append(request)
            self._backlog.remove(request)
            worker = lane.worker or self._start(lane)
            is_known = form.prepare is not None and form.prepare is lane.prepare
            body = form._replace(prepare=b"" if is_known else form.prepare, model=None)
            worker.send(
                (request.number, tuple(body), request.items),
                request.packer,
                None if form.model is lane.model else form.model,
            )
            lane.model, lane.prepare = form.model, form.prepare or lane.prepare
            request.was_sent = True
        except ConnectionError:
            pass  # the thread that receives sends it to the next worker
        except (LaunchError, SessionError, OSError) as error:  # the calls were not sent
            lane.model = None  # a new one may have been
            lane.flying.remove(request)
            self._fail(request, error.with_traceback(None))  # its frames refer to the request
        except BaseException:  # of a signal handler, perhaps after the message has left
            if lane.worker is not None:
                lane.worker.stop(at_once=True)
            elif request in lane.flying:
                lane.flying.remove(request)
                self._backlog.appendleft(request)
            raise

    # -- receiving

    def _receive(self, timeout_s: float) -> None:
        """Take the answers that arrive, and send what waits."""
        lanes = self._lanes_with_workers()
        found: Collection[int] = ()
        if lanes:
            found = self._workers.poll([worker for _, worker in lanes], timeout_s)
        elif not (self._backlog or self._ended):
            # All messages have ended. The threads that took them tell the callers, each its error
            with self._lock:
                self._changed.wait(timeout_s)
        with self._lock:
            for position in found:
                lane, worker = lanes[position]
                self._take_answers(lane, worker)
            self._send_waiting()

    def _take_answers(self, lane: WorkerLane, worker: LocalWorker | RayWorker) -> None:
        try:
            received = worker.receive()
            if received is None:
                if not self._is_over:
                    self._bury(lane, worker)
                return
            for number, answers, block, error in received:
                request = next((each for each in lane.flying if each.number == number), None)
                if request is not None:
                    # In this order: after Ctrl-C in between, the answer is there, and without one
                    # the message is sent again
                    self._take_answer(lane, request, answers, block, error)
                    lane.flying.remove(request)
        except BaseException:  # Ctrl-C, perhaps between an answer and its request
            worker.stop(at_once=True)
            raise

    def _take_answer(
        self,
        lane: WorkerLane,
        request: Request,
        answers: list[Any],
        block: memoryview,
        error: OSError | None,
    ) -> None:
        if request.is_done:
            return
        lane.has_answered = True
        lane.tasks += len(request.calls)
        if error is not None:
            self._fail(request, error)
            return
        took_ns = sum(end - start for *_, start, end in answers)  # fields of `WorkerAnswer`
        lane.busy_ns += took_ns
        if request.form.is_whole:
            each_ns = took_ns / len(request.calls)
            if self.each_ns is None:
                self.each_ns = each_ns
            else:
                self.each_ns += (each_ns - self.each_ns) / 4
        request.block = block  # before the answers: a thread that sees them reads both
        request.answers = answers
        self._ended.append(request)  # Ctrl-C cannot come between the two

    def _end_requests(self) -> None:
        """Tell those who wait for requests that ended. No lock is held, and another may read.

        Callbacks of users run in the receiving thread alone: a caller that reads may hold a lock
        that they need.
        """
        before = here.lane
        is_receiver = self.is_receiver
        while True:
            try:
                if is_receiver and self._for_receiver:
                    request = self._for_receiver.popleft()
                else:
                    request = self._ended.popleft()
            except IndexError:  # another thread may have been quicker
                return
            if not is_receiver and any(call.has_callbacks for call in request.calls):
                self._for_receiver.append(request)
                self.receive_for_futures(at_once=True)
                continue
            here.lane = request.lane or self.all[0]
            try:
                for call in request.calls:
                    call.end()
            finally:
                here.lane = before
            # They refer to the request, and a cycle would keep the memory of their outputs
            request.calls = []
            del request

    def _receive_for_futures(self) -> None:
        """Receive in a thread, which ends a moment after the last call.

        A caller that waits in `result` receives faster than this thread could wake it. While there
        are such callers, the thread only looks from time to time for futures without a reader.
        """
        leave_at = monotonic() + _RECEIVER_IDLE_S
        while True:
            with self._lock:
                is_idle = self.is_idle()
                if not self._for_receiver:
                    has_stayed = is_idle and monotonic() >= leave_at
                    if self._is_over or has_stayed:
                        # With the lock held: a call that comes now starts another thread
                        self._receiver = None
                        return
                    if is_idle or self._has_reader:
                        # A reader is a caller here: this thread does not read while it waits
                        self._callers_read = self._callers_read or self._has_reader
                        self._unread.wait(_UNREAD_S if self._callers_read else _RECEIVER_IDLE_S)
                        continue
                    self._callers_read = False  # a message waits, and no caller reads
            # The requests that failed have the error; a callback may raise SystemExit
            with suppress(BaseException):
                self._end_requests()
                self.wait(lambda: self.is_idle() or bool(self._for_receiver))
            leave_at = monotonic() + _RECEIVER_IDLE_S

    def _fail(self, request: Request, error: BaseException) -> None:
        if not request.is_done:
            request.failure = error
            self._ended.append(request)

    def _bury(self, lane: WorkerLane, worker: LocalWorker | RayWorker) -> None:
        """Send again what a dead worker has not answered, before everything else.

        Its oldest message counts the death. A worker that has answered nothing may have died before
        it could be sent one.
        """
        error = worker.death()
        lost = [request for request in lane.flying if not request.is_done]
        lane.flying.clear()
        lane.worker = None
        if lost:
            oldest, *others = lost
            # A worker that never answers must not start again without end
            if oldest.was_sent or not lane.has_answered:
                lost = [*self._count_death(oldest, error), *others]
        self._backlog.extendleft(reversed(lost))

    def _count_death(self, request: Request, error: BaseException) -> list[Request]:
        """Return what to send again: nothing after too many deaths, else each call alone."""
        request.deaths += 1
        calls = request.calls
        if request.deaths > self.retries:
            what = "this call"
            if len(calls) > 1:
                what += f" or others of its chunk of {len(calls)}"
            add_note(
                error, f"{request.deaths} workers ended while they ran {what}. Other calls continue"
            )
            self._fail(request, error)
            return []
        if len(calls) == 1:
            return [request]
        found = [Request(request.form, request.packer) for _ in calls]
        for call, alone in zip(calls, found, strict=True):
            alone.items, alone.calls = [request.items[call.position]], [call]
            alone.deaths, alone.lane = request.deaths, request.lane
            call.request, call.position = alone, 0
        return found


def _end_error() -> SessionError:
    return SessionError(
        "the lanes are closed: the block ended before this call, and its workers are gone"
    )
