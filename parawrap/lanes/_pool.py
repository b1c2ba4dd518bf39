"""Lanes and the pool that owns them.

What this file guarantees:

- A lane runs one piece of work at a time: whoever works in it holds ``lane.busy``.
- What is sent to a lane is begun in order of arrival; so is what any lane may run, by whichever is free first.
- A caller runs lane 0 itself, and then whatever no lane has begun: it never waits for a thread that is still waking.
- A caller with a `Hand` in what it submits to any lane runs some of that as lane 0 while it waits, and nothing of others.
- Whatever work raises comes back as an :class:`Outcome`; the lane lives on.
- Work that runs in a lane never waits for a lane: `current_lane` tells, and the engine then runs plainly. A thread that
  such work waits for does not wait for that lane either: it shares it.
- A caller that is interrupted while it waits leaves at once; its work that has not begun is dropped, not run.
- Threads start when first needed and end with `close`, with the pool's last reference, or with the interpreter.
- After a fork the child has no lanes, and `LanePool.alive` says so.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from time import monotonic, perf_counter_ns
from typing import Any

import torch

from parawrap.backends import Backend, backend_of
from parawrap.errors import SessionError
from parawrap.lanes._backlog import Backlog, Hand, Whole
from parawrap.lanes._flight import Flight, Share
from parawrap.lanes._lane import PATIENCE_S, Errand, Lane, Task
from parawrap.lanes._modes import Modes
from parawrap.lanes._outcome import Outcome
from parawrap.lanes._pace import Paces
from parawrap.lanes._places import Places
from parawrap.lanes._profiled import fork, is_profiling
from parawrap.lanes._streams import LaneFuture, Reached
from parawrap.lanes._threads import intra_op_threads

__all__ = ["LanePool"]

_EXIT_PATIENCE_S = 5.0
_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)


class LanePool:
    """The lanes of one session. Any number of threads may use it at once.

    `may_try_alone` says that no task ever waits for another lane: the caller may then try whether it is done sooner alone.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        home: torch.device | None = None,
        labels: Sequence[str] | None = None,
        *,
        may_try_alone: bool = False,
    ) -> None:
        names = [None] * len(devices) if labels is None else labels
        self._backlog = Backlog()
        named = enumerate(zip(devices, names, strict=True))
        self.lanes = tuple(Lane(index, device, name, self._backlog.do_next) for index, (device, name) in named)
        self.backend: Backend = backend_of(devices[0].type)
        self._places = Places(self.backend, self.lanes, home)
        self.threads = self.backend.intra_op_threads(len(devices))
        self._gate = threading.Lock()
        self._paces = Paces(may_try_alone=may_try_alone)
        self._forks = _forks
        self._end = weakref.finalize(self, _abandon, self._places)

    @property
    def home(self) -> torch.device | None:
        """Where the module lies whose replicas the lanes run."""
        return self._places.home

    @home.setter
    def home(self, device: torch.device | None) -> None:
        self._places.home = device

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return not self._end.alive

    @property
    def alive(self) -> bool:
        """False after `close`, and in a process forked from the one that made the pool."""
        return self._end.alive and self._forks == _forks

    def run(
        self,
        tasks: Sequence[Task],
        kind: Hashable = None,
        sources: Collection[torch.device] = (),
        threads: int | None = None,
    ) -> list[Outcome]:
        """Run task i in lane i and wait for all of them. The caller runs the first, then what no lane has begun.

        Work of one `kind` is taken to last about as long each time. Where the caller alone was done sooner than the lanes
        would be, it begins the next call of that kind alone, and wakes the lanes only if that turns out wrong.

        `sources` are further devices on which the caller has something that the tasks use. `threads` is how many an
        operator may use in each lane, if not the pool's own figure.
        """
        flight = Flight(len(tasks))
        threads = threads or self.threads
        lanes = self.lanes[: len(tasks)]
        works = self._places.placed(lanes, tasks, sources)
        done, start = 0, perf_counter_ns()
        longest_ns = self._paces.longest_alone_ns(kind)
        try:
            with intra_op_threads(threads):
                if longest_ns or len(works) == 1:
                    done = self._run_alone(works, flight, longest_ns)
                if done < len(works):
                    self._run_together(works, flight, done, threads)
        finally:
            if not torch.is_grad_enabled():
                self._places.wait_for(lanes)
        if len(works) > 1:
            self._paces.note(kind, flight.first_ns, perf_counter_ns() - start, alone=done == len(works))
        return flight.take()

    def _run_alone(self, tasks: Sequence[Task], flight: Flight, longest_ns: int) -> int:
        """Run tasks in turn, in the calling thread, for as long as they are short; how many were run."""
        for slot, task in enumerate(tasks):
            if self._run_own(slot, task, flight) > longest_ns:
                return slot + 1
        return len(tasks)

    def _run_together(self, tasks: Sequence[Task], flight: Flight, first: int, threads: int | None) -> None:
        shares = self._send(tasks, flight, first + 1, threads)
        try:
            self._run_own(first, tasks[first], flight)
            if flight.outcomes[first].is_interrupt:  # kept in no variable: its traceback may hold this frame
                _drop(shares, flight)  # what has not begun need not
            for share in reversed(shares):  # the lane that was woken last is the last to begin
                if not share.lane.busy.locked() and share.claim():
                    share.do()
            while not flight.wait(PATIENCE_S):
                for share in shares:
                    # A pool that was closed meanwhile may never have sent the share.
                    if (not self.alive or share.lane.stuck()) and share.claim():
                        share.do()
        except BaseException:
            _drop(shares, flight)
            raise

    def _run_own(self, slot: int, task: Task, flight: Flight) -> int:
        """Run a task in the calling thread, in which its modes are in force already; the nanoseconds it took."""
        lane = self.lanes[slot]
        at_home = self.home is None or self.home == lane.device
        work = task if at_home else self._carried(lane, task, Modes.capture(self.backend.type))
        start = perf_counter_ns()
        flight.land(slot, lane.occupy(work))
        took = perf_counter_ns() - start
        if slot == 0:
            flight.first_ns = took
        return took

    def least_loaded(self) -> Lane:
        """The lane with least work before it; of several such, the one that has been given least."""
        return min(self.lanes, key=self._load)

    def submit(
        self, lane: Lane, task: Task, stage: Callable[[], object] | None = None, sources: Collection[torch.device] = ()
    ) -> LaneFuture:
        """Run `task` whole in that lane's own thread, behind what waits there. `sources` as in `run`.

        `stage` comes before it; where the device can, it runs beside the work that was submitted before.
        """
        future = LaneFuture()
        work = self._carried(lane, self._places.staged(lane, task, stage, sources), Modes.capture(self.backend.type))
        with self._gate:
            self._give(lane, partial(Whole(lambda _: work(), future).do, lane))
        return future

    def hand(self) -> Hand | None:
        """For a caller that submits to any lane and may work while it waits; none where there is but one lane."""
        return Hand(self._backlog, self.lanes[0], self.threads) if len(self.lanes) > 1 else None

    def submit_to_any(self, task: Callable[[Lane], Any], hand: Hand | None = None) -> LaneFuture:
        """Run `task` whole in the lane that is free first, oldest task first; it is told the lane.

        For lanes on the CPU, and tasks that have nothing to bring there. With a `hand` the caller may be that lane.
        """
        future = LaneFuture()
        call = Whole(partial(_run_in, task, Modes.capture(self.backend.type), self.home), future, hand)
        with self._gate:
            if is_profiling():
                lane = self.least_loaded()
                self._give(lane, partial(call.do, lane))
            else:
                self._refuse_closed()
                self._backlog.put(call)
                self._wake_one(self.lanes[1:] if hand is not None and hand.does_well_to_help() else self.lanes)
        return future

    @contextmanager
    def idle(self) -> Iterator[bool]:
        """For whoever changes what lanes work with: True when no lane works inside the block, nor a device for one.

        False when that cannot be had, because a lane waits for another thread, which may be the calling one.
        """
        with ExitStack() as held:
            alone = True
            for lane in self.lanes:
                if lane.take():
                    held.callback(lane.release)
                else:
                    alone = False
            with self._places.changing():
                yield alone

    def awaits_a_thread(self) -> bool:
        """Whether a lane works on something that waits for a thread; a call by that thread must not wait for the lane."""
        for lane in self.lanes:  # noqa: SIM110  # asked at every call: a loop costs half of what any() does
            if lane.busy.locked() and lane.stuck():
                return True
        return False

    def share_of_cores(self) -> intra_op_threads:
        """Inside the block the calling thread uses as many threads as a lane does, and leaves none of them spinning."""
        return intra_op_threads(self.threads)

    def close(self) -> None:
        """End the threads once they have finished what was sent to them. Calling it twice does no harm."""
        with self._gate:
            open_until_now = self._end.detach() is not None
        if open_until_now and self._forks == _forks:
            _end_threads(self.lanes)
            self._places.wait_for(self.lanes)
            self._places.end()

    def _send(self, tasks: Sequence[Task], flight: Flight, first: int, threads: int | None) -> list[Share]:
        """Hand the tasks from the `first` on to their lanes."""
        if first >= len(tasks):
            return []
        # Nothing that a lane is handed refers to the pool: it may be collected while a lane still wakes up.
        modes = Modes.capture(self.backend.type)
        lanes = self.lanes[: len(tasks)]
        shares = [
            Share(lanes[i], self._carried(lanes[i], tasks[i], modes), flight, i, threads) for i in range(first, len(tasks))
        ]
        with self._gate:  # nothing is put behind the word that ends a lane
            if self.alive:  # closed by another thread in the meantime: the caller runs what there is
                self._ensure_started(lanes[first:])
                for share in shares:
                    self._dispatch(share.lane, share)
        return shares

    def _give(self, lane: Lane, errand: Errand) -> None:
        self._ensure_started((lane,))
        lane.given += 1
        self._dispatch(lane, errand)

    def _wake_one(self, lanes: Sequence[Lane]) -> None:
        """See to it that one of these that rests looks at the backlog; one that does not will look before it rests."""
        lane = min(lanes, key=lambda lane: (not lane.at_rest, _queued(lane)))
        if lane.at_rest:
            self._ensure_started((lane,))
            lane.wake()

    def _dispatch(self, lane: Lane, errand: Errand) -> None:
        if is_profiling():
            fork(errand)
        else:
            lane.inbox.put(errand)

    def _carried(self, lane: Lane, task: Task, modes: Modes) -> Task:
        """The task under the caller's modes."""
        return partial(modes.run, task, lane.device, self.home)

    def _load(self, lane: Lane) -> tuple[int, int]:
        return _queued(lane) + self._places.unfinished(lane), lane.given

    def _refuse_closed(self) -> None:
        if not self.alive:
            msg = "the lanes are closed: call inside the `with` block, or make a new parallel(...)"
            raise SessionError(msg)

    def _ensure_started(self, lanes: Sequence[Lane]) -> None:
        self._refuse_closed()
        if all(lane.thread is not None for lane in lanes):
            return
        with intra_op_threads(1):  # a lane sets the figure for new threads too: leaving the block restores it
            for lane in lanes:
                if lane.thread is None:
                    lane.start(self.threads)


def _drop(shares: Sequence[Share], flight: Flight) -> None:
    """Have nobody begin what has not begun."""
    for share in shares:
        if share.claim():
            flight.land(share.slot, Outcome())


def _queued(lane: Lane) -> int:
    """How much is before the next piece of work, as far as the host knows: nothing where a lane rests."""
    return lane.inbox.qsize() + (lane.busy.locked() or not lane.at_rest)


def _run_in(task: Callable[[Lane], Any], modes: Modes, home: torch.device | None, lane: Lane) -> tuple[Any, Reached]:
    """The task in a lane under those modes; where all lies on the CPU, nothing is to be reached."""
    return modes.run(partial(task, lane), lane.device, home), ()


def _abandon(places: Places) -> None:
    """What becomes of a pool that nobody closed."""
    _end_threads(places.lanes, _EXIT_PATIENCE_S)
    places.end()


def _end_threads(lanes: Sequence[Lane], patience: float | None = None) -> None:
    for lane in lanes:
        lane.inbox.put(None)
    until = None if patience is None else monotonic() + patience
    for lane in lanes:
        if lane.thread is not None and lane.thread is not threading.current_thread():
            lane.thread.join(None if until is None else max(0.0, until - monotonic()))
