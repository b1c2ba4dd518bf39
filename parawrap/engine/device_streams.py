"""The streams of a lane, and the order of its work and the caller's.

Guarantees, for devices that have streams:

- A lane's work starts after the work that the caller queued before the call. Work that the caller
  queues on the output starts after the lane's work. The host waits for neither.
- A lane's tasks run in the order of their start on the host, on any streams.
- Two lanes on one device overlap. If gradients are recorded, lanes work on the caller's streams
  instead: torch adds up gradients there, and warns of gradients from other streams.
- A lane on its own stream does not use torch's cache of autocast's casts: all threads share it, and
  no event orders it.
- The input of a whole call is copied during the lane's earlier calls. The host may run far ahead of
  a device. So that memory is bounded, a lane starts a call only if at most one earlier call is
  unfinished on the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch

from parawrap.backends import Stream, backend_of

T = TypeVar("T")
# Whole calls of a lane on the device: one runs while the input of the next one is copied. More
# would only take memory
_MOST_STAGED = 2


class Mark(NamedTuple):
    """A position on a stream of the caller.

    `event` completes when the work before the position is done. It is None if the lane is to work
    on this very stream.
    """

    stream: Stream
    event: Any | None = None


Moment = Mapping[torch.device, Mark | None]
"""The caller's position on each device when it made a call; None for a device without streams."""


Reached = Sequence[tuple[torch.device, Any]]
"""Devices, each with an event that completes when the work of a call is done there."""


def moment_of(devices: Iterable[torch.device], *, shared: bool) -> Moment:
    """Return the calling thread's moment on each of these devices but the CPU.

    With `shared`, lanes are to work on the thread's own streams.
    """
    moment: dict[torch.device, Mark | None] = {}
    for device in devices:
        if device.type == "cpu":
            continue
        stream = backend_of(device.type).stream(device)
        if stream is None:
            moment[device] = None
        elif shared:
            # A stream runs its work in order, without an event
            moment[device] = Mark(stream)
        else:
            moment[device] = Mark(stream, stream.record_event())
    return moment


def moments_of(
    lanes: Sequence[torch.device], sources: Iterable[torch.device | None]
) -> Sequence[Moment]:
    """Return the caller's moment for each lane, on the lane's device and on the sources.

    `lanes` are the devices of the lanes, and `sources` further devices that the calls may read
    from, or None. Return an empty sequence if all of them are the CPU.
    """
    read_by_all = {device for device in sources if device is not None}
    devices = read_by_all.union(lanes)
    if all(device.type == "cpu" for device in devices):
        return ()
    # One event per device serves all lanes: they wait for the same position of the caller
    moment = moment_of(devices, shared=torch.is_grad_enabled())
    moments = []
    for lane in lanes:
        # Without the devices of other lanes: this lane need not wait for them
        used = read_by_all | {lane}
        moments.append({device: mark for device, mark in moment.items() if device in used})
    return moments


def wait_for_moment(moment: Moment) -> None:
    """Have the calling thread's streams wait for a moment, which may be another thread's."""
    for device, mark in moment.items():
        if mark is None or mark.event is None:
            continue
        stream = backend_of(device.type).stream(device)
        if stream is not None:
            stream.wait_event(mark.event)


@cache
def _stream_of_lane(device: torch.device, lane: int, use: str) -> Stream:
    """Return the stream for one use, "work" or "copies", of the lanes with this index.

    All blocks share it, because torch keeps a workspace for each stream ever used. If two threads
    make the first call at the same time, each may get another stream. That does no harm: a lane
    orders its work on any streams.
    """
    stream = backend_of(device.type).new_stream(device)
    assert stream is not None, "a device with a current stream has others"
    return stream


class LaneStreams:
    """The streams of one lane: one per device of its work, and one for copies of inputs.

    The thread that has the lane uses it. Any thread may call `be_waited_for`, `wait_next`, and
    `count_unfinished`. `lane` is the index of the lane.
    """

    def __init__(self, device: torch.device, lane: int) -> None:
        self._backend = backend_of(device.type)
        self._device = device
        self._lane = lane
        # By device, the stream of the last task: the lane's own, or one that a caller shared
        self._last: dict[torch.device, Stream] = {}
        # By device, the mark after the last refresh of the replicas, until the next task takes it
        self._refresh_marks: dict[torch.device, Mark] = {}
        # The events of staged calls that the device may still work on, oldest first
        self._staged: deque[Reached] = deque()

    def run(self, work: Callable[[], T], moment: Moment) -> T:
        """Run `work` with the lane's device and streams current, after the caller's queued work."""
        with self._on(moment):
            return work()

    def run_staged(
        self, work: Callable[[], T], stage: Callable[[], object], moment: Moment, reached: list[Any]
    ) -> T:
        """Run `stage` during the lane's earlier work, and then `work`; return the value of `work`.

        `reached` is the caller's empty list. It gets an event per device that follows the work,
        also if the work raises: the device may still read tensors of the caller's.
        """
        while len(self._staged) >= _MOST_STAGED:
            # The host blocks until the oldest call is done
            for _, event in self._staged.popleft():
                event.synchronize()
        with self._on(moment) as streams:
            self._run_stage(stage, moment.get(self._device), streams)
            try:
                return work()
            finally:
                # Work that raised may have queued some of its kernels
                events = [(device, stream.record_event()) for device, stream in streams.items()]
                reached += events  # one step: a thread that reads the list sees all of them or none
                self._staged.append(reached)

    def count_unfinished(self) -> int:
        """Return the number of staged calls that the host has finished and the device has not."""
        if not self._staged:
            return 0
        unfinished = 0
        # Other threads call this to compare lanes. The copy is one step in C, so an append by the
        # lane's own thread does not disturb the loop
        for events in self._staged.copy():
            is_done = all(event.query() for _, event in events)
            if not is_done:
                unfinished += 1
        return unfinished

    def be_waited_for(self) -> None:
        """Have the calling thread's streams wait for all that the lane has queued until now."""
        # `list` copies in one step: the lane may begin to use a further device meanwhile
        for device, last in list(self._last.items()):
            stream = backend_of(device.type).stream(device)
            if stream is not None and stream != last:
                stream.wait_stream(last)

    def wait_next(self, moment: Moment) -> None:
        """Have the lane's next task wait for the moment after a refresh of the replicas.

        The task may have been sent before, with an earlier moment.
        """
        for device, mark in moment.items():
            if mark is not None:
                self._refresh_marks[device] = mark

    @contextmanager
    def _on(self, moment: Moment) -> Iterator[Mapping[torch.device, Stream]]:
        """Make the lane's streams current in the thread, after the moment. Yield the streams."""
        streams: dict[torch.device, Stream] = {}
        has_own_streams = False
        for device, mark in moment.items():
            if mark is not None:
                streams[device] = self._stream_after(device, mark)
                has_own_streams = has_own_streams or mark.event is not None
        devices = [device for device in moment if device != self._device]
        if self._device in moment:
            devices.append(self._device)  # last, so that it becomes the current device
        # After Ctrl-C between the entry of a context and its note in the stack, the generator of
        # `activate` is dropped, and ends its block itself
        with ExitStack() as active:
            for device in devices:
                backend = backend_of(device.type)
                active.enter_context(backend.activate(device, streams.get(device)))
            if has_own_streams:
                # First the callback: Ctrl-C in between must not leave the cache disabled. No event
                # orders the use of a cached cast after the kernel of another lane that writes it
                active.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
                torch.set_autocast_cache_enabled(False)
            yield streams

    def _stream_after(self, device: torch.device, mark: Mark) -> Stream:
        """Return the stream of the lane's next task on a device. It waits for all earlier work."""
        stream = mark.stream
        if mark.event is not None:
            stream = _stream_of_lane(device, self._lane, "work")
        last = self._last.get(device, stream)
        self._last[device] = stream
        # After the lane's last task: calls with and without gradients use different streams
        if last != stream:
            stream.wait_stream(last)
        # After the work that the caller queued before this call. The caller's stream has it already
        if mark.event is not None:
            stream.wait_event(mark.event)
        # After the last refresh, also if the moment of this call was read before it
        refresh_mark = self._refresh_marks.pop(device, None)
        if refresh_mark is not None and refresh_mark.event is not None:
            stream.wait_event(refresh_mark.event)
        if mark.event is None:
            # Any call of CUDA in this thread. Otherwise, its first call of cuBLAS warns
            stream.record_event()
        return stream

    def _run_stage(
        self, stage: Callable[[], object], mark: Mark | None, streams: Mapping[torch.device, Stream]
    ) -> None:
        """Run `stage` on a stream for copies, while the lane's stream may still be at work."""
        if mark is None or mark.event is None:  # without streams, or on the caller's stream
            stage()
            return
        copying = _stream_of_lane(self._device, self._lane, "copies")
        # The copies read tensors of the caller's, and none of the lane's earlier work
        copying.wait_event(mark.event)
        with self._backend.activate(self._device, copying):
            stage()
        # The work reads the copies
        streams[self._device].wait_stream(copying)
