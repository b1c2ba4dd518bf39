"""Run whole batches through the lanes: outputs in order or as they finish, with a bounded number in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from itertools import count
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

from parawrap.backends import drop_own_frames
from parawrap.engine._call_recorder import Recorder
from parawrap.engine._lane_calls import Entry, Prepare, as_call
from parawrap.engine._output_folder import OutputFolder
from parawrap.engine._session import ChunkCall, Ready, make_failed_future
from parawrap.errors import SessionError, add_note

__all__ = ["StreamOptions", "StreamSession", "stream"]

_END = object()


class StreamSession(Protocol):
    """The part of a session that a stream uses."""

    @property
    def recorder(self) -> Recorder: ...
    def get_ready(self) -> Ready | None: ...
    def submit(
        self,
        entry: Entry,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        prepare: Prepare | None = None,
        ready: Ready | None = None,
    ) -> Future[Any]: ...
    def submit_chunk(self, calls: Sequence[ChunkCall], prepare: Prepare | None, ready: Ready) -> Sequence[Future[Any]]: ...


class StreamOptions(NamedTuple):
    """The options of one stream, as in `Parallel.map`. Outputs that `folder` holds are not computed again."""

    buffersize: int
    chunksize: int = 1
    prepare: Prepare | None = None
    with_inputs: bool = False
    return_exceptions: bool = False
    ordered: bool = True
    folder: OutputFolder | None = None


class _Read(NamedTuple):
    """A batch as the source gave it, its number, and its output if that is known."""

    number: int
    batch: Any
    recalled: Future[Any] | None


class _Flight(NamedTuple):
    """One batch in flight. `batch` is None unless the stream yields it."""

    number: int
    future: Future[Any]
    batch: Any
    hint: str | None


def stream(session: StreamSession, entry: Entry, batches: Iterable[Any], options: StreamOptions) -> Iterator[Any]:
    """Yield the output of every batch; at most ``options.buffersize`` batches are in flight.

    An error of the model is raised, or yielded, in place of the batch's output. An error of `batches` is raised after the
    outputs of all earlier batches. Closing the generator drops the batches that no lane has started.
    """
    flying: deque[_Flight] | _AsFinished = deque() if options.ordered else _AsFinished()
    submitted = _submit_all(session, entry, batches, options)
    failure: Exception | None = None
    try:
        while True:
            try:
                flying.extend(next(submitted))
            except StopIteration:
                break
            except Exception as error:  # noqa: BLE001
                drop_own_frames(error)
                failure = error
                break
            while len(flying) > options.buffersize - options.chunksize:
                yield _finish(flying.popleft(), options)
        while flying:
            yield _finish(flying.popleft(), options)
        if failure is not None:
            raise failure
    finally:
        del failure  # its traceback holds this frame
        for flight in flying:
            flight.future.cancel()


class _AsFinished:
    """Batches in flight. `popleft` waits for the first that finishes."""

    def __init__(self) -> None:
        self._flying: dict[int, _Flight] = {}
        self._finished: SimpleQueue[int] = SimpleQueue()

    def extend(self, flights: Iterable[_Flight]) -> None:
        for flight in flights:
            self._flying[flight.number] = flight
            flight.future.add_done_callback(lambda _, number=flight.number: self._finished.put(number))  # type: ignore[misc]

    def popleft(self) -> _Flight:
        return self._flying.pop(self._finished.get())

    def __len__(self) -> int:
        return len(self._flying)

    def __iter__(self) -> Iterator[_Flight]:
        return iter(list(self._flying.values()))


def _submit_all(
    session: StreamSession, entry: Entry, batches: Iterable[Any], options: StreamOptions
) -> Iterator[Sequence[_Flight]]:
    """Submit one chunk of batches for each `next`. An error of `submit` goes into the future of its batch.

    An error of the source gets a note, and is raised once the batches that it gave before are submitted.
    """
    source, numbers, folder = iter(batches), count(), options.folder
    submitter = _Submitter(session, entry, options.prepare)
    has_ended, failure = False, None
    while not has_ended:
        chunk: list[_Read] = []
        while len(chunk) < options.chunksize and not has_ended:
            number = next(numbers)
            try:
                batch = next(source, _END)
                if batch is not _END:
                    chunk.append(_Read(number, batch, None if folder is None else folder.recall(number, batch)))
                    continue
                has_ended = True
                if folder is not None:
                    folder.check_end(number)
            except Exception as error:  # noqa: BLE001
                add_note(error, f"while batch {number} of the stream was read, counted from 0")
                has_ended, failure = True, error
        together = iter(submitter.submit_together(chunk) if len(chunk) > 1 else ())
        flights = []
        for number, batch, recalled in chunk:
            future = recalled
            if future is None:
                future = next(together, None) or submitter.submit(number, batch)
            hint = None if options.prepare is not None else _hint(batch)
            flights.append(_Flight(number, future, batch if options.with_inputs else None, hint))
        batch = recalled = future = None  # the source makes the next batch
        chunk.clear()
        if flights:
            yield flights
        del flights
    try:
        if failure is not None:
            raise failure
    finally:
        del failure  # its traceback holds this frame


class _Submitter:
    """Submits the batches of one stream. The replicas are brought up to date once, before the first batch."""

    def __init__(self, session: StreamSession, entry: Entry, prepare: Prepare | None) -> None:
        self._session = session
        self._entry = entry
        self._prepare = prepare
        self._ready: Ready | None = None

    def submit(self, number: int, batch: Any) -> Future[Any]:
        """Submit a batch. An error goes into the future, and is raised in place of the batch's output."""
        try:
            self._ready = self._ready or self._session.get_ready()
            return self._session.submit(*self._call(number, batch), self._prepare, self._ready)
        except Exception as error:  # noqa: BLE001
            return make_failed_future(error)

    def submit_together(self, chunk: Sequence[_Read]) -> Sequence[Future[Any]]:
        """Submit batches in one message. Return nothing if that is refused: each batch then gets its own error."""
        with suppress(Exception):
            self._ready = self._ready or self._session.get_ready()
            calls = [self._call(number, batch) for number, batch, recalled in chunk if recalled is None]
            if self._ready is not None and calls:
                return self._session.submit_chunk(calls, self._prepare, self._ready)
        return ()

    def _call(self, number: int, batch: Any) -> ChunkCall:
        entry = self._entry
        if self._session.recorder.traces:
            entry = entry._replace(batch=number)
        return (entry, (batch,), {}) if self._prepare is not None else (entry, *as_call(batch))


def _hint(batch: Any) -> str | None:
    """Return how a batch is passed to the model, for the error of a list or a dict, which may have been meant otherwise."""
    if isinstance(batch, list):
        return (
            f"the batch is a list of {len(batch)} items, which map passes as one argument. For model(*batch), use "
            "map(..., prepare=tuple). For the first item, use map(..., prepare=lambda batch: batch[0])"
        )
    if isinstance(batch, Mapping) and all(isinstance(key, str) for key in batch):
        return (
            "the batch is a dict, which map passes as keyword arguments: model(**batch). To pass the dict itself as one "
            "argument, use map(..., prepare=lambda batch: (batch,))"
        )
    return None


def _finish(flight: _Flight, options: StreamOptions) -> Any:
    """Wait for a batch, and return what the stream yields for it."""
    number, future, batch, hint = flight
    try:
        output = future.result()
    except Exception as error:
        del future, flight  # break the reference cycle: future, error, traceback, this frame
        drop_own_frames(error)
        add_note(error, f"in batch {number} of the stream, counted from 0")
        if hint is not None:
            add_note(error, hint)
        if not options.return_exceptions or isinstance(error, (SessionError, CancelledError)):
            if isinstance(error, StopIteration):
                msg = f"the model raised StopIteration, which would end the stream without an error: {error}"
                raise RuntimeError(msg) from error
            raise
        return (batch, error) if options.with_inputs else error
    if options.folder is not None:
        options.folder.commit(number, output)
    return (batch, output) if options.with_inputs else output
