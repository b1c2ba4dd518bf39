"""Lanes in threads of this process, each with its own copy of one target."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch

from parawrap.engine._lane_calls import Entry, LaneCall, Record, WholeCall, timed
from parawrap.errors import ReplicaError
from parawrap.lanes import Lane, LaneFuture, LanePool, Modes, TaskOutcome, TurnsOf
from parawrap.replicas import LaneReplica, ReplicaSet

__all__ = ["ThreadPool"]


class ThreadPool:
    """The lanes of one target, and its copies for them. Any number of threads may use it at once.

    Raises:
        ReplicaError: If the target cannot be copied.
    """

    has_target_here = True
    shares_generators = True
    cuts_for_one_lane = False
    submit_chunk = None  # threads get no messages

    def __init__(self, target: Callable[..., Any], devices: Sequence[torch.device]) -> None:
        copies = ReplicaSet(target, devices)
        self._target = target
        self._copies = copies if copies.has_model or isinstance(target, torch.nn.Module) else None
        self._lanes = LanePool(devices, copies.home)
        self._uncopied = [LaneReplica(lane, target, _no_original) for lane in range(len(devices))]
        self._changing = threading.Lock()
        self._must_renew = False
        self.lanes = self._lanes.lanes
        self.backend = self._lanes.backend
        self.freshness = copies.freshness
        self._note_target(copies)

    @property
    def closed(self) -> bool:
        return self._lanes.closed

    def is_ready(self) -> bool:
        """True if a call of this thread may go to the lanes. A lazy module gets its shapes from its first, plain call."""
        copies = self._copies
        return self._lanes.is_ready() and (copies is None or copies.is_ready or copies.ready())

    def is_at_home(self, device: torch.device) -> bool:
        """True if the model runs plainly on that device: its tensors lie on it, or it has none."""
        return self._copies is None or self._copies.is_on(device)

    def refresh(self) -> list[LaneReplica]:
        """Bring every copy up to date with the target, and return them by lane.

        Raises:
            ReplicaError: If a copy cannot be made.
        """
        if self._copies is None:
            return self._uncopied
        with self._changing:
            if not self._is_stale(self._copies):
                return self._copies.current
        with self._lanes.model_lock, self._changing:  # no call that writes buffers is half done
            if self._is_stale(self._copies):
                if self._must_renew:
                    self._must_renew = False
                    self._copies.renew()
                with self._lanes.idle():
                    self._copies.refresh()
                self._note_target(self._copies)
            return self._copies.current

    def refresh_for_later(self) -> list[LaneReplica]:
        """Do the same for whole calls that run later: they raise if a parameter is written before they end."""
        copies = self.refresh()
        if self._copies is None:
            return copies
        self._copies.warn()  # of earlier calls: warnings of a lane's thread do not point at the user's line
        return self._copies.for_later()

    def renew(self) -> None:
        """Copy everything at the next refresh, also what looks unchanged. Never waits: a callback in a lane may call it."""
        self._must_renew = True

    def run(
        self, calls: Sequence[LaneCall], modes: Modes, sources: Collection[torch.device], turns: TurnsOf | None
    ) -> list[TaskOutcome]:
        """Run call i in lane i, at the same time or in `turns`. The buffers that lane 0 wrote go to the model.

        If the model has buffers, one call of several threads runs at a time, and plain calls wait: each must find what the
        one before has written. `sources` are further devices with data of the caller.

        Raises:
            ReplicaError: If no lane failed, and the lanes wrote different values into a buffer.
        """
        tasks, write_back = [partial(self._run_part, call) for call in calls], calls[0].copy.write_back
        if write_back is None:
            outcomes = self._lanes.run(tasks, modes, sources, turns=turns)
        else:
            with self._lanes.model_lock:
                outcomes = self._lanes.run(tasks, modes, sources, turns=turns)
                self._give_buffers(write_back, outcomes)
        if self._copies is not None:
            self._copies.warn()
        return outcomes

    def submit(self, call: WholeCall, copies: Sequence[LaneReplica], modes: Modes) -> LaneFuture:
        """Run a call whole: on the CPU in the first free lane, on other devices in the lane with the least work.

        There, `prepare` and the copies of the inputs run next to the earlier work of the lane.
        """
        if call.sources is None:
            return self._lanes.submit_to_any(partial(self._run_whole, call, copies), modes)
        lane = self._lanes.least_loaded()
        run, place = partial(self._run_placed, call, copies[lane.index], lane), partial(_place, call, lane)
        return self._lanes.submit(lane, run, modes, place, call.sources)

    def run_plainly(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any], record: Record | None) -> Any:
        """Run the target itself in this thread, while the first lane is idle."""
        function = entry.plain if record is None else partial(timed, record, None, entry.plain)
        if self._copies is None:
            return function(*args, **kwargs)
        try:
            return self._lanes.run_on_model(function, args, kwargs)
        finally:
            self._copies.ran_plainly()

    def cancel(self) -> None:
        """Do nothing: a lane finishes what it has started."""

    def close(self) -> None:
        """Let the lanes finish, end their threads, and drop the copies. A call in flight finishes too."""
        self._lanes.close()
        if self._copies is not None and not self._lanes.forked:
            with self._changing:
                self._copies.warn()
                self._copies.forget()

    def _is_stale(self, copies: ReplicaSet) -> bool:
        return self._must_renew or copies.stale()

    def _run_part(self, call: LaneCall) -> Any:
        if call.piece is not None:
            call.place(self.lanes[call.copy.lane].device)
        function = self._function(call.entry, call.copy)
        if call.record is None:
            return function(*call.args, **call.kwargs)
        return timed(call.record, call.copy.lane, function, *call.args, **call.kwargs)

    def _function(self, entry: Entry, copy: LaneReplica, *, whole: bool = False) -> Callable[..., Any]:
        if self._copies is None and copy.module is self._target:
            return entry.in_lane or entry.plain
        function = entry.of(copy.module)
        return copy.whole(function) if whole else copy.prepared(function)

    def _give_buffers(self, write_back: Callable[[], None], outcomes: Sequence[TaskOutcome]) -> None:
        with self._changing, self._lanes.idle():
            try:
                write_back()
            except ReplicaError:
                if all(outcome.error is None for outcome in outcomes):  # the error of a lane comes first
                    raise

    def _note_target(self, copies: ReplicaSet) -> None:
        """Note the device of the target, its random generators, and whether one of its tensors requires gradients."""
        self.home = self._lanes.home = copies.home
        self.generators, self.learns = copies.generators, copies.learns

    def _run_whole(self, call: WholeCall, copies: Sequence[LaneReplica], lane: Lane) -> Any:
        copy = copies[lane.index]
        if call.prepare is not None:
            call.make_arguments(lane.index)
        function = call.record_call(lane.index, self._function(call.entry, copy, whole=True))
        return call.finish(function(*call.args, **call.kwargs), call, copy, lane.index)

    def _run_placed(self, call: WholeCall, copy: LaneReplica, lane: Lane) -> Any:
        function = call.record_call(lane.index, self._function(call.entry, copy, whole=True))
        return call.finish(call.run_placed(function, lane.device), call, copy, lane.index)


def _place(call: WholeCall, lane: Lane) -> None:
    call.make_arguments(lane.index)
    call.place(lane.device)


def _no_original(value: Any) -> None:
    """Return None: a target that is not a module has no copies."""
