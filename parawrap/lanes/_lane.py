"""One device slot, the thread that serves it, and which one the calling thread is working in."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NamedTuple

from parawrap.lanes._outcome import Outcome, capture
from parawrap.lanes._threads import settle

if TYPE_CHECKING:
    import torch

__all__ = ["PATIENCE_S", "Errand", "Lane", "Span", "Task", "current_lane"]

Task = Callable[[], Any]
Errand = Callable[[], None]

_here = threading.local()
PATIENCE_S = 0.05
# The innermost Python frame of a thread that waits for another one lies in here; one that computes is elsewhere.
_WAITING_ROOMS = (threading.__file__, queue.__file__)


class Span(NamedTuple):
    """One piece of work in a lane: when it ran, in nanoseconds of ``time.perf_counter_ns``."""

    lane: int
    start: int
    end: int


class Lane:
    """One device slot and, once work was sent to it, its thread. Lives as long as its pool; shared between threads."""

    def __init__(self, index: int, device: torch.device) -> None:
        self.index = index
        self.device = device
        self.busy = threading.Lock()
        self._owner: int | None = None
        self.tasks = 0
        self.busy_ns = 0
        self.spans: list[Span] | None = None
        self.inbox: SimpleQueue[Errand | None] = SimpleQueue()
        self.thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"lane {self.index} on {self.device}"

    def occupy(self, task: Task) -> Outcome:
        """Run `task` in the calling thread as this lane's work."""
        mine = self.take()
        before, _here.lane = current_lane(), self
        start = perf_counter_ns()
        try:
            return capture(task)
        finally:
            end = perf_counter_ns()
            _here.lane = before
            self.tasks += 1
            self.busy_ns += end - start
            if self.spans is not None:
                self.spans.append(Span(self.index, start, end))
            if mine:
                self.release()

    def take(self) -> bool:
        """Wait until the calling thread has the lane for itself; whoever gets True gives it back with `release`.

        False, and no waiting, where the thread that has it waits for another one, which may be the calling thread: a
        forward pass that hands work to threads of its own, which call the model again. The lane is then shared, as a
        plain module is between threads.
        """
        mine = self.busy.acquire(blocking=False)
        while not mine and not self.stuck():
            mine = self.busy.acquire(timeout=PATIENCE_S)
        if mine:
            self._owner = threading.get_ident()
        return mine

    def release(self) -> None:
        """Give the lane back."""
        self._owner = None
        self.busy.release()

    def stuck(self) -> bool:
        """Whether the thread that works in the lane is itself waiting for another thread."""
        frame = sys._current_frames().get(self._owner) if self._owner is not None else None
        return frame is not None and frame.f_code.co_filename in _WAITING_ROOMS

    def start(self, threads: int | None) -> None:
        """Start the lane's thread and wait until its figure of intra-op threads stands."""
        ready = threading.Event()
        name = f"parawrap-{self}"
        self.thread = threading.Thread(target=_serve, args=(self.inbox, threads, ready), name=name, daemon=True)
        self.thread.start()
        ready.wait()


def current_lane() -> Lane | None:
    """The lane that the calling thread is working in."""
    lane: Lane | None = getattr(_here, "lane", None)
    return lane


def _serve(inbox: SimpleQueue[Errand | None], threads: int | None, ready: threading.Event) -> None:
    """A lane's thread: refers to its inbox alone, so that an abandoned pool can be collected."""
    if threads is not None:
        settle(threads)
    ready.set()
    while True:
        errand = inbox.get()
        if errand is None:
            return
        errand()
        del errand  # a waiting lane keeps nothing of the last call alive
