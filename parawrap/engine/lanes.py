"""The lanes of a session: a thread for each, the parts of cut calls, and the modes of the caller.

Guarantees:

- A lane runs one part at a time: the thread that works in it holds ``lane.lock``.
- The caller runs lane 0's part, and then every part that no thread has begun. With gradients, the
  caller runs all parts of a device itself, in order.
- The outcome of a part reaches the caller whatever the part raises; the lane lives on.
- A part never waits for a lane: `here.lane` is set in it, and calls of the model run plainly. A
  part that waits for another thread, which itself makes a call, waits forever.
- An interrupt drops the parts that have not started. A caller that waits for other parts leaves at
  once. One that is interrupted in its own part first waits for those that run.
- Threads start when first needed. They end with `close`, with the last reference to the lanes, or
  with the interpreter.
- A forked child has no lanes: all calls run plainly there.

Threads need no interpreter lock here. What several of them change is one of three things:

- work to be claimed, in a dict, list, or deque: ``pop`` gives each piece to one thread alone;
- what a lock protects, which the comment of the lock or of the attribute says;
- a flag that decides only who does the work, never what is computed.

A cut call takes this way, and whole calls of a session the other one::

    Lanes.run ──► CallParts ──► Lane.inbox ──► CallParts.__call__, in a lane's thread
        │             └───────────────────────────► CallParts.run
        └─────────────────────────────────────────► CallParts.run, in the caller's thread

    Lanes.send ──► a deque of calls ──► Lane.take ──► the call

Both are on the path of every call: for maps in place of comprehensions, see `call.py`.
"""

from __future__ import annotations

import contextvars
import functools
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from itertools import cycle, filterfalse
from operator import attrgetter
from os import getpid
from queue import SimpleQueue
from time import monotonic, perf_counter_ns
from typing import Any, NamedTuple

import torch

from parawrap._private_names import (
    DeviceContext,
    InferenceMode,
    count_function_modes,
    function_modes,
    set_grad_enabled,
)
from parawrap.backends import Backend, backend_of, drop_own_frames, warn_caller
from parawrap.engine.device_streams import LaneStreams, Moment, moment_of, wait_for_moment
from parawrap.errors import SessionError

_CPU = torch.device("cpu")
_is_taking = attrgetter("is_taking")
_thread_of = attrgetter("thread")
_load_of = attrgetter("load")
# At the exit of the program. Threads are daemons, so none blocks it for longer; five seconds for
# the end of a running part are a guess that no test has contradicted
_EXIT_PATIENCE_S = 5.0
_DRAWS = (
    "lanes that share a random generator drew from it at the same time, so a seed does not "
    "reproduce this call. With torch.use_deterministic_algorithms(True), lanes run one after "
    "another, in order. If the call draws no random numbers, another thread did"
)


class _Here(threading.local):
    """The lane that the calling thread works in.

    The class has a value because looking for none takes a microsecond.
    """

    lane: Lane | None = None


here = _Here()


class Lane:
    """One device slot and, once it was needed, its thread.

    Attributes:
        device: Where its tensors lie.
        label: The name of the device.
        lock: Of the thread that works in the lane. It protects the counters too.
        gate: Held by a whole call, from its look at `Calls.holds_whole_calls` to its end.
        own: Whole calls for this lane alone, oldest first.
        is_taking: True while its thread runs whole calls, or is about to. Changed with `queueing`.
    """

    def __init__(
        self,
        index: int,
        device: torch.device,
        label: str,
        shared: deque[Any],
        queueing: threading.Lock,
    ) -> None:
        """`shared` are whole calls for any lane, and `queueing` is the lock of all who add some."""
        self.index = index
        self.device = device
        self.label = label
        self.lock = threading.Lock()
        self.gate = threading.Lock()
        self.inbox: SimpleQueue[Any] = SimpleQueue()
        self.is_taking = False
        self.tasks = self.rows = self.whole_calls = self.busy_ns = 0
        self.thread: threading.Thread | None = None
        self.streams = LaneStreams(device, index)
        self.own: deque[Any] = deque()
        self._shared = shared
        self._queueing = queueing

    def __repr__(self) -> str:
        return f"lane {self.index} on {self.label}"

    @property
    def load(self) -> tuple[bool, int, int]:
        """How much the lane has to do, for a comparison with other lanes."""
        return self.lock.locked(), self.streams.count_unfinished(), self.tasks

    def start(self, threads: int | None) -> None:
        """Start the lane's thread, and wait until its count of intra-op threads is set."""
        ready = threading.Event()
        # The new thread takes the right before it serves. If its start fails, or Ctrl-C comes
        # first, this thread takes it back: `pop` gives it to one of the two alone
        right_to_serve = [True]
        serve = partial(self._serve, threads, ready, right_to_serve)
        thread = threading.Thread(target=serve, name=f"parawrap-{self}", daemon=True)
        try:
            self.thread = thread
            thread.start()
        except BaseException:
            with suppress(IndexError):  # it serves
                right_to_serve.pop()
                self.thread = None
            raise
        ready.wait()

    def take(self, _: Lane) -> None:
        """Run whole calls, the oldest first, until none waits.

        Other work that waits runs between two of them. The argument is this lane, which all work
        from the inbox gets.
        """
        while True:
            try:
                work = (self.own or self._shared).popleft()
            except IndexError:  # there is none, or another lane was quicker
                # `Lanes.send` adds a call and looks for an idle lane under this lock. So either
                # this thread finds the call, or the sender finds this lane idle
                with self._queueing:
                    if not (self.own or self._shared):
                        self.is_taking = False
                        return
                continue
            work(self)
            del work
            if not self.inbox.empty():
                self.inbox.put(self.take)
                return

    def _serve(
        self, threads: int | None, ready: threading.Event, right_to_serve: list[bool]
    ) -> None:
        """Run the lane's thread.

        It refers to nothing but the lane, so abandoned lanes can be collected.
        """
        try:
            right_to_serve.pop()
        except IndexError:  # the lane may have another thread already
            return
        if threads is not None:
            # Without this, the thread's first parallel operator undoes the setting
            torch.get_num_threads()
            torch.set_num_threads(threads)
        # For good: callbacks of futures run in this thread too, and must not wait for lanes
        here.lane = self
        ready.set()
        while (work := self.inbox.get()) is not None:
            work(self)
            del work  # a waiting lane keeps nothing of its last call alive
        # `close` lets the whole calls finish that were sent before it
        while self.own or self._shared:
            with suppress(IndexError):  # another lane was quicker
                call = (self.own or self._shared).popleft()
                call(self)


class CallParts:
    """The parts of one call, in groups.

    One thread runs a group in order; the caller runs each that no thread has begun.
    """

    __slots__ = (
        "asleep",
        "countdown",
        "done",
        "errors",
        "groups",
        "home",
        "lanes",
        "modes",
        "moments",
        "outputs",
        "tasks",
    )

    def __init__(
        self,
        lanes: Sequence[Lane],
        tasks: Sequence[Callable[[], Any]],
        groups: dict[int, tuple[int, ...]],
        home: torch.device | None,
        moments: Sequence[Moment],
    ) -> None:
        self.lanes = lanes  # not their pool: parts that wait in an inbox would keep it alive
        self.tasks = tasks
        self.asleep: list[Lane] = []  # the lanes that are not woken yet, the next one last
        # By lane: its thread would run the group, and the thread that pops a group runs it
        self.groups = groups
        self.home = home
        self.moments = moments
        self.modes: Modes  # of the caller, if a part runs elsewhere than in the caller's own modes
        # Each thread writes the places of its own group. `done` opens after the last of them, so
        # the caller, who waits for it, sees all that the lanes have written
        self.outputs: list[Any] = [None] * len(tasks)
        self.errors: list[tuple[int, BaseException]] = []
        # A countdown that needs no lock: `list.pop` is atomic, so one thread alone gets the 0, the
        # last entry. That thread opens `done`
        self.countdown = [*range(len(groups))]
        self.done = threading.Lock()
        self.done.acquire()

    def __call__(self, lane: Lane) -> None:
        """Run the group of a lane in its thread, unless the caller was quicker."""
        group = self.groups.pop(lane.index, None)
        if self.asleep and self.groups:
            self.wake_next()
        if group is not None:
            self.modes.run(partial(self.run, group), lane.device, self.home)

    def wake_next(self) -> None:
        """Wake the next lane.

        It wakes the one after it, so that small parts wake few threads for nothing.

        While lanes run whole calls, all of them are woken at once: the next one may be at work for
        long. A lane that has ended leaves its group to the caller.
        """
        with suppress(IndexError):  # there is none, or another lane was quicker
            while True:
                lane = self.asleep.pop()
                lane.inbox.put(self)
                if not lane.is_taking:
                    return

    def run(self, group: tuple[int, ...]) -> None:
        """Run the parts of a group, each as its lane's work. The first failure ends it."""
        has_failed = False
        # A part finds no context variable that an earlier part of the group has set
        context = contextvars.copy_context() if len(group) > 1 else None
        for position, index in enumerate(group):
            lane_index = index % len(self.lanes)
            lane, task = self.lanes[lane_index], self.tasks[index]
            if context is not None and position > 0:
                task = partial(context.copy().run, task)
                if self.moments:
                    # Turns are turns on the devices too, which run what lanes have queued
                    earlier = [self.lanes[before % len(self.lanes)] for before in group[:position]]
                    task = partial(_run_after, earlier, task)
            with lane.lock:  # no interrupt comes between this line and the next
                start, before = perf_counter_ns(), here.lane
                try:
                    here.lane = lane
                    if self.moments:
                        self.outputs[index] = lane.streams.run(task, self.moments[lane_index])
                    else:
                        self.outputs[index] = task()
                except BaseException as error:  # noqa: BLE001  # a lane outlives its tasks
                    drop_own_frames(error)
                    self.errors.append((index, error))
                    has_failed = True
                finally:
                    here.lane = before
                    lane.tasks += 1
                    lane.busy_ns += perf_counter_ns() - start
            if has_failed:
                break
        is_last = self.countdown.pop() == 0
        if is_last:
            self.done.release()

    def is_interrupted(self) -> bool:
        """True if a part has ended with Ctrl-C or an exit, perhaps after errors of other parts."""
        # A list is copied in one step; lanes append their errors meanwhile
        return any(not isinstance(error, Exception) for _, error in [*self.errors])

    def drop(self) -> None:
        """Drop the groups that no thread has begun."""
        with suppress(KeyError):
            while True:
                self.groups.popitem()
                is_last = self.countdown.pop() == 0
                if is_last:
                    self.done.release()


class Lanes:
    """The lanes of one session, or of one function. Any number of threads may use them at once."""

    def __init__(
        self, devices: Sequence[torch.device], labels: Sequence[str] | None = None
    ) -> None:
        self._shared: deque[Any] = deque()
        # A lane that falls idle looks for a call, and `send` looks for an idle lane: both hold it,
        # so no call is left. `close` and the start of threads hold it too
        self._queueing = threading.Lock()
        lanes = []
        for index, device in enumerate(devices):
            label = str(device) if labels is None else labels[index]
            lanes.append(Lane(index, device, label, self._shared, self._queueing))
        self.all = tuple(lanes)
        self.count = len(self.all)
        self.backend: Backend = backend_of(devices[0].type)
        self.share_devices = len(set(devices)) < len(devices)
        self.pid = getpid()
        self.is_open = True
        self._threads = self.backend.intra_op_threads(len(devices))
        self._only_cpu = all(device.type == "cpu" for device in devices)
        # Entries are never changed. Two threads may make the same one
        self._groups: dict[tuple[int, str | None], dict[int, tuple[int, ...]]] = {}
        self._changed: Moment = {}  # after the last change of the replicas, by device
        self._warns_of_draws = self.count > 1
        self._end = weakref.finalize(self, _end_threads, self.all, _EXIT_PATIENCE_S)

    # Parts of one call

    def run(
        self,
        tasks: Sequence[Callable[[], Any]],
        turns: str | None = None,
        home: torch.device | None = None,
        moments: Sequence[Moment] = (),
    ) -> tuple[list[Any], list[tuple[int, BaseException]]]:
        """Run task i in lane ``i % lanes``, at the same time or in `turns`.

        Return the values, and the errors with indices.

        A task in turns may use all intra-op threads. `moments` has an entry per lane if devices are
        to do with them.
        """
        key = len(tasks), turns
        # A copy, because threads take groups out of it
        groups = dict(self._groups.get(key) or self._group(key))
        parts = CallParts(self.all, tasks, groups, home, moments)
        # The caller's own group: `parts` has counted it, and no lane's thread may take it
        first = groups.pop(0)
        before = torch.get_num_threads()
        # Lanes at the same time share the cores. The count is that of the calling thread
        count = self._threads if groups else None
        sets_threads = count is not None and count != before
        try:
            if sets_threads:
                torch.set_num_threads(count)  # type: ignore[arg-type]
            self._run_parts(parts, first, [*groups])
        finally:
            if sets_threads:
                torch.set_num_threads(before)
        if moments and not torch.is_grad_enabled():
            for lane in self.all[: len(tasks)]:
                lane.streams.be_waited_for()
        parts.tasks = ()  # a lane may sleep for long before its next line
        outputs, parts.outputs = parts.outputs, []
        return outputs, parts.errors

    def _run_parts(self, parts: CallParts, first: tuple[int, ...], others: Sequence[int]) -> None:
        """Run the first group, and each group that no thread has begun; wait for the rest."""
        lane, home = self.all[0], parts.home
        is_home = home is None or home == lane.device
        if others or not is_home:
            parts.modes = Modes.capture(self.backend.type)
        try:
            if others:
                parts.asleep = [*map(self.all.__getitem__, reversed(others))]
                # `send` starts a single lane, so some may have a thread, and others none
                if None in map(_thread_of, parts.asleep):
                    with self._queueing:
                        self._start(self.all)
                parts.wake_next()
            if is_home:
                # The caller's modes are in force as they are. A copy of the context: variables that
                # forward sets stay in the call, as in the other lanes
                contextvars.copy_context().run(parts.run, first)
            else:
                parts.modes.run(partial(parts.run, first), lane.device, home)
            for index in reversed(others):  # the last lane was woken last
                if parts.errors and parts.is_interrupted():
                    parts.drop()
                    break
                group = parts.groups.pop(index, None)
                if group is not None:
                    other = self.all[index]
                    parts.modes.run(partial(parts.run, group), other.device, home)
            parts.done.acquire()
        except BaseException:
            parts.drop()
            raise

    def _group(self, key: tuple[int, str | None]) -> dict[int, tuple[int, ...]]:
        """Return the indices of the parts that one thread runs, by the first of them.

        The first index is that of the lane, too.
        """
        count, turns = key
        groups: dict[Any, list[int]] = {}
        for index, lane in zip(range(count), cycle(self.all), strict=False):
            in_one_thread: Any = lane.index
            if turns == "all":
                in_one_thread = None  # one group: the caller runs all parts
            elif turns == "device":
                in_one_thread = lane.device
            groups.setdefault(in_one_thread, []).append(index)
        found = self._groups[key] = {group[0]: tuple(group) for group in groups.values()}
        return found

    def read_generators(self) -> list[torch.Tensor] | None:
        """Return the states of the generators that lanes share; None after a warning of draws."""
        if not self._warns_of_draws:
            return None
        states = [torch.default_generator.get_state()]
        for device, lanes in Counter(lane.device for lane in self.all).items():
            if lanes > 1 and device.type != "cpu":
                state = backend_of(device.type).rng_state(device)
                if state is not None:
                    states.append(state)
        return states

    def warn_of_draws(self, before: list[torch.Tensor]) -> None:
        """Warn once if lanes that ran at the same time drew from a shared generator.

        `before` is from `read_generators`.
        """
        after = self.read_generators() or before
        if not all(map(torch.equal, before, after)):
            self._warns_of_draws = False
            warn_caller(_DRAWS)

    # Whole calls

    def send(self, work: Callable[[Lane], None], *, in_order: bool = False) -> None:
        """Run work in the lane that is free first, the oldest first.

        `in_order` runs it in the first lane alone.

        Raises:
            SessionError: If the lanes are closed.
        """
        with self._queueing:
            if not self.is_open or self.pid != getpid():
                msg = (
                    "the lanes are closed: call inside the `with` block, or make a new "
                    "parallel(...)"
                )
                raise SessionError(msg)
            # No `while` in here: Python 3.13 leaves a `with` at Ctrl-C in its jump backward without
            # a call of `__exit__`. A function that is called here may loop
            idle = [*filterfalse(_is_taking, self.all[:1] if in_order else self.all)]
            chosen: Lane | None
            # On the CPU, idle lanes are alike
            if idle and self._only_cpu and not idle[0].lock.locked():
                chosen = idle[0]
            else:
                # A caller may be at work in the first, or its device may be behind
                chosen = min(idle, key=_load_of, default=None)
            if chosen is not None and chosen.thread is None:
                self._start([chosen])  # before the work is queued: there may be no thread to have
            queue = self.all[0].own if in_order else self._shared
            queue.append(work)
            if chosen is not None:
                # In this order: after Ctrl-C in between, the lane only gets the method once more
                chosen.inbox.put(chosen.take)
                chosen.is_taking = True

    def list_queued(self) -> list[Any]:
        """Return the work that no lane has begun, oldest first."""
        # Lanes take from them meanwhile. A deque is copied in one step, and read in several
        return [*self.all[0].own.copy(), *self._shared.copy()]

    # Life

    @property
    def is_alive(self) -> bool:
        """False after `close`, and in a forked child."""
        return self.is_open and self.pid == getpid()

    def run_idle(self, work: Callable[[], None], home: torch.device | None = None) -> None:
        """Run `work` while every lane is idle, and the devices are done with what lanes queued."""
        if not (self._only_cpu and home in (None, _CPU)):
            work = partial(self._run_between_streams, work, home)
        _run_holding([lane.lock for lane in self.all], work)

    def _run_between_streams(self, work: Callable[[], None], home: torch.device | None) -> None:
        """Run `work` after all that lanes have queued, and before all that they will queue."""
        for lane in self.all:
            lane.streams.be_waited_for()
        wait_for_moment(self._changed)  # of another thread, perhaps, on other streams
        work()
        devices = {home, *(lane.device for lane in self.all)}
        self._changed = moment_of(filter(None, devices), shared=False)
        for lane in self.all:
            lane.streams.wait_next(self._changed)

    def close(self) -> None:
        """End the threads once they have finished what was sent to them. May be called again."""
        if self.pid != getpid():  # there, another thread's hold on the lock would never end
            self._end.detach()
            self.is_open = False
            return
        with self._queueing:
            self.is_open = False
        if self._end.alive:
            _end_threads(self.all)
            # Last: after Ctrl-C in the middle, the finalizer or another `close` ends the rest
            self._end.detach()
            for lane in self.all:
                lane.streams.be_waited_for()

    def _start(self, lanes: Sequence[Lane]) -> None:
        # A lane sets the count for new threads too: leaving the block restores it
        with intra_op_threads(None):
            for lane in lanes:
                if lane.thread is None:
                    lane.start(self._threads)


def _run_holding(locks: Sequence[threading.Lock], work: Callable[[], None]) -> None:
    """Run `work` with all locks held.

    Each lock has a `with` statement of its own: up to Python 3.13, Python does not look for Ctrl-C
    between a lock and its block. Python 3.14 does, and may leave the lock held (docs/versions.md).
    An ExitStack has a moment when a lock is held and not yet noted, in any release.
    """
    if not locks:
        work()
        return
    with locks[0]:
        _run_holding(locks[1:], work)


def _end_threads(lanes: Sequence[Lane], patience: float | None = None) -> None:
    for lane in lanes:
        lane.inbox.put(None)
    until = None if patience is None else monotonic() + patience
    for lane in lanes:
        thread = lane.thread
        if thread is None or thread is threading.current_thread():
            continue
        timeout = None if until is None else max(0.0, until - monotonic())
        with suppress(RuntimeError):  # an interrupt came while it started: it ends by itself
            thread.join(timeout)


# Inherited by lanes from the caller


class Modes(NamedTuple):
    """The modes of one thread at one moment, to be entered in a lane.

    Immutable; any number of threads may use it at once.

    A new thread starts with torch's defaults: gradients on, no inference mode, no autocast, no
    default device, an empty context. `autocast` has the kinds of devices with autocast, and their
    dtypes.
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    autocast_cache: bool
    default_device: torch.device | None
    context: contextvars.Context

    @classmethod
    def capture(cls, kind: str) -> Modes:
        """Return the calling thread's modes; autocast for the CPU and for that kind of device."""
        kinds = [*filter(torch.is_autocast_enabled, _kinds_with_autocast(kind))]
        dtypes = map(torch.get_autocast_dtype, kinds)
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple(zip(kinds, dtypes, strict=True)),
            autocast_cache=torch.is_autocast_cache_enabled(),
            default_device=_default_device() if count_function_modes() else None,
            context=contextvars.copy_context(),
        )

    def run(self, work: Callable[[], Any], device: torch.device, home: torch.device | None) -> Any:
        """Run `work` in this thread under these modes, and restore the thread's own.

        If the default device is the model's home, it means "where the model is", which in a lane is
        the lane's device. No default device is the CPU, so the same holds for a model on the CPU.
        """
        default_device = self.default_device
        is_away = home is not None and device != home
        if is_away and (default_device or _CPU) == home:
            default_device = device
        context = self.context.copy()  # a context can be entered by one thread at a time
        # torch changes the mode when it makes the guard, whose exit restores the grad mode too. If
        # Ctrl-C comes before the assignment, no one holds the guard, and it ends
        guard = InferenceMode(self.inference)
        try:
            set_grad_enabled(self.grad)
            for kind, dtype in self.autocast:
                autocast = torch.autocast(kind, dtype, cache_enabled=self.autocast_cache)
                work = partial(_run_in, autocast, work)
            if default_device is not None:
                work = partial(_run_in, default_device, work)
            return context.run(work)
        finally:
            guard.__exit__(None, None, None)


def _run_after(earlier: Sequence[Lane], work: Callable[[], Any]) -> Any:
    """Run `work` on the current streams, after all that other lanes have queued."""
    for lane in earlier:
        lane.streams.be_waited_for()
    return work()


def _run_in(mode: AbstractContextManager[Any], work: Callable[[], Any]) -> Any:
    with mode:
        return work()


def without_autocast(kind: str) -> AbstractContextManager[Any]:
    """Leave autocast on the CPU and on that kind of device, until the returned context ends."""
    kinds = [*filter(torch.is_autocast_enabled, _kinds_with_autocast(kind))]
    return _without_autocast(kinds) if kinds else nullcontext()


@contextmanager
def _without_autocast(kinds: Sequence[str]) -> Iterator[None]:
    """Leave autocast, each kind by a `with` of its own: an ExitStack may lose one to Ctrl-C."""
    if not kinds:
        yield
        return
    with torch.autocast(kinds[0], enabled=False), _without_autocast(kinds[1:]):
        yield


def _default_device() -> torch.device | None:
    """Return the innermost default device, if there is one."""
    devices = [mode.device for mode in function_modes() if isinstance(mode, DeviceContext)]
    return devices[-1] if devices else None


@functools.cache
def _kinds_with_autocast(kind: str) -> tuple[str, ...]:
    """Return the CPU and that kind if they have autocast."""
    kinds = ("cpu",) if kind == "cpu" else ("cpu", kind)
    return tuple(filter(torch.amp.is_autocast_available, kinds))


@contextmanager
def intra_op_threads(threads: int | None) -> Iterator[None]:
    """Let operators of the calling thread use that many threads inside the block.

    None lets them use as many as before.

    The count is that of the calling thread, and of threads that run their first operator later.
    Both are restored.
    """
    before = torch.get_num_threads()
    try:
        if threads is not None:
            torch.set_num_threads(threads)
        yield
    finally:
        torch.set_num_threads(before)
