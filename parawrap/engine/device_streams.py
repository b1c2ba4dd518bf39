"""The streams of a lane, and the order of its work and the caller's.

Guarantees, for devices that have streams:

- A lane's work starts after the work that the caller queued before the call. Work that the caller queues with the outcome
  starts after the lane's work. The host waits for neither.
- A lane's tasks run in the order of their start on the host, on any streams.
- Two lanes on one device overlap. If gradients are recorded, lanes work on the caller's streams instead: torch adds up
  gradients there, and warns of gradients from other streams.
- A lane on its own stream does not use torch's cache of autocast's casts: all threads share it, and no event orders it.
- The input of submitted work travels during the work before it. The host may run far ahead of a device, so a lane starts
  such work only when the work before the last one is done: memory is bounded.
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
_AHEAD = 2  # batches on the device: one runs while the next one is copied


class Mark(NamedTuple):
    """A stream of the caller, and an event after its queued work. Without an event, a lane shares the stream."""

    stream: Stream
    event: Any | None = None


Moment = Mapping[torch.device, Mark | None]
"""By device, the position of the caller when it made a call; None for a device without streams."""


Reached = Sequence[tuple[torch.device, Any]]
"""By device, an event that completes when a piece of work is done there."""


def moment_of(devices: Iterable[torch.device], *, shared: bool) -> Moment:
    """The calling thread's moment on each of these devices but the CPU."""
    streams = {device: backend_of(device.type).stream(device) for device in devices if device.type != "cpu"}
    return {
        device: None if stream is None else Mark(stream, None if shared else stream.record_event())
        for device, stream in streams.items()
    }


def moments_of(lanes: Sequence[torch.device], sources: Iterable[torch.device | None]) -> Sequence[Moment]:
    """Return the caller's moment, as it concerns a lane on each of these devices; nothing if all is on the CPU.

    `sources` are other devices with data for the calls, or None.
    """
    found = {device for device in sources if device is not None}
    if all(device.type == "cpu" for device in (*found, *lanes)):
        return ()
    moment = moment_of([*found.union(lanes)], shared=torch.is_grad_enabled())
    return [{device: mark for device, mark in moment.items() if device in (*found, lane)} for lane in lanes]


def wait_for_moment(moment: Moment) -> None:
    """Have the calling thread's streams come after a moment, of whichever thread."""
    for device, mark in moment.items():
        stream = backend_of(device.type).stream(device)
        if stream is not None and mark is not None and mark.event is not None:
            stream.wait_event(mark.event)


@cache
def _stream_of_lane(device: torch.device, lane: int, use: str) -> Stream:
    """Return the stream of the lanes with this index, of all blocks: torch keeps a workspace for each stream ever used.

    `use` keeps the stream for copies apart from the one for work.
    """
    stream = backend_of(device.type).new_stream(device)
    assert stream is not None, "a device with a current stream has others"
    return stream


class LaneStreams:
    """The streams of one lane, one for each device that its work has to do with, and one for copies of inputs.

    Used by the thread that has the lane; `be_waited_for` by any.
    """

    def __init__(self, device: torch.device, lane: int) -> None:
        self._backend = backend_of(device.type)
        self._device = device
        self._lane = lane
        self._last: dict[torch.device, Stream] = {}
        self._since: dict[torch.device, Mark] = {}
        self._ahead: deque[Reached] = deque()

    def run(self, work: Callable[[], T], moment: Moment) -> T:
        """Run `work` with the lane's device and streams current, after the work that the caller had queued."""
        with self._on(moment):
            return work()

    def run_staged(self, work: Callable[[], T], stage: Callable[[], object], moment: Moment) -> tuple[T, Reached]:
        """Run `stage` during the lane's earlier work, and then `work`; return its value, and events that it follows."""
        while len(self._ahead) >= _AHEAD:  # until the work before the last one is done
            for _, event in self._ahead.popleft():
                event.synchronize()
        with self._on(moment) as streams:
            self._run_beside(stage, moment.get(self._device), streams)
            try:
                value = work()
            finally:
                reached = [(device, stream.record_event()) for device, stream in streams.items()]
                self._ahead.append(reached)
        return value, reached

    def unfinished(self) -> int:
        """How many pieces of staged work the device has yet to finish, of those that the host is done with."""
        if not self._ahead:
            return 0
        return sum(not all(event.query() for _, event in events) for events in self._ahead.copy())

    def be_waited_for(self) -> None:
        """Have the calling thread's streams wait for all that the lane has queued until now."""
        for device, last in list(self._last.items()):
            stream = backend_of(device.type).stream(device)
            if stream is not None and stream != last:
                stream.wait_stream(last)

    def wait_next(self, moment: Moment) -> None:
        """Have the lane's next work, though it may have been sent already, come after that moment too."""
        self._since.update((device, mark) for device, mark in moment.items() if mark is not None)

    @contextmanager
    def _on(self, moment: Moment) -> Iterator[Mapping[torch.device, Stream]]:
        """Inside the block the thread's current streams are these, which come after the moment."""
        streams = {device: self._stream_after(device, mark) for device, mark in moment.items() if mark is not None}
        with ExitStack() as active:
            # The lane's own device last: it is then the current one.
            for device in sorted(moment, key=lambda each: each == self._device):
                active.enter_context(backend_of(device.type).activate(device, streams.get(device)))
            if any(mark is not None and mark.event is not None for mark in moment.values()):
                active.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
                torch.set_autocast_cache_enabled(False)
            yield streams

    def _stream_after(self, device: torch.device, mark: Mark) -> Stream:
        """The lane's stream on that device, which comes after what the caller's had been given."""
        stream = mark.stream if mark.event is None else _stream_of_lane(device, self._lane, "work")
        last, self._last[device] = self._last.get(device, stream), stream
        if last != stream:
            stream.wait_stream(last)
        for earlier in (mark, self._since.pop(device, None)):
            if earlier is not None and earlier.event is not None:
                stream.wait_event(earlier.event)
        if mark.event is None:
            stream.record_event()  # a thread's first call of cuBLAS warns, unless CUDA was called before
        return stream

    def _run_beside(self, stage: Callable[[], object], mark: Mark | None, streams: Mapping[torch.device, Stream]) -> None:
        """Run `stage` on a stream for nothing else, while the lane's other one may still be at work."""
        if mark is None or mark.event is None:
            stage()
            return
        copying = _stream_of_lane(self._device, self._lane, "copies")
        copying.wait_event(mark.event)
        with self._backend.activate(self._device, copying):
            stage()
        streams[self._device].wait_stream(copying)
