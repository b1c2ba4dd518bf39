"""The streams of a lane, and the order of its work and the caller's.

Guarantees, for devices that have streams:

- A lane's work starts after the work that the caller queued before the call. Work that the caller
  queues with the outcome starts after the lane's work. The host waits for neither.
- A lane's tasks run in the order of their start on the host, on any streams.
- Two lanes on one device overlap. If gradients are recorded, lanes work on the caller's streams
  instead: torch adds up gradients there, and warns of gradients from other streams.
- A lane on its own stream does not use torch's cache of autocast's casts: all threads share it, and
  no event orders it.
- The input of submitted work travels during the work before it. The host may run far ahead of a
  device, so a lane starts such work only when the work before the last one is done: memory is
  bounded.
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
_AHEAD = 2  # batches on the device: one runs while the next one is copied; more only take memory


class Mark(NamedTuple):
    """A stream of the caller, and an event after its queued work.

    Without an event, a lane shares the stream.
    """

    stream: Stream
    event: Any | None = None


Moment = Mapping[torch.device, Mark | None]
"""By device, the position of the caller when it made a call; None for a device without streams."""


Reached = Sequence[tuple[torch.device, Any]]
"""By device, an event that completes when a piece of work is done there."""


def moment_of(devices: Iterable[torch.device], *, shared: bool) -> Moment:
    """Return the calling thread's moment on each of these devices but the CPU."""
    moment: dict[torch.device, Mark | None] = {}
    for device in devices:
        if device.type == "cpu":
            continue
        stream = backend_of(device.type).stream(device)
        if stream is None:
            moment[device] = None
        elif shared:
            # A lane that works on this very stream comes after its queued work without an event.
            moment[device] = Mark(stream)
        else:
            moment[device] = Mark(stream, stream.record_event())
    return moment


def moments_of(
    lanes: Sequence[torch.device], sources: Iterable[torch.device | None]
) -> Sequence[Moment]:
    """Return the caller's moment, as it concerns a lane on each of these devices.

    Return nothing if all is on the CPU. `sources` are other devices with data for the calls, or
    None.
    """
    found = {device for device in sources if device is not None}
    devices = found.union(lanes)
    if all(device.type == "cpu" for device in devices):
        return ()
    # One event per device serves all lanes: they wait for the same position of the caller.
    moment = moment_of(devices, shared=torch.is_grad_enabled())
    moments = []
    for lane in lanes:
        # The devices of other lanes are left out, so a lane does not wait for them.
        concerns = {*found, lane}
        moments.append({device: mark for device, mark in moment.items() if device in concerns})
    return moments


def wait_for_moment(moment: Moment) -> None:
    """Have the calling thread's streams come after a moment, of whichever thread."""
    for device, mark in moment.items():
        if mark is None or mark.event is None:
            continue
        stream = backend_of(device.type).stream(device)
        if stream is not None:
            stream.wait_event(mark.event)


@cache
def _stream_of_lane(device: torch.device, lane: int, use: str) -> Stream:
    """Return the stream of the lanes with this index, of all blocks.

    Blocks share it, because torch keeps a workspace for each stream ever used. `use` keeps the
    stream for copies apart from the one for work. Two threads that ask first at the same time may
    get two streams for once: a lane orders its streams in any case.
    """
    stream = backend_of(device.type).new_stream(device)
    assert stream is not None, "a device with a current stream has others"
    return stream


class LaneStreams:
    """The streams of one lane: one per device of its work, and one for copies of inputs.

    Used by the thread that has the lane; `be_waited_for` by any.
    """

    def __init__(self, device: torch.device, lane: int) -> None:
        self._backend = backend_of(device.type)
        self._device = device
        self._lane = lane
        # By device, the stream of the last task: the lane's own, or one that a caller shared.
        self._last: dict[torch.device, Stream] = {}
        # Marks that the next task on each device waits for, next to the one of its call.
        self._since: dict[torch.device, Mark] = {}
        # The events of staged tasks that the device may still work on, oldest first.
        self._ahead: deque[Reached] = deque()

    def run(self, work: Callable[[], T], moment: Moment) -> T:
        """Run `work` with the lane's device and streams current, after the caller's queued work."""
        with self._on(moment):
            return work()

    def run_staged(
        self, work: Callable[[], T], stage: Callable[[], object], moment: Moment, reached: list[Any]
    ) -> T:
        """Run `stage` during the lane's earlier work, and then `work`; return its value.

        `reached` gets the events that follow the work, also if it raises: the caller may write what
        the work still reads.
        """
        while len(self._ahead) >= _AHEAD:
            # The host blocks until the work before the last one is done, so at most `_AHEAD` inputs
            # take memory on the device.
            for _, event in self._ahead.popleft():
                event.synchronize()
        with self._on(moment) as streams:
            self._run_beside(stage, moment.get(self._device), streams)
            try:
                return work()
            finally:
                # Work that raised may have queued a part of its kernels. These events follow them.
                events = [(device, stream.record_event()) for device, stream in streams.items()]
                reached += events  # one step: a thread that reads the list sees all of them or none
                self._ahead.append(reached)

    def count_unfinished(self) -> int:
        """Return the number of staged tasks that the host has finished and the device has not."""
        if not self._ahead:
            return 0
        unfinished = 0
        # Other threads call this to compare lanes. The copy is one step in C, so an append by the
        # lane's own thread does not disturb the loop.
        for events in self._ahead.copy():
            is_done = all(event.query() for _, event in events)
            if not is_done:
                unfinished += 1
        return unfinished

    def be_waited_for(self) -> None:
        """Have the calling thread's streams wait for all that the lane has queued until now."""
        # `list` copies in one step: the lane may begin to use a further device meanwhile.
        for device, last in list(self._last.items()):
            stream = backend_of(device.type).stream(device)
            if stream is not None and stream != last:
                stream.wait_stream(last)

    def wait_next(self, moment: Moment) -> None:
        """Have the lane's next work come after that moment too, also if it was sent already."""
        for device, mark in moment.items():
            if mark is not None:
                self._since[device] = mark

    @contextmanager
    def _on(self, moment: Moment) -> Iterator[Mapping[torch.device, Stream]]:
        """Make the lane's streams current in the thread. They come after the moment."""
        streams: dict[torch.device, Stream] = {}
        has_own_streams = False
        for device, mark in moment.items():
            if mark is not None:
                streams[device] = self._stream_after(device, mark)
                has_own_streams = has_own_streams or mark.event is not None
        devices = [device for device in moment if device != self._device]
        if self._device in moment:
            devices.append(self._device)  # last: it is then the current one
        # After Ctrl-C between an entry and its note in the stack, the generator of `activate` is
        # dropped, and ends the block itself.
        with ExitStack() as active:
            for device in devices:
                backend = backend_of(device.type)
                active.enter_context(backend.activate(device, streams.get(device)))
            if has_own_streams:
                # No event orders a cached cast after the kernel of another lane that wrote it.
                active.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
                torch.set_autocast_cache_enabled(False)
            yield streams

    def _stream_after(self, device: torch.device, mark: Mark) -> Stream:
        """Return the lane's stream on a device, which comes after the caller's queued work."""
        stream = mark.stream
        if mark.event is not None:
            stream = _stream_of_lane(device, self._lane, "work")
        last = self._last.get(device, stream)
        self._last[device] = stream
        # Calls with and without gradients use different streams; the lane's tasks stay in order.
        if last != stream:
            stream.wait_stream(last)
        # After the work that the caller queued before this call. On its own stream it is anyway.
        if mark.event is not None:
            stream.wait_event(mark.event)
        # After the last change of the model, also for a call whose moment was read before it.
        since = self._since.pop(device, None)
        if since is not None and since.event is not None:
            stream.wait_event(since.event)
        if mark.event is None:
            # A thread's first call of cuBLAS warns, unless CUDA was called before.
            stream.record_event()
        return stream

    def _run_beside(
        self, stage: Callable[[], object], mark: Mark | None, streams: Mapping[torch.device, Stream]
    ) -> None:
        """Run `stage` on a stream for copies, while the lane's stream may still be at work."""
        if mark is None or mark.event is None:
            stage()
            return
        copying = _stream_of_lane(self._device, self._lane, "copies")
        # The copies read what the caller has queued, but nothing of the lane's earlier work.
        copying.wait_event(mark.event)
        with self._backend.activate(self._device, copying):
            stage()
        # The work reads what the copies have written.
        streams[self._device].wait_stream(copying)
