"""One device slot, the thread that serves it, and which one the calling thread is working in."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue
from time import monotonic, perf_counter_ns
from typing import TYPE_CHECKING, Any, NamedTuple

from parawrap.lanes._outcome import Outcome, capture
from parawrap.lanes._threads import settle

if TYPE_CHECKING:
    import torch

__all__ = ["PATIENCE_S", "Errand", "Lane", "Span", "Task", "current_lane"]

Task = Callable[[], Any]
Errand = Callable[[], object]


class _Here(threading.local):
    """What the calling thread is working in. The class has a value: to look for none takes a microsecond."""

    lane: Lane | None = None


_here = _Here()
PATIENCE_S = 0.05
_LONGEST_WAIT_S = 60.0
# The innermost Python frame of a thread that waits for another one (an event, a future, a queue, a thread's end) lies in
# here. One that computes is elsewhere, and so is one that waits in C (SimpleQueue.get): that one is given the longest wait.
_WAITING_ROOMS = (threading.__file__, queue.__file__)


class Span(NamedTuple):
    """One piece of work in a lane: when it ran, in nanoseconds of ``time.perf_counter_ns``."""

    lane: int
    start: int
    end: int


class Lane:
    """One device slot and, once work was sent to it, its thread. Lives as long as its pool; shared between threads.

    `device` is where its tensors lie; `label` is how it is told of, the device's name by default. Before its thread rests
    it calls `do_next`, which does one thing that waits for any lane, or says that there is none; `at_rest` tells of the
    thread that it must be woken for what comes then.
    """

    def __init__(
        self,
        index: int,
        device: torch.device,
        label: str | None = None,
        do_next: Callable[[Lane], bool] = lambda _: False,
    ) -> None:
        self.index = index
        self.device = device
        self.label = str(device) if label is None else label
        self.busy = threading.Lock()
        self._owner: int | None = None
        self.given = 0
        self.tasks = 0
        self.busy_ns = 0
        self.recorders: tuple[list[Span], ...] = ()
        self.inbox: SimpleQueue[Errand | None] = SimpleQueue()
        self._do_next = do_next
        self.at_rest = True
        self.thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"lane {self.index} on {self.label}"

    def look(self) -> bool:
        """Do one thing that waits for any lane, if there is one."""
        return self._do_next(self)

    def wake(self) -> None:
        """Have the thread look for what waits for any lane."""
        self.at_rest = False
        self.inbox.put(self.look)

    def occupy(self, task: Task) -> Outcome:
        """Run `task` in the calling thread as this lane's work."""
        mine = self.take()
        try:
            return self.run(task)
        finally:
            if mine:
                self.release()

    def run(self, task: Task) -> Outcome:
        """Run `task` in the calling thread, which has taken the lane."""
        before, _here.lane = current_lane(), self
        start = perf_counter_ns()
        try:
            return capture(task)
        finally:
            end = perf_counter_ns()
            _here.lane = before
            self.tasks += 1
            self.busy_ns += end - start
            for spans in self.recorders:
                spans.append(Span(self.index, start, end))

    def take(self) -> bool:
        """Wait until the calling thread has the lane for itself; whoever gets True gives it back with `release`.

        False where waiting might have no end: the thread that has the lane waits for another one, which may be the calling
        thread; or it has had it for very long. The lane is then shared, as a plain module is between threads.
        """
        if self.take_if_free():
            return True
        mine, until = False, monotonic() + _LONGEST_WAIT_S
        while not mine and not self.stuck() and monotonic() < until:
            mine = self.busy.acquire(timeout=PATIENCE_S)
        if mine:
            self._owner = threading.get_ident()
        return mine

    def take_if_free(self) -> bool:
        """As `take`, without waiting."""
        mine = self.busy.acquire(blocking=False)
        if mine:
            self._owner = threading.get_ident()
        return mine

    def release(self) -> None:
        """Give the lane back."""
        self._owner = None
        self.busy.release()

    def stuck(self) -> bool:
        """Whether the thread that has the lane waits for another thread, is this one, or is no more."""
        owner = self._owner
        if owner is None:  # nobody has it, or somebody is about to
            return False
        if owner == threading.get_ident():
            return True
        frame = sys._current_frames().get(owner)
        return frame is None or frame.f_code.co_filename in _WAITING_ROOMS

    def start(self, threads: int | None) -> None:
        """Start the lane's thread and wait until its figure of intra-op threads stands."""
        ready = threading.Event()
        name = f"parawrap-{self}"
        thread = threading.Thread(target=_serve, args=(self, threads, ready), name=name, daemon=True)
        thread.start()
        ready.wait()
        self.thread = thread


def current_lane() -> Lane | None:
    """The lane that the calling thread is working in."""
    return _here.lane


def _serve(lane: Lane, threads: int | None, ready: threading.Event) -> None:
    """A lane's thread: refers to its lane and not to the pool, so that an abandoned one can be collected."""
    if threads is not None:
        settle(threads)
    ready.set()
    while True:
        # Said before it looks: whoever has something for any lane after that wakes this one, or it is seen.
        lane.at_rest = True
        while lane.inbox.empty() and lane.look():
            lane.at_rest = True
        errand = lane.inbox.get()
        lane.at_rest = False
        if errand is None:
            break
        errand()
        del errand  # a waiting lane keeps nothing of the last call alive
        lane.look()  # in turn with what comes to this lane, so that neither waits for the other for ever
    while lane.look():
        pass
