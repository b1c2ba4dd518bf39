"""Put the tasks of a pool's lanes on devices and streams, in the right order.

Knows devices and streams; knows no threads. If everything lies on the CPU, it does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch

from parawrap.backends import Backend
from parawrap.lanes._lane_streams import LaneStreams, Moment, Reached, moment_of, wait_for_moment

__all__ = ["DeviceOrder", "Task"]

Task = Callable[[], Any]
"""The work of one lane."""


class Slot(Protocol):
    """A lane, as far as this file goes. Hashable by identity."""

    @property
    def device(self) -> torch.device: ...


class DeviceOrder:
    """The streams of the lanes of one pool. Any number of threads may use it at once; lives as long as a lane does.

    `home` is the device of the model. Replicas in the lanes may bring gradients there.
    """

    def __init__(self, backend: Backend, lanes: Sequence[Slot], home: torch.device | None) -> None:
        self.home = home
        self.lanes = lanes
        self._streams = {lane: LaneStreams(backend, lane.device) for lane in lanes}
        self.only_cpu = backend.type == "cpu"  # until something that lies elsewhere has to do with a lane
        self._changed: Moment = {}

    def place_tasks(
        self, lanes: Sequence[Slot], tasks: Sequence[Task], sources: Collection[torch.device]
    ) -> Sequence[Task]:
        """Return tasks that run on the device and the streams of their lanes, after the work that the caller queued."""
        moment = self._moment(sources, lanes, shared=torch.is_grad_enabled())
        if not moment:
            return tasks
        return [
            partial(self._streams[lane].run, task, self._as_it_concerns(lane, moment, sources))
            for lane, task in zip(lanes, tasks, strict=True)
        ]

    def stage_task(
        self, lane: Slot, task: Task, stage: Callable[[], object] | None, sources: Collection[torch.device]
    ) -> Task:
        """Return the task, with the stage before it, in the same way. Its value is returned with events that it follows."""
        moment = self._moment(sources, [lane], shared=torch.is_grad_enabled())
        if not moment:
            return partial(_in_turn, stage, task)
        return partial(self._streams[lane].run_staged, task, stage, moment)

    def wait_for(self, lanes: Sequence[Slot]) -> None:
        """Make the streams of the calling thread wait for the work that these lanes have queued."""
        if not self.only_cpu:
            for lane in lanes:
                self._streams[lane].be_waited_for()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Change the data of lanes inside the block: after all work that they queued, and before all later work."""
        self.wait_for(self.lanes)
        wait_for_moment(self._changed)  # of another thread, perhaps, on other streams
        yield
        self._changed = self._moment((), self.lanes, shared=False)
        if self._changed:
            for lane in self.lanes:
                self._streams[lane].wait_next(self._changed)

    def unfinished(self, lane: Slot) -> int:
        """Return the number of tasks that the lane has started and its device has not finished."""
        return self._streams[lane].unfinished()

    def end(self) -> None:
        """Return the streams for use by other pools."""
        for streams in self._streams.values():
            streams.end()

    def _moment(self, sources: Collection[torch.device], lanes: Sequence[Slot], *, shared: bool) -> Moment:
        """Return the position of the caller in its streams, by device of these lanes; empty if that is the CPU alone."""
        home = self.home
        if self.only_cpu and not sources and (home is None or home.type == "cpu"):
            return {}
        self.only_cpu = False
        devices = dict.fromkeys([*sources, *(lane.device for lane in lanes)])
        return moment_of(devices if home is None else {home: None, **devices}, shared=shared)

    def _as_it_concerns(self, lane: Slot, moment: Moment, sources: Collection[torch.device]) -> Moment:
        """The moment without the devices of the other lanes."""
        return {device: mark for device, mark in moment.items() if device in (*sources, self.home, lane.device)}


def _in_turn(stage: Callable[[], object] | None, task: Task) -> tuple[Any, Reached]:
    if stage is not None:
        stage()
    return task(), ()
