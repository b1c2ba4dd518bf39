"""A lane's own streams, and what orders the work on them with the caller's.

What this file guarantees, for kinds of device that have streams:

- What the caller queued before a call is done before the lane's work begins. What it queues once it has the outcome begins
  after that work is done. Neither keeps the host waiting.
- Two lanes on one device work beside each other. But where gradients are recorded, lanes work on the caller's streams: on
  those torch adds up gradients, and it warns of gradients that come by others.
- A lane on a stream of its own does without torch's cache of autocast's casts: all threads share it and no event orders it.
- The input of submitted work is brought over beside the work before it; and since the host may run far ahead of a device,
  no lane begins such work before the work before the last one is done: memory is bounded.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, TypeVar

import torch

from parawrap.backends import Backend, Stream, record_use
from parawrap.tree import flatten

__all__ = ["LaneFuture", "LaneStreams", "Moment", "Reached", "moment_of"]

T = TypeVar("T")
_AHEAD = 2


class Mark(NamedTuple):
    """A stream of the caller's, and an event that follows what it had been given by then. Without one, a lane shares it."""

    stream: Stream
    event: Any | None = None


Moment = Mapping[torch.device, Mark | None]
"""By device, where the caller stood when it made a call; None for a device without streams."""


Reached = Sequence[tuple[torch.device, Any]]
"""By device, an event that is over when a piece of work is done there."""


def moment_of(backend: Backend, devices: Iterable[torch.device], *, shared: bool = False) -> Moment:
    """The calling thread's moment on each of these devices that is of the backend's kind."""
    streams = {device: backend.stream(device) for device in devices if device.type == backend.type}
    return {
        device: None if stream is None else Mark(stream, None if shared else stream.record_event())
        for device, stream in streams.items()
    }


class _Shelf:
    """The streams that no lane has, for the next ones: torch keeps a workspace for each stream that it ever worked on."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, list[Stream]] = {}
        self._access = threading.Lock()

    def take(self, backend: Backend, device: torch.device) -> Stream:
        with self._access:
            spare = self._streams.get(device)
            stream = spare.pop() if spare else backend.new_stream(device)
        assert stream is not None, "a device with a current stream has others"
        return stream

    def put(self, device: torch.device, stream: Stream) -> None:
        with self._access:
            self._streams.setdefault(device, []).append(stream)


_shelf = _Shelf()


class LaneStreams:
    """The streams of one lane, one for each device that its work has to do with. Each is made when first needed.

    Used by the thread that has the lane, or by several where a lane is shared; `be_waited_for` by any.
    """

    def __init__(self, backend: Backend, device: torch.device) -> None:
        self._backend = backend
        self._device = device
        self._making = threading.Lock()
        self._own: dict[torch.device, Stream] = {}
        self._since: dict[torch.device, Mark] = {}
        self._copying: Stream | None = None
        self._ahead: deque[Reached] = deque()

    def run(self, work: Callable[[], T], moment: Moment) -> T:
        """Run `work` with the lane's device and streams current, after what the caller had queued by then."""
        with self._on(moment):
            value = work()
            self._backend.flush(value)  # by the lane: begun by whoever reads the values, one lane would follow the other
            return value

    def run_staged(self, work: Callable[[], T], stage: Callable[[], object] | None, moment: Moment) -> tuple[T, Reached]:
        """Run `stage` beside the lane's earlier work, and then `work`; its value, and what it is there after."""
        while len(self._ahead) >= _AHEAD:
            for _, event in self._ahead.popleft():
                event.synchronize()
        with self._on(moment) as streams:
            if stage is not None:
                self._run_beside(stage, moment[self._device], streams)
            try:
                value = work()
            finally:
                reached = [(device, stream.record_event()) for device, stream in streams.items()]
                self._ahead.append(reached)
        return value, reached

    def end(self) -> None:
        """Give the streams to whoever needs some; what they have been given is done before what they will be given."""
        own, self._own = self._own, {}
        copying, self._copying = self._copying, None
        for device, stream in (*own.items(), *([] if copying is None else [(self._device, copying)])):
            _shelf.put(device, stream)

    def unfinished(self) -> int:
        """How many pieces of staged work the device has yet to finish, of those that the host is done with."""
        return sum(not all(event.query() for _, event in events) for events in list(self._ahead))

    def be_waited_for(self) -> None:
        """Have the calling thread's streams wait for what the lane's have been given until now."""
        for device, own in list(self._own.items()):
            stream = self._backend.stream(device)
            assert stream is not None
            stream.wait_stream(own)

    def wait_next(self, moment: Moment) -> None:
        """Have the lane's next work, though it may have been sent already, come after that moment too."""
        self._since.update((device, mark) for device, mark in moment.items() if mark is not None)

    @contextmanager
    def _on(self, moment: Moment) -> Iterator[Mapping[torch.device, Stream]]:
        """Inside the block the thread's current streams are these, which come after the moment."""
        streams = {device: self._following(device, mark) for device, mark in moment.items() if mark is not None}
        with ExitStack() as active:
            # The lane's own device last: it is then the current one.
            for device in sorted(moment, key=lambda each: each == self._device):
                active.enter_context(self._backend.activate(device, streams.get(device)))
            if any(mark is not None and mark.event is not None for mark in moment.values()):
                active.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
                torch.set_autocast_cache_enabled(False)
            yield streams

    def _following(self, device: torch.device, mark: Mark) -> Stream:
        """The lane's stream on that device, which comes after what the caller's had been given."""
        stream = mark.stream if mark.event is None else self._own_on(device)
        for earlier in (mark, self._since.pop(device, None)):
            if earlier is not None and earlier.event is not None:
                stream.wait_event(earlier.event)
        if mark.event is None:
            stream.record_event()  # a thread's first call of cuBLAS warns, unless CUDA was called before
        return stream

    def _own_on(self, device: torch.device) -> Stream:
        with self._making:
            if device not in self._own:
                self._own[device] = _shelf.take(self._backend, device)
            return self._own[device]

    def _run_beside(self, stage: Callable[[], object], mark: Mark | None, streams: Mapping[torch.device, Stream]) -> None:
        """Run `stage` on a stream for nothing else, while the lane's other one may still be at work."""
        if mark is None or mark.event is None:
            stage()
            return
        copying = self._copying = self._copying or _shelf.take(self._backend, self._device)
        copying.wait_event(mark.event)
        with self._backend.activate(self._device, copying):
            stage()
        streams[self._device].wait_stream(copying)


class LaneFuture(Future[Any]):
    """A future whose result may be used on whatever streams the thread that asks for it is queueing its work on.

    Any number of threads may ask. A callback that asks runs in the lane's thread, for somebody unknown: it waits.
    """

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self._backend = backend
        self._reached: Reached = ()
        self._lane: int | None = None

    def land(self, value: Any, reached: Reached) -> None:
        """Give the value, which is there once those events are over."""
        self._reached, self._lane = reached, threading.get_ident()
        self.set_result(value)

    def result(self, timeout: float | None = None) -> Any:
        value = super().result(timeout)
        for device, event in self._reached:
            stream = self._backend.stream(device)
            if stream is None or threading.get_ident() == self._lane:
                event.synchronize()
            else:
                stream.wait_event(event)
        if self._reached:
            record_use(flatten(value)[0])
        return value
