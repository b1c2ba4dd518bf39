"""The lanes of a session: a thread for each, the parts of cut calls, and the modes of the caller.

Guarantees:

- A lane runs one part at a time: the thread that works in it holds ``lane.lock``.
- The caller runs lane 0's part, and then every part that no thread has begun. Parts that take
  turns are a group, which one thread runs in order.
- The outcome of a part reaches the caller whatever the part raises; the lane goes on.
- A part never waits for a lane: `here.lane` is set in it, and calls of the model run plainly. A
  part that waits for another thread blocks forever if that thread makes a call that lanes run.
- An interrupt drops the parts that have not started. A caller that waits for other parts leaves at
  once. A caller that is interrupted in a part first waits for the parts that run.
- Threads start when first needed. They end with `close`, with the last reference to the lanes, or
  with the interpreter.
- A forked child has no lanes: all calls run plainly there.

This file needs no interpreter lock. Several threads change these things alone:

- pieces of work, in a dict, list, or deque: ``pop`` gives each piece to one thread alone;
- attributes with a lock: the comment of the lock or of the attribute says so;
- flags that decide which thread does the work, never what is computed.

A cut call takes the first way, and whole calls take the second one::

    Lanes.run ──► CallParts ──► Lane.inbox ──► CallParts.__call__, in a lane's thread
        │             └───────────────────────────► CallParts.run
        └─────────────────────────────────────────► CallParts.run, in the caller's thread

    Lanes.send ──► a deque of calls ──► Lane.take ──► the call

Each call takes one of them: for maps in place of comprehensions, see `call.py`.
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
from typing import Any, Literal, NamedTuple

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
# For the end of running parts when the program exits; a guess that no test has contradicted.
# Threads are daemons, so none blocks the exit for longer
_EXIT_PATIENCE_S = 5.0
_DRAWS = (
    "lanes that share a random generator drew from it at the same time, so a seed does not "
    "reproduce this call. With torch.use_deterministic_algorithms(True), lanes run one after "
    "another, in order. If the call draws no random numbers, another thread did"
)


Turns = Literal["all", "device"] | None
"""The parts of a call that run one after another: all of them, those of each device, or none."""


class _Here(threading.local):
    """The lane that the calling thread works in; None outside of lanes."""

    # A default of the class: a read of an attribute that is not there takes a microsecond
    lane: Lane | None = None


here = _Here()


class Lane:
    """A place where parts and whole calls run, one at a time, and its thread.

    Attributes:
        device: The device of its tensors.
        label: The name of the device, or of the NeuronCore that the lane feeds.
        lock: Held by the thread that works in the lane. It protects the counters too.
        gate: Held by a whole call, from its look at `Calls.holds_whole_calls` to its end.
        inbox: Functions that the thread calls with the lane; None ends the thread.
        own: Whole calls for this lane alone, oldest first.
        is_taking: True while its thread runs whole calls, or is about to. Changed with `queueing`
            held.
        thread: None until it is first needed.
    """

    def __init__(
        self,
        index: int,
        device: torch.device,
        label: str,
        shared: deque[Any],
        queueing: threading.Lock,
    ) -> None:
        """`shared` are whole calls for any lane. A thread that adds one holds `queueing`."""
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
        """A key that sorts lanes: at work now, calls on the device, tasks so far."""
        return self.lock.locked(), self.streams.count_unfinished(), self.tasks

    def start(self, threads: int | None) -> None:
        """Start the lane's thread, and wait until it has set its count of intra-op threads.

        With None for `threads`, torch decides the count.
        """
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
            with suppress(IndexError):  # the new thread serves, in spite of the error
                right_to_serve.pop()
                self.thread = None
            raise
        ready.wait()

    def take(self, _: Lane) -> None:
        """Run whole calls, the oldest first, until none waits.

        If other work comes into the inbox, that runs before the next whole call. The argument is
        this lane, as for all work from the inbox.
        """
        while True:
            try:
                call = (self.own or self._shared).popleft()
            except IndexError:  # no call waits, or another lane was quicker
                # `Lanes.send` adds a call and looks for an idle lane under this lock. So either
                # this thread finds the call, or the sender finds this lane idle
                with self._queueing:
                    if not (self.own or self._shared):
                        self.is_taking = False
                        return
                continue
            call(self)
            del call  # from here on, the lane keeps nothing of the call alive
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
        except IndexError:  # the thread that started this one has given up
            return
        if threads is not None:
            # A read first: otherwise, the thread's first parallel operator undoes the setting
            torch.get_num_threads()
            torch.set_num_threads(threads)
        # For good: callbacks of futures run in this thread too, and must not wait for lanes
        here.lane = self
        ready.set()
        while (work := self.inbox.get()) is not None:
            work(self)
            del work  # else a lane that waits in `get` would keep the tensors of the call alive
        # `close` lets the whole calls finish that were sent before it
        while self.own or self._shared:
            try:
                call = (self.own or self._shared).popleft()
            except IndexError:  # another lane was quicker
                continue
            call(self)


class CallParts:
    """The parts of one call, in groups.

    One thread runs a group in order. The caller runs each group that no thread has begun.

    Attributes:
        lanes: The lanes; part i belongs to lane ``i % len(lanes)``.
        tasks: One function per part.
        groups: The groups that no thread has begun. A key is the index of the lane that may run the
            group, and the value has the indices of its parts. A thread pops a group, and runs it.
        home: The device of the model; None for a model without tensors.
        moments: One per lane: the place on the device's streams after which its work begins. Empty
            for a call that has no work on streams.
        asleep: A stack of the lanes that are not woken yet: the last one is woken first.
        modes: The modes of the caller. Not set if all parts run in the caller, at home.
        outputs: One per part.
        errors: The indices of parts that failed, and their errors.
        countdown: A number per group, from 0 on. A thread pops one when a group has ended, and the
            thread that gets the 0 opens `done`. ``pop`` is one step, so no lock is needed.
        done: Locked until all groups have ended or were dropped.
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
        self.lanes = lanes  # not their `Lanes`: parts that wait in an inbox would keep it alive
        self.tasks = tasks
        self.asleep: list[Lane] = []
        self.groups = groups
        self.home = home
        self.moments = moments
        self.modes: Modes
        # Each thread writes the items of its own group. `done` opens after the last of them, so the
        # caller, which waits for `done`, sees all that the lanes have written
        self.outputs: list[Any] = [None] * len(tasks)
        self.errors: list[tuple[int, BaseException]] = []
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
        """Wake one lane, which wakes the next one.

        If parts are small, the caller has run most of them before a lane is awake, and the other
        threads sleep on. A lane that runs whole calls may come late, so the next lane is woken too.
        If the thread of a lane has ended, the caller runs its group.
        """
        with suppress(IndexError):  # no lane is asleep, or another thread has woken it
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
                    # The devices take turns too: each part waits for what earlier parts have queued
                    earlier = [self.lanes[other % len(self.lanes)] for other in group[:position]]
                    task = partial(_run_after, earlier, task)
            with lane.lock:  # Python looks for no signal between this line and the next (3.14 does)
                start, before = perf_counter_ns(), here.lane
                try:
                    here.lane = lane
                    if self.moments:
                        self.outputs[index] = lane.streams.run(task, self.moments[lane_index])
                    else:
                        self.outputs[index] = task()
                except BaseException as error:  # noqa: BLE001  # the caller raises it
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
        with suppress(KeyError):  # none is left
            while True:
                self.groups.popitem()
                is_last = self.countdown.pop() == 0
                if is_last:
                    self.done.release()


class Lanes:
    """The lanes of one session, or of one function. Thread-safe."""

    def __init__(
        self, devices: Sequence[torch.device], labels: Sequence[str] | None = None
    ) -> None:
        self._shared: deque[Any] = deque()  # whole calls for any lane, oldest first
        # `send` and `Lane.take` hold it, so that no call is left while a lane is idle. `close` and
        # the start of threads hold it too
        self._queueing = threading.Lock()
        lanes = []
        for index, device in enumerate(devices):
            label = str(device) if labels is None else labels[index]
            lanes.append(Lane(index, device, label, self._shared, self._queueing))
        self.all = tuple(lanes)
        self.count = len(self.all)
        self.backend: Backend = backend_of(devices[0].type)
        self.share_devices = len(set(devices)) < len(devices)
        self.pid = getpid()  # a forked child, with another one, has no lanes
        self.is_open = True
        # The intra-op threads of each lane; None leaves the count to torch
        self._threads = self.backend.intra_op_threads(len(devices))
        self._only_cpu = all(device.type == "cpu" for device in devices)
        # By number of parts and turns. No entry is changed: two threads at worst make the same one
        self._groups: dict[tuple[int, Turns], dict[int, tuple[int, ...]]] = {}
        self._changed: Moment = {}  # after the last change of the replicas, by device
        self._warns_of_draws = self.count > 1
        self._end = weakref.finalize(self, _end_threads, self.all, _EXIT_PATIENCE_S)

    # Parts of one call

    def run(
        self,
        tasks: Sequence[Callable[[], Any]],
        turns: Turns = None,
        home: torch.device | None = None,
        moments: Sequence[Moment] = (),
    ) -> tuple[list[Any], list[tuple[int, BaseException]]]:
        """Run task i in lane ``i % lanes``: tasks in `turns` in order, others at the same time.

        Tasks in turns may use all intra-op threads. `home` and `moments` are as in `CallParts`.

        Return the values, and the errors with the indices of their tasks.
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
        parts.tasks = ()  # the inbox of a busy lane may keep `parts` for long
        outputs, parts.outputs = parts.outputs, []
        return outputs, parts.errors

    def _run_parts(self, parts: CallParts, first: tuple[int, ...], others: Sequence[int]) -> None:
        """Run the first group, and each group that no thread has begun; wait for the rest.

        `others` are the lanes of the other groups.
        """
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
            while True:
                if parts.errors and parts.is_interrupted():
                    parts.drop()
                try:
                    index, group = parts.groups.popitem()  # the last one: its lane wakes last
                except KeyError:  # no group is left
                    break
                parts.modes.run(partial(parts.run, group), self.all[index].device, home)
            parts.done.acquire()
        except BaseException:
            parts.drop()
            raise

    def _group(self, key: tuple[int, Turns]) -> dict[int, tuple[int, ...]]:
        """Make the groups of a call with so many parts and these turns.

        Return them by the index of their first part, which is also the index of the lane.
        """
        count, turns = key
        groups: dict[Any, list[int]] = {}
        for index, lane in zip(range(count), cycle(self.all), strict=False):
            key_of_group: Any = lane.index
            if turns == "all":
                key_of_group = None  # one group for all parts
            elif turns == "device":
                key_of_group = lane.device
            groups.setdefault(key_of_group, []).append(index)
        found = self._groups[key] = {group[0]: tuple(group) for group in groups.values()}
        return found

    def read_generators(self) -> list[torch.Tensor] | None:
        """Return the states of the random generators that lanes share.

        None if there is a single lane, or if `warn_of_draws` has warned.
        """
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
        after = self.read_generators() or before  # None if another thread has warned in between
        if not all(map(torch.equal, before, after)):
            self._warns_of_draws = False
            warn_caller(_DRAWS)

    # Whole calls

    def send(self, call: Callable[[Lane], None], *, in_order: bool = False) -> None:
        """Queue a whole call for the lane that is free first; with `in_order`, for lane 0 alone.

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
            # No `while` in here: at Ctrl-C in its jump backward, Python 3.13 leaves the `with`
            # without a call of `__exit__`. A function that is called here may loop
            lanes = self.all[:1] if in_order else self.all
            idle = [*filterfalse(_is_taking, lanes)]
            chosen: Lane | None
            # On the CPU, idle lanes are alike
            if idle and self._only_cpu and not idle[0].lock.locked():
                chosen = idle[0]
            else:
                # A caller may be at work in the first, or its device may be behind
                chosen = min(idle, key=_load_of, default=None)
            if chosen is not None and chosen.thread is None:
                self._start([chosen])  # first: if no thread can start, the call is not queued
            queue = self.all[0].own if in_order else self._shared
            queue.append(call)
            if chosen is not None:
                # In this order: after Ctrl-C in between, the lane gets `take` a second time at most
                chosen.inbox.put(chosen.take)
                chosen.is_taking = True

    def list_queued(self) -> list[Any]:
        """Return the whole calls that no lane has begun, oldest first."""
        # Copies: other threads change a deque, which is copied in one step and read in several
        return [*self.all[0].own.copy(), *self._shared.copy()]

    # Changes of the replicas

    def run_idle(self, work: Callable[[], None], home: torch.device | None = None) -> None:
        """Run `work` while every lane is idle, and the devices are done with what lanes queued."""
        if not (self._only_cpu and home in (None, _CPU)):
            work = partial(self._run_between_streams, work, home)
        _run_holding([lane.lock for lane in self.all], work)

    def _run_between_streams(self, work: Callable[[], None], home: torch.device | None) -> None:
        """Run `work` after all that lanes have queued, and before all that they will queue."""
        for lane in self.all:
            lane.streams.be_waited_for()
        wait_for_moment(self._changed)  # another thread may have made it, on other streams
        work()
        devices = {home, *(lane.device for lane in self.all)}
        self._changed = moment_of(filter(None, devices), shared=False)
        for lane in self.all:
            lane.streams.wait_next(self._changed)

    # Threads

    @property
    def is_alive(self) -> bool:
        """False after `close`, and in a forked child."""
        return self.is_open and self.pid == getpid()

    def close(self) -> None:
        """End the threads once they have finished what was sent to them. May be called again."""
        if self.pid != getpid():
            # A forked child takes no lock: a thread of the parent may hold it, and is not here
            self._end.detach()
            self.is_open = False
            return
        with self._queueing:
            self.is_open = False
        if self._end.alive:
            _end_threads(self.all)
            # Last: after Ctrl-C above, the finalizer or another `close` ends the other threads
            self._end.detach()
            for lane in self.all:
                lane.streams.be_waited_for()

    def _start(self, lanes: Sequence[Lane]) -> None:
        """Start the threads of these lanes, where there is none yet."""
        # A lane that sets its count sets that of later threads too: the block restores it
        with intra_op_threads(None):
            for lane in lanes:
                if lane.thread is None:
                    lane.start(self._threads)


def _run_holding(locks: Sequence[threading.Lock], work: Callable[[], None]) -> None:
    """Run `work` with all locks held.

    Each lock has its own `with` statement: up to Python 3.13, Python does not look for Ctrl-C
    between a lock and its block. Python 3.14 does, and may leave the lock held (docs/versions.md).
    An ExitStack has a moment when a lock is held and not yet noted, in any release.
    """
    if not locks:
        work()
        return
    first, *others = locks
    with first:
        _run_holding(others, work)


def _end_threads(lanes: Sequence[Lane], patience: float | None = None) -> None:
    """End the threads of lanes, and wait for that: forever, or for `patience` seconds in all."""
    for lane in lanes:
        lane.inbox.put(None)
    until = None if patience is None else monotonic() + patience
    for lane in lanes:
        thread = lane.thread
        if thread is None or thread is threading.current_thread():
            continue
        timeout = None if until is None else max(0.0, until - monotonic())
        with suppress(RuntimeError):  # Ctrl-C came while it started: then it ends by itself
            thread.join(timeout)


# The modes of the caller, which lanes take over


class Modes(NamedTuple):
    """The modes of one thread at one moment, to be entered in a lane. Immutable.

    Lanes need them because a new thread starts with torch's defaults: gradients on, no inference
    mode, no autocast, no default device, an empty context. `autocast` has the kinds of devices with
    autocast, and their dtypes.
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

        `home` is the device of the model; None for a model without tensors. If the default device
        is the model's home, it means "where the model is": the device of the lane. Without a
        default device, that of torch is the CPU, so the same holds for a model on the CPU.
        """
        default_device = self.default_device
        is_away = home is not None and device != home
        if is_away and (default_device or _CPU) == home:
            default_device = device
        context = self.context.copy()  # two threads cannot be in one context at the same time
        # torch changes the mode when it makes the guard. Its exit restores the grad mode too. After
        # Ctrl-C before the assignment, no variable holds the guard, so it ends by itself
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
    """Run `work` on the current streams, after all that earlier lanes have queued."""
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
    """Leave autocast, each kind by its own `with`: an ExitStack may lose one to Ctrl-C."""
    if not kinds:
        yield
        return
    first, *others = kinds
    with torch.autocast(first, enabled=False), _without_autocast(others):
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

    None changes nothing. At the end of the block, the count is what it was before: for the calling
    thread, and for threads that run their first operator later.
    """
    before = torch.get_num_threads()
    try:
        if threads is not None:
            torch.set_num_threads(threads)
        yield
    finally:
        torch.set_num_threads(before)
