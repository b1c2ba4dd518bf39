"""Lanes, and the pool that owns them.

Guarantees:

- A lane runs one task at a time: the thread that works in it holds ``lane.busy``.
- Tasks sent to a lane start in arrival order. Queued calls start in arrival order, each in the lane that is free first.
- The caller runs lane 0's task itself, and every other task runs in its lane's thread. If all tasks run in turns, the
  caller runs all of them, in lane order. If the tasks of each device do, the thread of the device's first lane runs them.
- The outcome of a task reaches the caller whatever the task raises; the lane lives on.
- A task never waits for a lane: `here.lane` is set in it, and the engine runs its calls plainly. A task that waits for
  another thread, which itself makes a call, waits forever; after 60 seconds the log shows where.
- An interrupted caller leaves at once. Its tasks that have not started are dropped.
- Threads start when first needed. They end with `close`, with the pool's last reference, or with the interpreter.
- A forked child has no lanes: `LanePool.alive` is False there.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import chain
from operator import attrgetter
from queue import SimpleQueue
from time import monotonic, perf_counter_ns
from typing import Any, NoReturn

import torch

from parawrap.backends import Backend, backend_of, drop_own_frames, record_use
from parawrap.errors import SessionError, add_note
from parawrap.lanes._device_order import DeviceOrder, Task
from parawrap.lanes._first_failure import TaskOutcome, raise_first_failure
from parawrap.lanes._lane_streams import LaneFuture, Reached
from parawrap.lanes._thread_modes import Modes, intra_op_threads, sees_only_its_own_thread, settle
from parawrap.lanes._turns import Turns, TurnsOf
from parawrap.tree import flatten

__all__ = ["Lane", "LanePool", "Task", "here"]

Errand = Callable[["Lane"], None]
_Group = list[tuple["Lane", Task]]
"""The tasks that one thread runs one after another."""

_thread_of = attrgetter("thread")
_LOG = logging.getLogger("parawrap.lanes")
_LONG_WAIT_S = 60.0  # between two looks for a dead thread; a notification ends the wait before
_EXIT_PATIENCE_S = 5.0  # at the exit of the program; threads are daemons, so none blocks it
_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)


class _Here(threading.local):
    """The lane that the calling thread works in. The class has a value because looking for none takes a microsecond."""

    lane: Lane | None = None


here = _Here()


class Lane:
    """One device slot and, once a task was sent to it, its thread. Lives as long as its pool; shared between threads.

    `device` is where its tensors lie; `label` names it, by the device by default. `resting` is True while its thread must
    be woken for a queued call.
    """

    def __init__(self, index: int, device: torch.device, label: str | None = None) -> None:
        self.index = index
        self.device = device
        self.label = str(device) if label is None else label
        self.busy = threading.Lock()
        self.inbox: SimpleQueue[Errand | None] = SimpleQueue()
        self.resting = True
        self.given = 0
        self.tasks = 0
        self.busy_ns = 0
        self.thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"lane {self.index} on {self.label}"

    def run(self, task: Task) -> TaskOutcome:
        """Run `task` in the calling thread, as this lane's work."""
        if not self.busy.acquire(blocking=False):
            self.wait_until_idle()
        before, here.lane = here.lane, self
        start = perf_counter_ns()
        try:
            return TaskOutcome(task())
        except BaseException as error:  # noqa: BLE001  # a lane outlives its tasks
            drop_own_frames(error)
            return TaskOutcome(error=error)
        finally:
            here.lane = before
            self.tasks += 1
            self.busy_ns += perf_counter_ns() - start
            self.busy.release()

    def wait_until_idle(self) -> None:
        """Take the lane's lock once its work is done, and log a long wait."""
        if not self.busy.acquire(timeout=_LONG_WAIT_S):
            _log_wait(f"{self} has been busy", [self])
            self.busy.acquire()

    def start(self, threads: int | None, backlog: deque[Errand]) -> None:
        """Start the lane's thread, and wait until its count of intra-op threads is set."""
        ready = threading.Event()
        name = f"parawrap-{self}"
        thread = threading.Thread(target=_serve, args=(self, backlog, threads, ready), name=name, daemon=True)
        self.thread = thread  # before the wait: an interrupt must not cause a second one
        thread.start()
        ready.wait()


def _serve(lane: Lane, backlog: deque[Errand], threads: int | None, ready: threading.Event) -> None:
    """Run a lane's thread. It refers to its lane and not to the pool, so an abandoned pool can be collected."""
    if threads is not None:
        settle(threads)
    here.lane = lane  # for good: callbacks of futures run in this thread too, and must not wait for lanes
    ready.set()
    while True:
        lane.resting = True  # before the look into the backlog: a later call wakes this lane, an earlier one is seen
        try:
            errand = lane.inbox.get(block=not backlog)
        except queue.Empty:
            errand = _look
        lane.resting = False
        if errand is None:
            break
        errand(lane)
        del errand  # a waiting lane keeps nothing of its last call alive
        if backlog:
            _run_oldest(backlog, lane)  # in turn with the lane's own tasks, so that neither kind starves
    while _run_oldest(backlog, lane):
        pass


def _look(lane: Lane) -> None:
    """Do nothing; the lane then looks into the backlog."""


def _run_oldest(backlog: deque[Errand], lane: Lane) -> bool:
    try:
        errand = backlog.popleft()
    except IndexError:
        return False
    errand(lane)
    return True


class _Call:
    """A cut call: the tasks of each thread, and a place for an outcome per lane.

    If it is `dropped`, lanes do not start its tasks. A lane may sleep for long before its next line. So it holds nothing of
    the call after the caller has the outcome.
    """

    __slots__ = ("done", "dropped", "groups", "missing", "outcomes")

    def __init__(self, groups: Sequence[_Group]) -> None:
        self.groups = {group[0][0].index: group for group in groups}
        self.outcomes: list[TaskOutcome] = [TaskOutcome()] * sum(map(len, groups))
        self.missing = list(range(len(groups) - 1))  # one entry per thread but the caller's; the last to take one takes 0
        self.done = threading.Lock()
        self.done.acquire()
        self.dropped = False

    def __call__(self, lane: Lane) -> None:
        """Run the tasks of a lane's thread."""
        self.run_group(lane.index)
        done, was_last = self.done, self.missing.pop() == 0
        del self
        if was_last:
            done.release()

    def run_group(self, index: int) -> None:
        """Run the tasks of one thread in order. The first failure ends them."""
        for lane, task in self.groups.pop(index):
            if self.dropped:
                return
            self.outcomes[lane.index] = lane.run(task)
            if self.outcomes[lane.index].error is not None:
                return


class _Queued:
    """A call that one lane runs whole. Its task gets the lane, and returns a value and what to wait for on the device."""

    __slots__ = ("_future", "_task")

    def __init__(self, task: Callable[[Lane], tuple[Any, Reached]], future: LaneFuture) -> None:
        self._task = task
        self._future = future

    def __call__(self, lane: Lane) -> None:
        task, future = self._task, self._future
        del self._task, self._future
        future.lane = lane.index
        if not future.set_running_or_notify_cancel():
            return
        outcome = lane.run(partial(task, lane))
        del task
        try:
            if outcome.error is None:
                future.land(*outcome.value)
            else:
                add_note(outcome.error, f"in {lane}")
                future.set_exception(outcome.error)
        except BaseException:  # noqa: BLE001  # a callback that exits does not end the lane
            threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
        finally:
            del outcome, future  # the frames in the error's traceback lead back to this one


class LanePool:
    """The lanes of one session. Any number of threads may use it at once.

    A thread that runs the model itself holds `model_lock`, and so does work that must not run at the same time. Tasks of
    lanes never take it.
    """

    def __init__(
        self, devices: Sequence[torch.device], home: torch.device | None = None, labels: Sequence[str] | None = None
    ) -> None:
        names = [None] * len(devices) if labels is None else labels
        self.lanes = tuple(
            Lane(index, device, name) for index, (device, name) in enumerate(zip(devices, names, strict=True))
        )
        self.backend: Backend = backend_of(devices[0].type)
        self.threads = self.backend.intra_op_threads(len(devices))
        self._places = DeviceOrder(self.backend, self.lanes, home)
        self._turns = Turns(devices)
        self._backlog: deque[Errand] = deque()
        self._gate = threading.Lock()
        self._forks = _forks
        self.model_lock = threading.RLock()
        self._on_model = 0  # the thread that runs the model itself
        self._end = weakref.finalize(self, _abandon, self.lanes, self._places)
        self.closed = False

    @property
    def home(self) -> torch.device | None:
        """The device of the model."""
        return self._places.home

    @home.setter
    def home(self, device: torch.device | None) -> None:
        self._places.home = device

    @property
    def forked(self) -> bool:
        """True in a forked child of the process that made the pool: threads that held its locks do not exist there."""
        return self._forks != _forks

    @property
    def alive(self) -> bool:
        """False after `close`, and in a forked child."""
        return not self.closed and self._forks == _forks

    def is_ready(self) -> bool:
        """True if a call of this thread may go to the lanes.

        Not inside a lane or a plain call, after `close`, or while it is traced.
        """
        if here.lane is not None or not self.alive or self._on_model == threading.get_ident():
            return False
        return not (sees_only_its_own_thread() or self.backend.is_capturing())

    def run(
        self,
        tasks: Sequence[Task],
        modes: Modes,
        sources: Collection[torch.device] = (),
        *,
        turns: TurnsOf | None = None,
    ) -> list[TaskOutcome]:
        """Run task i in lane i, at the same time or in `turns`, and return all outcomes.

        `sources` are further devices with data of the caller that the tasks use. A profiler records the calling thread
        alone, so all tasks run in turns under one. In turns, the first failure ends the tasks that would follow, and each
        task may use all intra-op threads.
        """
        with intra_op_threads(None if turns else self.threads):
            if self._places.only_cpu and not sources:
                return self._run_groups(self._group_tasks(tasks, modes, turns))
            lanes = self.lanes[: len(tasks)]
            try:
                return self._run_groups(self._group_tasks(self._places.place_tasks(lanes, tasks, sources), modes, turns))
            finally:
                if not modes.grad:
                    self._places.wait_for(lanes)

    def apply(self, tasks: Sequence[Task], leaves: Sequence[Any] = ()) -> list[Any]:
        """Run task i in lane i, under the modes of the caller, and return their values in lane order.

        If one of `leaves`, the arguments of all tasks, requires gradients, lanes that share a device run in turns.

        Raises:
            BaseException: If a lane fails: the error of the first such lane, with a note on lane, device, and shard. All
                other lanes have finished.
        """
        turns = self._turns.decide(leaves, (), learns=False, target=None)
        generators = [] if turns else self._turns.read_generators()
        outcomes = self.run(tasks, Modes.capture(self.backend.type), turns=turns)
        raise_first_failure(outcomes, self.lanes)
        self._turns.warn_of_draws(generators)
        values = [outcome.value for outcome in outcomes]
        if not self._places.only_cpu:
            record_use(flatten(values)[0])
        return values

    def _group_tasks(self, tasks: Sequence[Task], modes: Modes, turns: TurnsOf | None) -> list[_Group]:
        """Return the tasks of each thread, each under the modes of the caller."""
        home = self._places.home
        groups: dict[object, _Group] = {}
        for lane, task in zip(self.lanes, tasks, strict=False):
            if lane.index or home not in (None, lane.device):  # else the caller's modes are in force as they are
                task = partial(modes.run, task, lane.device, home)  # noqa: PLW2901
            key = None if turns == "all" or modes.profiling else lane.device if turns == "device" else lane
            groups.setdefault(key, []).append((lane, task))
        return [*groups.values()]

    def _run_groups(self, groups: Sequence[_Group]) -> list[TaskOutcome]:
        """Run the first group in the calling thread, and every other group in the thread of its first lane.

        The caller sets how many intra-op threads its own tasks have.
        """
        call = _Call(groups)
        if len(groups) > 1:
            leaders = [lane for (lane, _), *_ in groups[1:]]
            with self._gate:  # nothing is put behind the word that ends a lane
                if not self.alive:
                    return self._run_groups([list(chain.from_iterable(groups))])
                if None in map(_thread_of, leaders):
                    self._start(leaders)
                for lane in leaders:
                    lane.inbox.put(call)
        try:
            call.run_group(0)
            error = call.outcomes[0].error
            call.dropped = error is not None and not isinstance(error, Exception)  # Ctrl-C or an exit
            del error
            if len(groups) > 1 and not call.done.acquire(timeout=_LONG_WAIT_S):
                _log_wait("a call has been waiting for its lanes", self.lanes)
                call.done.acquire()
        except BaseException:
            call.dropped = True
            raise
        outcomes, call.outcomes = call.outcomes, []  # a lane may still refer to the call
        return outcomes

    def least_loaded(self) -> Lane:
        """Return the lane with the least pending work; among equals, the lane with the fewest tasks so far."""
        return min(self.lanes, key=self._load)

    def submit(
        self,
        lane: Lane,
        task: Task,
        modes: Modes,
        stage: Callable[[], object] | None = None,
        sources: Collection[torch.device] = (),
    ) -> LaneFuture:
        """Run `task` whole in that lane's thread, behind earlier tasks. `sources` as in `run`.

        `stage` runs before it; if the device can, next to the lane's earlier work.
        """
        future = LaneFuture()
        work = partial(modes.run, self._places.stage_task(lane, task, stage, sources), lane.device, self.home)
        errand = _Queued(lambda _: work(), future)
        lane.given += 1
        if modes.profiling:
            errand(lane)
            return future
        with self._gate:
            if not self.alive:
                self._refuse_closed()
            self._start((lane,))
            lane.inbox.put(errand)
        return future

    def submit_to_any(self, task: Callable[[Lane], Any], modes: Modes) -> LaneFuture:
        """Run `task` whole in the lane that is free first, oldest task first. It gets the lane.

        For lanes on the CPU, and tasks that bring nothing there.
        """
        future = LaneFuture()
        errand = _Queued(partial(_run_in, task, modes, self._places.home), future)
        if modes.profiling:
            errand(self.lanes[0])
            return future
        with self._gate:
            if not self.alive:
                self._refuse_closed()
            self._backlog.append(errand)
            chosen = None
            for lane in self.lanes:
                if lane.resting and (chosen is None or chosen.busy.locked()):  # a caller may be at work in it
                    chosen = lane
            if chosen is not None:
                if chosen.thread is None:
                    self._start((chosen,))
                chosen.resting = False
                chosen.inbox.put(_look)
        return future

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Keep every lane idle inside the block, and the devices done with what lanes queued."""
        with ExitStack() as held:
            for lane in self.lanes:
                lane.wait_until_idle()
                held.callback(lane.busy.release)
            with self._places.changing():
                yield

    def run_on_model(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function that runs the model itself, while the first lane is idle.

        Inside a lane, inside another such call of the same thread, and in a forked child, it does not wait.
        """
        first, thread = self.lanes[0], threading.get_ident()
        if here.lane is not None or self._on_model == thread or self.forked:
            return function(*args, **kwargs)
        with self.model_lock:
            if not first.busy.acquire(blocking=False):
                first.wait_until_idle()
            self._on_model = thread
            try:
                return function(*args, **kwargs)
            finally:
                self._on_model = 0
                first.busy.release()

    def close(self) -> None:
        """End the threads once they have finished what was sent to them. May be called again."""
        if self.forked:  # there, another thread's hold on the gate would never end
            self.closed = self._end.detach() is not None or self.closed
            return
        with self._gate:
            open_until_now = self._end.detach() is not None
            self.closed = True
        if open_until_now:
            _end_threads(self.lanes)
            self._places.wait_for(self.lanes)
            self._places.end()

    def _load(self, lane: Lane) -> tuple[int, int]:
        return lane.inbox.qsize() + lane.busy.locked() + self._places.unfinished(lane), lane.given

    def _refuse_closed(self) -> NoReturn:
        msg = "the lanes are closed: call inside the `with` block, or make a new parallel(...)"
        raise SessionError(msg)

    def _start(self, lanes: Sequence[Lane]) -> None:
        with intra_op_threads(1):  # a lane sets the count for new threads too: leaving the block restores it
            for lane in lanes:
                if lane.thread is None:
                    lane.start(self.threads, self._backlog)


def _run_in(task: Callable[[Lane], Any], modes: Modes, home: torch.device | None, lane: Lane) -> tuple[Any, Reached]:
    return modes.run(partial(task, lane), lane.device, home), ()


def _log_wait(what: str, lanes: Sequence[Lane]) -> None:
    """Log where the threads of lanes are, once a wait is long."""
    frames = sys._current_frames()
    idents = [(lane, lane.thread.ident) for lane in lanes if lane.thread is not None and lane.thread.ident is not None]
    stacks = [f"{lane}:\n{''.join(traceback.format_stack(frames[ident]))}" for lane, ident in idents if ident in frames]
    _LOG.warning(
        "%s for %d s. A model must not wait for another thread that calls it, or for another lane.\n%s",
        what,
        _LONG_WAIT_S,
        "\n".join(stacks),
    )


def _abandon(lanes: Sequence[Lane], places: DeviceOrder) -> None:
    """End what a pool that was never closed has started."""
    _end_threads(lanes, _EXIT_PATIENCE_S)
    places.end()


def _end_threads(lanes: Sequence[Lane], patience: float | None = None) -> None:
    for lane in lanes:
        lane.inbox.put(None)
    until = None if patience is None else monotonic() + patience
    for lane in lanes:
        if lane.thread is not None and lane.thread is not threading.current_thread():
            with suppress(RuntimeError):  # an interrupt came while it started: it ends by itself
                lane.thread.join(None if until is None else max(0.0, until - monotonic()))
