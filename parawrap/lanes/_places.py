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
from parawrap.lanes._streams import LaneStreams, Moment, Reached, moment_of, wait_for_moment

__all__ = ["Places", "Task"]

Task = Callable[[], Any]
"""The work of one lane."""


class Slot(Protocol):
    """A lane, as far as this file goes. Hashable by identity."""

    @property
    def device(self) -> torch.device: ...


class Places:
    """The streams of a pool's lanes. Any number of threads may use it at once; lives as long as a lane does.

    `home` is where the module lies whose replicas the lanes run, which may bring something there.
    """

    def __init__(self, backend: Backend, lanes: Sequence[Slot], home: torch.device | None) -> None:
        self.home = home
        self.lanes = lanes
        self._streams = {lane: LaneStreams(backend, lane.device) for lane in lanes}
        self.only_cpu = backend.type == "cpu"  # until something that lies elsewhere has to do with a lane
        self._changed: Moment = {}

    def placed(self, lanes: Sequence[Slot], tasks: Sequence[Task], sources: Collection[torch.device]) -> Sequence[Task]:
        """Each task on its lane's device and streams, after what the caller has queued."""
        moment = self._moment(sources, lanes, shared=torch.is_grad_enabled())
        if not moment:
            return tasks
        return [
            partial(self._streams[lane].run, task, self._as_it_concerns(lane, moment, sources))
            for lane, task in zip(lanes, tasks, strict=True)
        ]

    def staged(self, lane: Slot, task: Task, stage: Callable[[], object] | None, sources: Collection[torch.device]) -> Task:
        """The task, and the stage before it, in the same way; its value goes with what it is there after."""
        moment = self._moment(sources, [lane], shared=torch.is_grad_enabled())
        if not moment:
            return partial(_in_turn, stage, task)
        return partial(self._streams[lane].run_staged, task, stage, moment)

    def wait_for(self, lanes: Sequence[Slot]) -> None:
        """Have the calling thread's streams wait for what these lanes have queued until now."""
        if not self.only_cpu:
            for lane in lanes:
                self._streams[lane].be_waited_for()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """For whoever changes what lanes work with: after all that they have queued, and before all that they will."""
        self.wait_for(self.lanes)
        wait_for_moment(self._changed)  # of another thread, perhaps, on other streams
        yield
        self._changed = self._moment((), self.lanes, shared=False)
        if self._changed:
            for lane in self.lanes:
                self._streams[lane].wait_next(self._changed)

    def unfinished(self, lane: Slot) -> int:
        """How much of what the lane was given its device has yet to finish, beside what its thread has yet to begin."""
        return self._streams[lane].unfinished()

    def end(self) -> None:
        """Let others have the streams."""
        for streams in self._streams.values():
            streams.end()

    def _moment(self, sources: Collection[torch.device], lanes: Sequence[Slot], *, shared: bool) -> Moment:
        """Where the caller stands on each device that these lanes have to do with; empty where that is the CPU alone."""
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
