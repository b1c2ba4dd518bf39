"""The lanes of a block in other processes.

::

    callers ──► backlog ──► worker 0 (at most two messages) ──► the caller that receives for all
                       └──► worker 1

Guarantees:

- A worker answers its messages in the order of sending, and each call ends once: with its answer,
  or with an error.
- No thread belongs to a lane. One of the threads that wait for an answer receives all answers,
  and sends the backlog.
- If a worker ends, its messages are sent again, and its lane starts another worker for its next
  message. Only the oldest message ran, so only that one counts the death.
- After `end`, no process is left.

A `Request` is a message to a worker: one call, or a chunk, which is several batches of a stream.

Threads that take answers:

- The reader (`_has_reader`) receives for all. It is a caller that waits, or the receiver.
- The receiver (`_receiver`) waits for futures that no caller waits for. It alone runs callbacks of
  users: another thread that ends a future leaves its callbacks to the receiver (`_callbacks`).
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
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext, suppress
from itertools import count
from time import monotonic
from typing import Any

import torch

from parawrap.engine.forward_writes import UnkeptWrites
from parawrap.engine.given_arguments import Given
from parawrap.engine.lanes import Lane, here
from parawrap.errors import LaunchError, RankDiedError, SessionError, add_note
from parawrap.processes.events import NEVER
from parawrap.processes.held_signals import HeldSignals, do_nothing
from parawrap.processes.latch import SIGNAL_POLL_S
from parawrap.processes.packing import Packer, restore
from parawrap.processes.pickling import Packed, unpack
from parawrap.workers.local_workers import LocalWorker, LocalWorkers
from parawrap.workers.model import SEEDS
from parawrap.workers.ray_workers import RayWorker, RayWorkers
from parawrap.workers.worker import Form, WorkerAnswer
from parawrap.workers.writes import Written, write_back

# The receiver stays for this time without a call: to start a thread takes longer than a small call
_RECEIVER_IDLE_S = 1.0
# The receiver leaves an answer to the caller of `result` for this time, if such callers received
# the last ones. A guess that no test has contradicted
_UNREAD_S = 0.005
# A poll for answers ends after this time, to look for changes by other threads, which do not end it
_PIECE_S = 0.2
_FORKED = (
    "a forked child has no workers: read the outputs of map in the process that made the block"
)
_AHEAD = 2  # messages per worker, so that the next one has arrived when an answer leaves
_request_numbers = count()  # `next` is one atomic step
# Registries as of the module `warnings`, by file: "once per line" holds for all workers together
_given_warnings: dict[str, dict[Any, Any]] = {}


class WorkerCall:
    """A call in a message.

    Attributes:
        args: The positional arguments of the caller.
        kwargs: The keyword arguments; None or empty without any.
        callbacks: Functions that take the call at its end, each once.
        given: The arguments as they were when the call was packed: the caller may change containers
            before the answer comes. None for tensors alone, and for arguments that the worker
            computes.
        is_cancelled: True if the call need not be sent.
        is_simple: True if the arguments are positional tensors, which need no walk through
            containers.
        position: The index of the call in its request.
        record: Takes the lane, start, end, and error of a call that is traced.
        request: The message of the call. Another one if the call is sent again alone.
        rows: The row count; 0 if it is not known.
    """

    __slots__ = (
        "args",
        "callbacks",
        "given",
        "is_cancelled",
        "is_simple",
        "kwargs",
        "position",
        "record",
        "request",
        "rows",
    )

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        self.args = args
        self.kwargs = kwargs
        self.callbacks: list[Callable[[Any], object]] = []
        self.is_cancelled = False
        self.is_simple = not kwargs and all(type(each) is torch.Tensor for each in args)
        self.position = self.rows = 0
        self.given: Given | None = None
        self.request: Request | None = None
        self.record: Callable[..., None] | None = None

    def begin(self) -> bool:
        """Note that the call is about to be sent; False if it was cancelled."""
        return not self.is_cancelled

    def end(self) -> None:
        """Call the callbacks, in a thread that holds signals back."""
        while self.callbacks:
            try:
                callback = self.callbacks.pop()  # one step: each callback gets to one thread
            except IndexError:  # another thread has taken the last one
                return
            callback(self)

    def done(self) -> bool:
        """True if the call has ended."""
        return self.request is not None and self.request.is_done

    def load(self) -> Any:
        """Return the output. Repeat the warnings of the call here, and its writes into arguments.

        Raises:
            BaseException: The exception that the call raised in the worker, or the error why it has
                no answer.
        """
        request = self.request
        assert request is not None
        lane, block = request.lane, request.block
        try:
            if request.failure is not None:
                # A copy: the calls of the message share the error, and each adds notes of its own
                raise copy.deepcopy(request.failure)
            answer = WorkerAnswer(*request.answers[self.position])
            if answer.warned is not None:
                _repeat_warnings(answer.warned)
            # Here, and not in the workers: each of them would warn of the same name
            if answer.unkept and lane is not None:
                lane.unkept.add(answer.unkept)
                lane.unkept.warn()
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
            # Tensors are made in the mode of the call, as by a plain call. This thread may read the
            # output in another mode
            is_inference = request.form.is_inference
            has_mode = torch.is_inference_mode_enabled() == is_inference
            with nullcontext() if has_mode else torch.inference_mode(is_inference):
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
    """Warn in this process of what a worker warned of. The filters of this process apply."""
    for text, category, filename, line in unpack(packed):
        registry = _given_warnings.setdefault(filename, {})
        warnings.warn_explicit(text, category, filename, line, registry=registry)


class Request:
    """A message to a worker: one call of `submit`, one part of a cut call, or a chunk of batches.

    Attributes:
        form: The common part of the calls.
        number: The answers have it too.
        calls: The calls, until they are ended.
        items: The packed arguments of each call; their tensors are in `packer`.
        packer: The block of the message.
        lane: The lane that got the message last.
        answers: The fields of the `WorkerAnswer` to each call; empty before they arrive.
        block: The block of the answers.
        failure: The error why there are no answers.
        deaths: The number of workers that ended while they ran the message.
        was_sent: True if the message was sent to the worker that the lane has now.
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
        self.number = next(_request_numbers)
        self.calls: list[WorkerCall] = []
        self.items: list[Any] = []
        self.packer = packer or Packer()
        self.lane: WorkerLane | None = None
        self.answers: list[tuple[Any, ...]] = []
        self.block = memoryview(b"")
        self.failure: BaseException | None = None
        self.deaths = 0
        self.was_sent = False

    @property
    def is_done(self) -> bool:
        return bool(self.answers) or self.failure is not None

    def add(self, call: WorkerCall) -> None:
        """Add a call, and pack its arguments.

        Raises:
            UnsendableError: If an argument cannot be pickled.
        """
        # Before the arguments are packed: a later change by the caller must not count as a write
        if self.form.prepare is None and not call.is_simple:
            call.given = Given((call.args, call.kwargs or {}))
        if call.kwargs:
            # Without a name of its own: an error names the key of the dict
            self.items.append(self.packer.add({"args": call.args, "kwargs": call.kwargs}, ""))
        else:
            self.items.append(self.packer.add(call.args, "args"))
        call.request, call.position = self, len(self.calls)
        self.calls.append(call)


class WorkerLane(Lane):
    """One worker, and the messages that it has not answered.

    Attributes:
        worker: The worker; None before it is started, and after it has ended.
        model: The packed model that the worker has.
        prepare: The packed `prepare` that the worker has.
        has_answered: True once the worker has answered a message.
        flying: The messages that the worker has not answered, oldest first.
        unkept: What calls wrote into the models of workers. All lanes of a block have this object.
    """

    def __init__(self, index: int, device: torch.device, unkept: UnkeptWrites) -> None:
        super().__init__(index, device, f"{device} (worker {index})", deque(), threading.Lock())
        self.worker: LocalWorker | RayWorker | None = None
        self.model: Packed | None = None
        self.prepare: bytes | None = None
        self.has_answered = False
        self.flying: deque[Request] = deque()
        self.unkept = unkept


class WorkerLanes:
    """The workers of one block, and the messages to them. Thread-safe.

    If a worker dies, its message is sent `retries` more times.
    """

    def __init__(self, workers: LocalWorkers | RayWorkers, retries: int) -> None:
        unkept = UnkeptWrites()
        lanes = [WorkerLane(index, each, unkept) for index, each in enumerate(workers.devices)]
        self.all = tuple(lanes)
        self.retries = retries
        # The time of a whole call: an average in which later messages weigh more
        self.each_ns: float | None = None
        self._process = os.getpid()
        self._workers = workers
        self._numbers = count(1)  # of the workers: each has its own random numbers
        # Guards everything below, and the messages of the lanes. Code enters this lock itself, not
        # its conditions: those are code of Python, where Ctrl-C could keep the lock
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # notified after each answer
        self._is_started = False
        self._has_reader = False  # True while a thread receives for all
        self._receiver: threading.Thread | None = None
        # Notified if the receiver must not leave the answers to callers
        self._unread = threading.Condition(self._lock)
        # True if callers of `result` received the last answers to futures
        self._callers_read = False
        self._backlog: deque[Request] = deque()  # no lane had room for them
        self._ended: deque[Request] = deque()  # have answers or an error; their calls end next
        self._callbacks: deque[Callable[[], object]] = deque()  # of users, for the receiver
        # True once `end` was called. Written without the lock: `end` must not wait for a thread
        # that starts workers
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
                # In short pieces: another thread may end the call without a message
                self._receive(min(_PIECE_S, max(0.0, until - monotonic())))
            finally:
                if is_reader:
                    # Other threads may read from here on. Ctrl-C may keep this thread from
                    # notifying them, so they look once per second
                    self._has_reader = False
            self._pass_on()

    def _wait_for_turn(self, is_done: Callable[[], bool], until: float) -> None:
        """Wait with the lock held until no thread reads, `is_done`, or that time.

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

        Args:
            at_once: There are callbacks: the thread does not leave answers to callers now.

        Raises:
            RuntimeError: If the process has too many threads. The next call tries again.
        """
        with self._lock:
            self._callers_read = self._callers_read and not at_once
            if self._receiver is None:
                receiver = threading.Thread(
                    target=self._receive_for_futures, name="parawrap-lanes", daemon=True
                )
                # Ctrl-C must not leave a thread that runs and is not noted, or the reverse
                held = HeldSignals(wake=do_nothing)
                try:
                    receiver.start()
                    self._receiver = receiver
                finally:
                    held.end()
            elif not self._callers_read:
                self._unread.notify()

    def run_in_receiver(self, callback: Callable[[], object]) -> None:
        """Run a callback of a user in the receiver: a caller that reads may hold a lock it needs.

        In a forked child, which has no receiver, run it here.
        """
        if not self.are_here:
            callback()
            return
        self._callbacks.append(callback)
        self.receive_for_futures(at_once=True)

    def end(self) -> None:
        """End the workers. Calls that they have not answered fail. May be called again."""
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
        """Return the lanes that have workers now, each with its worker."""
        found = []
        for lane in self.all:
            worker = lane.worker  # read once: another thread may set it to None
            if worker is not None:
                found.append((lane, worker))
        return found

    def _pass_on(self) -> None:
        """Wake threads that wait for messages, then end calls: to unpack an output may be slow."""
        self._tell_waiting()
        if self._ended:
            self._end_requests()
            self._tell_waiting()

    def _tell_waiting(self) -> None:
        """Have the threads that wait look again, and one of them read."""
        with self._lock:
            self._changed.notify_all()

    # -- sending

    def _send_waiting(self) -> None:
        """Send messages of the backlog to lanes with room."""
        while self._backlog:
            lane = min(self.all, key=lambda lane: len(lane.flying))
            if len(lane.flying) >= _AHEAD:
                return
            # It stays in the backlog until it is in the lane: Ctrl-C must not lose it
            request = self._backlog[0]
            was_begun = request.lane is not None  # sent before, until a death or Ctrl-C
            # A chunk is sent whole if one of its batches is not cancelled. `begin` changes only a
            # call of `submit`, which is alone in its message
            if was_begun or any(call.begin() for call in request.calls):
                self._send(lane, request)
            else:
                self._backlog.remove(request)

    def _start(self, lane: WorkerLane) -> LocalWorker | RayWorker:
        """Start the worker of a lane.

        Raises:
            LaunchError: If the worker cannot be started.
            SessionError: If the lanes have ended.
        """
        seed = (torch.initial_seed() + next(self._numbers)) % SEEDS
        lane.worker = worker = self._workers.start(lane.index, seed)
        lane.model, lane.prepare, lane.has_answered = None, None, False
        if self._is_over:  # `end` in another thread may have missed it
            worker.stop(at_once=True)
            raise _end_error()
        return worker

    def _send(self, lane: WorkerLane, request: Request) -> None:
        """Move a message from the backlog to a lane, and send it. Its worker is started if needed.

        If that fails, so do the calls.
        """
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
            # The worker keeps `prepare` and the model, so neither is sent twice
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
            pass  # the reader finds the death of the worker, and sends the message again
        except (LaunchError, SessionError, OSError) as error:  # the calls were not sent
            lane.model = None  # a new model may have been sent
            lane.flying.remove(request)
            # Without its frames, which refer to the request
            self._fail(request, error.with_traceback(None))
        except BaseException:  # of a signal handler, perhaps after the message has left
            if lane.worker is not None:
                # The reader finds its death, and sends the message again
                lane.worker.stop(at_once=True)
            elif request in lane.flying:
                lane.flying.remove(request)
                self._backlog.appendleft(request)
            raise

    # -- receiving

    def _receive(self, timeout_s: float) -> None:
        """Take the answers that arrive within a time, and send the backlog. For the reader."""
        lanes = self._lanes_with_workers()
        found: Collection[int] = ()
        if lanes:
            found = self._workers.poll([worker for _, worker in lanes], timeout_s)
        elif not (self._backlog or self._ended):
            # There is no worker to poll. Another thread is about to end the last calls
            with self._lock:
                self._changed.wait(timeout_s)
        for position in found:
            lane, worker = lanes[position]
            with self._lock:
                is_alive = self._take_answers(lane, worker)
            if not (is_alive or self._is_over):
                # Without the lock: a process may close its connection seconds before it ends
                error = worker.death()
                with self._lock:
                    self._replace_dead(lane, error)
        with self._lock:
            self._send_waiting()

    def _take_answers(self, lane: WorkerLane, worker: LocalWorker | RayWorker) -> bool:
        """Take the answers of a worker that have arrived. Return False if the worker has ended."""
        try:
            received = worker.receive()
            if received is None:
                worker.stop(at_once=False)
                return False
            for number, answers, block, error in received:
                # Ctrl-C may have moved the message to another lane: then there is none
                for request in [each for each in lane.flying if each.number == number]:
                    # In this order: after Ctrl-C in between, the message is done, and is not sent
                    # again
                    self._take_answer(lane, request, answers, block, error)
                    lane.flying.remove(request)
            return True
        except BaseException:
            # Ctrl-C may have lost answers. The next reader finds the death of the worker, and sends
            # the messages again
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
        """Note the answers to a message; or the error, if this process could not take the block."""
        if request.is_done:
            return
        lane.has_answered = True
        lane.tasks += len(request.calls)
        if error is not None:
            self._fail(request, error)
            return
        # The last two fields of a `WorkerAnswer`, which crossed the wire as a plain tuple
        took_ns = sum(end - start for *_, start, end in answers)
        lane.busy_ns += took_ns
        if request.form.is_whole:
            each_ns = took_ns / len(request.calls)
            if self.each_ns is None:
                self.each_ns = each_ns
            else:
                self.each_ns += (each_ns - self.each_ns) / 4
        request.block = block  # before the answers: a thread that sees them reads both
        request.answers = answers
        self._ended.append(request)  # Ctrl-C cannot come between this line and the one before

    def _end_requests(self) -> None:
        """End the calls of requests that have ended, without the lock: unpickling runs user code.

        Several threads may do this at the same time: `WorkerCall.end` ends a call once.
        """
        while True:
            try:
                request = self._ended[0]
            except IndexError:
                return
            # Parts of cut calls, and of streams in order, have none, and no need to hold signals
            calls = [call for call in request.calls if call.callbacks]
            if calls:
                self._end_calls(calls, request.lane or self.all[0])
            # Calls refer to the request, and a cycle would keep the memory of their outputs
            request.calls = []
            # Last: after Ctrl-C above, another thread ends the calls
            with suppress(ValueError):  # another thread was quicker
                self._ended.remove(request)

    def _end_calls(self, calls: Sequence[WorkerCall], lane: WorkerLane) -> None:
        # Ctrl-C must not come after a callback was taken, and before it has run
        held = HeldSignals(wake=do_nothing)
        # Calls of the block by code of users run plainly then, and do not wait for this thread
        before, here.lane = here.lane, lane
        try:
            for call in calls:
                call.end()
        finally:
            here.lane = before
            held.end()

    def _receive_for_futures(self) -> None:
        """Receive in a thread, which ends a moment after the last call.

        A caller that waits in `result` receives faster than this thread could wake it. While there
        are such callers, the thread only looks from time to time for futures without a reader.
        """
        here.lane = self.all[0]  # callbacks run plain calls, and do not wait for this thread
        leave_at = monotonic() + _RECEIVER_IDLE_S
        while True:
            with self._lock:
                is_idle = self.is_idle()
                # `_ended` too: Ctrl-C may have kept a caller from ending these requests
                if not (self._callbacks or self._ended):
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
            # Futures have the errors of their calls; a callback may raise SystemExit
            with suppress(BaseException):
                self._pass_on()
                self._run_callbacks()
                self.wait(lambda: self.is_idle() or bool(self._callbacks))
            leave_at = monotonic() + _RECEIVER_IDLE_S

    def _run_callbacks(self) -> None:
        while self._callbacks:  # only this thread takes one
            self._callbacks.popleft()()

    def _fail(self, request: Request, error: BaseException) -> None:
        """Have the calls of a request raise an error, unless it has answers."""
        if not request.is_done:
            request.failure = error
            self._ended.append(request)

    def _replace_dead(self, lane: WorkerLane, error: RankDiedError) -> None:
        """Put the messages that a dead worker has not answered in front of the backlog.

        The oldest message counts the death. A worker that has answered nothing may have died before
        a message could be sent to it. The next message to the lane starts another worker.
        """
        lost = [request for request in lane.flying if not request.is_done]
        lane.flying.clear()
        lane.worker = None
        if lost:
            oldest, *others = lost
            # A worker that never answers must not start again without end
            if oldest.was_sent or not lane.has_answered:
                lost = [*self._count_death(oldest, error), *others]
        self._backlog.extendleft(reversed(lost))

    def _count_death(self, request: Request, error: RankDiedError) -> list[Request]:
        """Return the messages to send again: none after too many deaths, else one for each call."""
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
