"""A stream of batches over workers. Batches travel in chunks, which are as large as they must be to cost little.

A chunk holds about 5 ms of work, by the time that batches took before. Only the schedule depends on time, never a value.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import torch

from parawrap.engine.call import Entry
from parawrap.engine.streams import Pending, Prepare, StreamSize, as_call, failed, succeeded
from parawrap.workers.lanes import Call, Form, Request
from parawrap.workers.packing import Packer

if TYPE_CHECKING:
    from parawrap.workers.worker_session import WorkerSession

_TARGET_NS = 5_000_000  # of work in one message
_MOST = 64  # batches in one message
_MOST_BYTES = 256 << 10  # of their tensors; a larger one is the last of its message, so it is not copied
_LOOK_NS = 200_000  # between two looks for answers while the caller works
_READ_AHEAD = 3  # chunks per lane that the caller has not read: two in the worker, and one to replace them


class StreamCall(Call):
    """A batch of a stream. Its output is loaded when it is read.

    It refers to the stream weakly: the generator holds the stream, and a message in flight must not keep the block alive.
    """

    __slots__ = ("_callbacks", "_is_cancelled", "_stream")

    def __init__(self, stream: weakref.ref[WorkerStream], args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        super().__init__(args, kwargs)
        self._stream = stream
        self._callbacks: list[Callable[[Any], object]] = []
        self._is_cancelled = False

    def begin(self) -> bool:
        return not self._is_cancelled

    def result(self) -> Any:
        """Wait for the output."""
        stream = self._stream()
        assert stream is not None
        return stream.read(self)

    def cancel(self) -> bool:
        """Drop the batch, unless a worker has it."""
        self._is_cancelled = True
        return True

    def add_done_callback(self, function: Callable[[Any], object], /) -> None:
        """Call a function once the batch has ended."""
        self._callbacks.append(function)  # before the look: another thread may receive the end
        if self.done():
            self.end()

    def end(self) -> None:
        with suppress(IndexError):  # another thread calls them
            while self._callbacks:
                self._callbacks.pop()(self)


class WorkerStream:
    """Starts the batches of one stream, and reads their outputs. For one thread.

    Args:
        session: The session of the block.
        entry: The method.
        prepare: The function of one batch that runs in the worker.
        size: The sizes that are known. Without a size of chunks, it adapts to the time that batches take.
    """

    def __init__(self, session: WorkerSession, entry: Entry, prepare: Prepare | None, size: StreamSize) -> None:
        self._own: weakref.ref[WorkerStream] = weakref.ref(self)
        self._session = session
        self._lanes = session.lanes
        self._entry = entry
        self._prepare = prepare
        count = len(self._lanes.all)
        self.most = _READ_AHEAD * count * (size.chunksize or _MOST)
        self._chunksize = size.chunksize
        if self._chunksize is None and self._lanes.retries == 0:
            self._chunksize = 1  # the batches of a chunk must not run again because one killed the worker
        self._most = _MOST if size.buffersize is None else max(1, size.buffersize // (2 * count))
        self._left = size.total
        self._size = self._chunksize or self._size_for(self._lanes.each_ns)
        self._goal = 1  # batches of the open chunk
        self._form: Form | None = None
        self._chunk: Request | None = None
        self._until = 0
        self._looked_at = self._ready_since = 0

    # The interface of streams

    def start(self, number: int, batch: Any) -> Pending:
        """Put a batch into the open chunk. An error goes into the pending call, and is raised in place of the output."""
        session = self._session
        try:
            if type(batch) is torch.Tensor or self._prepare is not None:
                args, kwargs = (batch,), None
            else:
                args, kwargs = as_call(batch)
            self._form = self._form or session.get_ready(self._entry.method, self._prepare)
            if self._form is None:
                entry = self._entry._replace(batch=number)
                return succeeded(session.run_plainly(entry, args, kwargs or {}, self._prepare))
            session.refuse_gradients(args, kwargs)
            call = StreamCall(self._own, args, kwargs)
            if self._prepare is None:
                call.rows = session.count_rows(self._entry.method, args, kwargs)
            if session.recorder.traces:
                rows = None if self._prepare is not None else call.rows
                call.record = partial(session.recorder.record, self._entry.method, number, rows)
            chunk = self._chunk or self._open(self._form)
            chunk.add(call)
        except Exception as error:  # noqa: BLE001
            return failed(error)
        if self._left is not None:
            self._left -= 1
        if self._is_full(chunk):
            self.flush()
        return call

    def has_room(self, unread: int, has_output: bool) -> bool:
        """True if the stream may read another batch before the caller gets an output.

        An output that is there waits until the workers have enough to do, but not for a source that takes its time.
        """
        now = perf_counter_ns()
        self._look(now)
        if unread >= _READ_AHEAD * len(self._lanes.all) * self._size:
            return False
        if not has_output:
            self._ready_since = 0
            return True
        if not self._lanes.wants_more:
            self._ready_since = 0
            return False
        self._ready_since = self._ready_since or now
        return now - self._ready_since < _TARGET_NS

    def flush(self) -> None:
        """Send the open chunk, which gets no more batches."""
        chunk, self._chunk = self._chunk, None
        if chunk is not None and chunk.calls:  # else its only batch could not be sent
            self._lanes.post(chunk)

    def wait_for(self, is_done: Callable[[], bool]) -> None:
        """Wait until `is_done`, with all batches sent."""
        if not is_done():
            self.flush()
            self._lanes.wait(is_done)

    def end(self) -> None:
        """Do nothing: workers read the model when a stream begins."""

    # Chunks

    def _open(self, form: Form) -> Request:
        if self._chunksize is None:
            self._size = min(self._size_for(self._lanes.each_ns), 4 * self._size)
        size = self._size
        if self._chunksize is None and self._left is not None:  # smaller near the end, for all workers to end together
            size = max(1, min(size, max(size // 4, self._left // (2 * len(self._lanes.all)))))
        self._chunk = chunk = Request(form, Packer(copied=0 if size == 1 else _MOST_BYTES))
        self._goal, self._until = size, perf_counter_ns() + _TARGET_NS
        return chunk

    def _is_full(self, chunk: Request) -> bool:
        assert chunk.packer is not None
        if len(chunk.calls) >= self._goal or chunk.packer.size > _MOST_BYTES:
            return True
        return self._chunksize is None and perf_counter_ns() > self._until  # of a source that takes its time

    def _size_for(self, each_ns: float | None) -> int:
        return 1 if not each_ns else max(1, min(self._most, int(_TARGET_NS / each_ns)))

    # Outputs

    def read(self, call: StreamCall) -> Any:
        """Return the output of a batch."""
        request = call.request
        if request is None or not request.is_done:
            if self._chunk is not None and (request is self._chunk or self._lanes.wants_more):
                self.flush()
            self._lanes.wait(call.done)
        else:
            self._look(perf_counter_ns())
        return self._session.finish_output(call.load(), call)

    def _look(self, now: int) -> None:
        """Receive what has arrived, unless the last look was a moment ago."""
        if now - self._looked_at > _LOOK_NS:
            self._looked_at = now
            self._lanes.look()
