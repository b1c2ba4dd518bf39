"""Lanes, and the pool that owns them.

Guarantees:

- A lane runs one task at a time: the thread that works in it holds ``lane.busy``.
- Tasks sent to a lane start in arrival order. Queued calls start in arrival order, each in the lane that is free first.
- The caller runs lane 0's task itself, and every other task runs in its lane's thread. If tasks run in turns, the caller
  runs all of them, in lane order.
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
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import attrgetter
from queue import SimpleQueue
from time import monotonic, perf_counter_ns
from typing import Any, NoReturn

import torch

from parawrap.backends import Backend, backend_of
from parawrap.errors import SessionError
from parawrap.lanes._device_order import Places, Task
from parawrap.lanes._first_failure import Outcome, note
from parawrap.lanes._lane_streams import LaneFuture, Reached
from parawrap.lanes._thread_modes import Modes, intra_op_threads, settle

__all__ = ["Lane", "LanePool", "Task", "here"]

Errand = Callable[["Lane"], None]

_thread_of = attrgetter("thread")
_LOG = logging.getLogger("parawrap.lanes")
_LONG_WAIT_S = 60.0
_EXIT_PATIENCE_S = 5.0
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

    def run(self, task: Task) -> Outcome:
        """Run `task` in the calling thread, as this lane's work."""
        if not self.busy.acquire(blocking=False):
            self.wait_until_idle()
        before, here.lane = here.lane, self
        start = perf_counter_ns()
        try:
            return Outcome(task())
        except BaseException as error:  # noqa: BLE001  # a lane outlives its tasks
            # The first frame is this one, which tells a reader of the traceback nothing.
            return Outcome(error=error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))
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
    """A cut call: a task and a place for an outcome per lane. If it is `dropped`, lanes do not start its tasks.

    A lane may sleep for long before its next line. So it holds nothing of the call after the caller has the outcome.
    """

    __slots__ = ("done", "dropped", "missing", "outcomes", "tasks")

    def __init__(self, tasks: int) -> None:
        self.tasks: list[Task | None] = [None] * tasks
        self.outcomes: list[Outcome] = [Outcome()] * tasks
        self.missing = list(range(tasks - 1))  # one entry per lane but the caller's own; the last to take one takes 0
        self.done = threading.Lock()
        self.done.acquire()
        self.dropped = False

    def __call__(self, lane: Lane) -> None:
        """Run the task of a lane, in its thread."""
        task, self.tasks[lane.index] = self.tasks[lane.index], None
        if task is not None and not self.dropped:
            self.outcomes[lane.index] = lane.run(task)
        del task
        done, was_last = self.done, self.missing.pop() == 0
        del self
        if was_last:
            done.release()


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
                note(outcome.error, f"in {lane}")
                future.set_exception(outcome.error)
        except BaseException:  # noqa: BLE001  # a callback that exits does not end the lane
            threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
        finally:
            del outcome, future  # the frames in the error's traceback lead back to this one


class LanePool:
    """The lanes of one session. Any number of threads may use it at once."""

    def __init__(
        self, devices: Sequence[torch.device], home: torch.device | None = None, labels: Sequence[str] | None = None
    ) -> None:
        names = [None] * len(devices) if labels is None else labels
        self.lanes = tuple(
            Lane(index, device, name) for index, (device, name) in enumerate(zip(devices, names, strict=True))
        )
        self.backend: Backend = backend_of(devices[0].type)
        self.threads = self.backend.intra_op_threads(len(devices))
        self._places = Places(self.backend, self.lanes, home)
        self._backlog: deque[Errand] = deque()
        self._gate = threading.Lock()
        self._forks = _forks
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
    def alive(self) -> bool:
        """False after `close`, and in a forked child of the process that made the pool."""
        return not self.closed and self._forks == _forks

    def run(
        self, tasks: Sequence[Task], modes: Modes, sources: Collection[torch.device] = (), *, in_turns: bool = False
    ) -> list[Outcome]:
        """Run task i in lane i and return all outcomes. Tasks beyond the lanes run in the last one, one after another.

        `sources` are further devices with data of the caller that the tasks use. A profiler records the calling thread
        alone, so tasks run in turns under one. In turns, the first failure ends the call.
        """
        if self._places.only_cpu and not sources:
            return self._run(tasks, modes, in_turns=in_turns)
        lanes = self._lanes_of(tasks)
        try:
            return self._run(self._places.placed(lanes, tasks, sources), modes, in_turns=in_turns)
        finally:
            if not modes.grad:
                self._places.wait_for(lanes)

    def _run(self, tasks: Sequence[Task], modes: Modes, *, in_turns: bool) -> list[Outcome]:
        """Run the tasks at the same time, or in turns; the caller sets how many intra-op threads its own task has."""
        lanes, home = self.lanes[: len(tasks)], self._places.home
        first = tasks[0]
        if home is not None and home != lanes[0].device:  # else the caller's modes are in force as they are
            first = partial(modes.run, first, lanes[0].device, home)
        if in_turns or modes.profiling or len(tasks) == 1:
            return self._run_in_turns(tasks, first, modes)
        if len(tasks) > len(lanes):
            last = len(lanes) - 1
            outcomes = self._run([*tasks[:last], partial(_in_order, tasks[last:])], modes, in_turns=False)
            of_last = outcomes[-1]
            return outcomes if of_last.error else [*outcomes[:-1], *map(Outcome, of_last.value)]
        call = _Call(len(tasks))
        with self._gate:  # nothing is put behind the word that ends a lane
            if not self.alive:
                return self._run_in_turns(tasks, first, modes)
            if None in map(_thread_of, lanes[1:]):
                self._start(lanes[1:])
            for task, lane in zip(tasks[1:], lanes[1:], strict=True):
                call.tasks[lane.index] = partial(modes.run, task, lane.device, home)
                lane.inbox.put(call)
        try:
            call.outcomes[0] = lanes[0].run(first)
            error = call.outcomes[0].error
            call.dropped = error is not None and not isinstance(error, Exception)  # Ctrl-C or an exit
            del error
            if not call.done.acquire(timeout=_LONG_WAIT_S):
                _log_wait("a call has been waiting for its lanes", lanes)
                call.done.acquire()
        except BaseException:
            call.dropped = True
            raise
        outcomes, call.outcomes = call.outcomes, []  # a lane may still refer to the call
        return outcomes

    def _run_in_turns(self, tasks: Sequence[Task], first: Task, modes: Modes) -> list[Outcome]:
        """Run every task in the calling thread, in lane order, with all of its intra-op threads."""
        outcomes = [Outcome()] * len(tasks)
        for slot, (task, lane) in enumerate(zip(tasks, self._lanes_of(tasks), strict=True)):
            outcomes[slot] = lane.run(partial(modes.run, task, lane.device, self.home) if slot else first)
            if outcomes[slot].error is not None:
                break
        return outcomes

    def _lanes_of(self, tasks: Sequence[Task]) -> Sequence[Lane]:
        """The lane of each task; those beyond the lanes run in the last one."""
        return (*self.lanes, *self.lanes[-1:] * (len(tasks) - len(self.lanes)))[: len(tasks)]

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
        work = partial(modes.run, self._places.staged(lane, task, stage, sources), lane.device, self.home)
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

    def close(self) -> None:
        """End the threads once they have finished what was sent to them. May be called again."""
        if self._forks != _forks:  # in a child, where another thread's hold on the gate would never end
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


def _in_order(tasks: Sequence[Task]) -> list[Any]:
    return [task() for task in tasks]


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


def _abandon(lanes: Sequence[Lane], places: Places) -> None:
    """End what a pool that was never closed has started."""
    _end_threads(lanes, _EXIT_PATIENCE_S)
    places.end()


def _end_threads(lanes: Sequence[Lane], patience: float | None = None) -> None:
    for lane in lanes:
        lane.inbox.put(None)
    until = None if patience is None else monotonic() + patience
    for lane in lanes:
        if lane.thread is not None and lane.thread is not threading.current_thread():
            lane.thread.join(None if until is None else max(0.0, until - monotonic()))
