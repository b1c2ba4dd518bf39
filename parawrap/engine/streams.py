"""Whole calls: each runs in one lane. `submit` runs one, `map` a stream of them.

::

    source ──► stream (caller) ──► shared deque ──► lanes, which take the oldest first ──► stream (caller) ──► outputs

Lanes take batch after batch without a wait for the caller. Modes and the state of the model are read once per stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn.utils.rnn import PackedSequence

from parawrap.backends import drop_own_frames
from parawrap.engine.resume import OutputFolder
from parawrap.errors import ResumeError, SessionError, add_note

Prepare = Callable[[Any], Any]
"""A function of one batch that returns the arguments of a call, in one of the forms of `as_call`."""

_END = object()


class Pending(Protocol):
    """A whole call that runs, or waits for a lane: a future, or the like."""

    def result(self) -> Any: ...
    def cancel(self) -> bool: ...
    def add_done_callback(self, function: Callable[[Any], object], /) -> None: ...


class StreamOptions(NamedTuple):
    """The options of one stream, as in `Parallel.map`. Outputs that `folder` holds are not computed again."""

    buffersize: int
    chunksize: int = 1
    prepare: Prepare | None = None
    with_inputs: bool = False
    return_exceptions: bool = False
    ordered: bool = True
    folder: OutputFolder | None = None


class Starter(Protocol):
    """Starts the batches of one stream. An error goes into the pending call of its batch. `end` follows the last one."""

    def start(self, number: int, batch: Any) -> Pending: ...
    def start_chunk(self, batches: Sequence[tuple[int, Any]]) -> Sequence[Pending]: ...
    def end(self) -> None: ...


Flight = tuple[int, Pending, Any, str | None]
"""A batch in flight: its number, the pending call, the batch if the stream yields it, and a hint for an error."""


def as_call(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a batch: a tuple is spread, a dict becomes keywords, anything else is one argument."""
    if type(batch) is torch.Tensor:
        return (batch,), {}
    if isinstance(batch, Mapping) and all(isinstance(key, str) for key in batch):
        return (), dict(batch)
    is_spread = isinstance(batch, tuple) and not isinstance(batch, PackedSequence)
    return (tuple(batch), {}) if is_spread else ((batch,), {})


def stream(starter: Starter, batches: Iterable[Any], options: StreamOptions) -> Iterator[Any]:
    """Yield the output of every batch; at most ``options.buffersize`` batches are in flight.

    An error of the model is raised, or yielded, in place of the batch's output. An error of `batches` is raised after the
    outputs of all earlier batches. Closing the generator drops the batches that no lane has started.
    """
    flying: deque[Flight] | _AsFinished = deque() if options.ordered else _AsFinished()
    source, folder, chunksize, keeps = iter(batches), options.folder, options.chunksize, options.with_inputs
    is_plain = chunksize == 1 and folder is None
    number, has_ended = 0, False
    failure: Exception | None = None
    flights: list[Flight] | None
    pending: Pending | None
    try:
        while True:
            while not has_ended and len(flying) <= options.buffersize - chunksize:
                try:
                    if is_plain:
                        batch = next(source, _END)
                        if batch is _END:
                            has_ended = True
                            break
                        hint = None if type(batch) is torch.Tensor or options.prepare is not None else _hint(batch)
                        flying.append((number, starter.start(number, batch), batch if keeps else None, hint))
                        number += 1
                    else:
                        flights, has_ended = _start_chunk(starter, source, number, options)
                        flying.extend(flights)
                        number += len(flights)
                except _ReadError as error:
                    flying.extend(error.flights)
                    has_ended, failure = True, error.cause
                except Exception as error:  # noqa: BLE001
                    has_ended, failure = True, _note_reading(error, number)
                batch = flights = None  # the source makes the next batch
            if not flying:
                break
            number_of, pending, batch, hint = flying.popleft()
            try:
                output = pending.result()
                if folder is not None:
                    folder.commit(number_of, output)
            except Exception as error:
                pending = None  # break the reference cycle: future, error, traceback, this frame
                _note_failure(error, number_of, hint)
                if not options.return_exceptions or isinstance(error, (SessionError, CancelledError, ResumeError)):
                    if isinstance(error, StopIteration):
                        msg = f"the model raised StopIteration, which would end the stream without an error: {error}"
                        raise RuntimeError(msg) from error
                    raise
                output = error
            yield (batch, output) if keeps else output
            output = pending = batch = None
        if failure is not None:
            raise failure
        starter.end()
    finally:
        del failure  # its traceback holds this frame
        for flight in flying:
            flight[1].cancel()


class _ReadError(Exception):
    """An error of the source, with the batches that it gave before."""

    def __init__(self, flights: list[Flight], cause: Exception) -> None:
        super().__init__()
        self.flights = flights
        self.cause = cause


def _start_chunk(starter: Starter, source: Iterator[Any], number: int, options: StreamOptions) -> tuple[list[Flight], bool]:
    """Start up to a chunk of batches, except those with known outputs. Return them, and True if the source has ended."""
    folder, chunk = options.folder, list[tuple[int, Any, Pending | None]]()
    failure, has_ended = None, False
    recalled: Pending | None
    try:
        while len(chunk) < options.chunksize:
            batch = next(source, _END)
            if batch is _END:
                has_ended = True
                if folder is not None:
                    folder.check_end(number + len(chunk))
                break
            recalled = None if folder is None else folder.recall(number + len(chunk), batch)
            chunk.append((number + len(chunk), batch, recalled))
    except Exception as error:  # noqa: BLE001
        failure = _note_reading(error, number + len(chunk))
    started = iter(starter.start_chunk([(at, batch) for at, batch, recalled in chunk if recalled is None]))
    flights: list[Flight] = []
    for at, batch, recalled in chunk:
        hint = None if options.prepare is not None else _hint(batch)
        flights.append((at, recalled or next(started), batch if options.with_inputs else None, hint))
    if failure is not None:
        raise _ReadError(flights, failure)
    return flights, has_ended


def _note_reading(error: Exception, number: int) -> Exception:
    drop_own_frames(error)
    add_note(error, f"while batch {number} of the stream was read, counted from 0")
    return error


class _AsFinished:
    """Batches in flight. `popleft` waits for the first that finishes."""

    def __init__(self) -> None:
        self._flying: dict[int, Flight] = {}
        self._finished: SimpleQueue[int] = SimpleQueue()

    def append(self, flight: Flight) -> None:
        self._flying[flight[0]] = flight
        flight[1].add_done_callback(partial(_put_number, self._finished, flight[0]))

    def extend(self, flights: Iterable[Flight]) -> None:
        for flight in flights:
            self.append(flight)

    def popleft(self) -> Flight:
        return self._flying.pop(self._finished.get())

    def __len__(self) -> int:
        return len(self._flying)

    def __iter__(self) -> Iterator[Flight]:
        return iter(list(self._flying.values()))


def _put_number(finished: SimpleQueue[int], number: int, _: object) -> None:
    finished.put(number)


def _note_failure(error: Exception, number: int, hint: str | None) -> None:
    drop_own_frames(error)
    add_note(error, f"in batch {number} of the stream, counted from 0")
    if hint is not None:
        add_note(error, hint)


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


def failed(error: Exception) -> Future[Any]:
    """Return a future with an error. The frames of its traceback do not hold the future: that would be a cycle."""
    future: Future[Any] = Future()
    future.set_exception(error)
    return future
