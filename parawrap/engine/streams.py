"""Whole calls: each runs in one lane. `submit` runs one, `map` a stream of them.

::

    source ──► stream (caller) ──► shared deque ──► lanes ──► stream (caller) ──► outputs

Lanes take the oldest batch first, and batch after batch without a wait for the caller. In
`lanes.py`, `Lanes.send` puts a batch into the deque and wakes an idle lane, and `Lane.take` takes
batches from it. Modes and the state of the model are read once per stream.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn.utils.rnn import PackedSequence

from parawrap.backends import drop_own_frames
from parawrap.engine.resume import OutputFolder
from parawrap.errors import ResumeError, SessionError, add_note

Tell = Callable[["Pending"], object]
"""Takes a pending call that has ended, in the thread that has ended it."""

Prepare = Callable[[Any], Any]
"""Returns the arguments of a call, in one of the forms of `as_call`, from one batch."""

_END = object()


class Pending(Protocol):
    """A whole call that runs, or waits for a lane: a future, or the like."""

    def result(self) -> Any: ...
    def done(self) -> bool: ...
    def cancel(self) -> bool: ...


class StreamSize(NamedTuple):
    """The number of batches in a message, in flight, and in the source of a stream.

    None if it is not given.
    """

    chunksize: int | None = None
    buffersize: int | None = None
    total: int | None = None


class Starter(Protocol):
    """Starts the batches of one stream. An error goes into the pending call of its batch.

    `start` takes the number of the batch, the batch, and a function that gets the call when it has
    ended, or None. The function may run before `start` returns.

    The starter may keep batches back until `flush`, which follows the last one, or until a result
    is read, or waited for. `wait_for_some` takes the batches in flight, oldest first, may wait for
    the first ones, and returns how many outputs may be read before it is asked again. `end` follows
    the last output.

    Attributes:
        most: The number of batches in flight by default.
        has_room: Without a buffersize, returns True if the stream may read another batch. Takes the
            number of batches in flight, and True if the caller could get an output instead. None if
            only `most` counts.
    """

    @property
    def most(self) -> int: ...
    @property
    def has_room(self) -> Callable[[int, bool], bool] | None: ...

    def start(self, number: int, batch: Any, tell: Tell | None, /) -> Pending: ...
    def flush(self) -> None: ...
    def wait_for(self, is_done: Callable[[], bool], /) -> None: ...
    def wait_for_some(self, flying: Collection[Pending], /) -> int: ...
    def end(self) -> None: ...


def as_call(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a batch.

    A tuple is spread, a dict becomes keywords, and anything else is one argument.
    """
    if type(batch) is torch.Tensor:  # first, as most batches are one
        return (batch,), {}
    if isinstance(batch, Mapping) and all(isinstance(key, str) for key in batch):
        return (), dict(batch)
    # A packed sequence is a namedtuple, but one value for a model.
    is_spread = isinstance(batch, tuple) and not isinstance(batch, PackedSequence)
    return (tuple(batch), {}) if is_spread else ((batch,), {})


def stream(
    starter: Starter,
    batches: Iterable[Any],
    *,
    buffersize: int | None,
    prepare: Prepare | None,
    with_inputs: bool,
    return_exceptions: bool,
    ordered: bool,
    folder: OutputFolder | None,
) -> Iterator[Any]:
    """Yield the output of every batch, with options as in `Parallel.map`.

    Outputs in `folder` are not computed again. Without `buffersize`, the starter decides how many
    batches are in flight.

    An error of the model is raised, or yielded, in place of the batch's output. An error of
    `batches` is raised after the outputs of all earlier batches. Closing the generator drops the
    batches that no lane has started.
    """
    # Only the caller's thread runs this generator. Lanes, or the threads of a starter, resolve the
    # pending calls; they touch nothing else here but `finished`, which is safe for threads.

    # Oldest first: the number, the batch if it is yielded, and the hint.
    flying: dict[Pending, tuple[int, Any, str | None]] = {}
    finished: SimpleQueue[Pending] | None = None if ordered else SimpleQueue()
    tell: Tell | None = None if finished is None else finished.put

    def has_output() -> bool:
        """True if the next output is there."""
        if finished is not None:
            return not finished.empty()
        return bool(flying) and next(iter(flying)).done()

    source = iter(batches)
    most = buffersize or starter.most
    has_room = None if buffersize else starter.has_room
    number, has_ended = 0, False
    readable = 0  # outputs that may be read before the next `wait_for_some`
    failure: Exception | None = None
    pending: Pending | None
    try:
        while True:
            # Fill before the wait for an output: lanes have batches while the caller's own code
            # works on the last output.
            while not has_ended and len(flying) < most:
                if has_room is not None and not has_room(len(flying), has_output()):
                    break
                try:
                    batch = next(source, _END)
                    if batch is _END:
                        has_ended = True
                        if folder is not None:
                            folder.check_end(number)
                        break
                    saved = None if folder is None else folder.recall(number, batch)
                except Exception as error:  # noqa: BLE001
                    # Kept until the earlier batches have their outputs. An interrupt is no
                    # Exception, and ends the stream at once.
                    drop_own_frames(error)
                    add_note(error, f"while batch {number} of the stream was read, counted from 0")
                    has_ended, failure = True, error
                    break
                # The hint is made now, since the batch itself is not kept.
                hint = None
                if prepare is None and type(batch) is not torch.Tensor:
                    hint = _hint(batch)
                if saved is None:
                    pending = starter.start(number, batch, tell)
                else:
                    pending = make_future(saved.output, tell)
                flying[pending] = number, batch if with_inputs else None, hint
                number += 1
                # The lane owns the batch from here on. Without these names, its memory is free
                # while the source makes the next batch.
                batch = saved = pending = None
            if has_ended:
                # Nothing more is to come, so the starter sends what it has kept back.
                starter.flush()
            if not flying:
                break
            if finished is None:
                if not readable:
                    readable = starter.wait_for_some(flying)
                readable -= 1
                pending = next(iter(flying))  # its `result` waits
            else:
                # The starter may keep batches back, or read results in this thread only, so `get`
                # alone could block forever.
                starter.wait_for(has_output)
                pending = finished.get()
            # No longer in flight: after the wait, this frame alone holds the call and its output.
            own_number, batch, hint = flying.pop(pending)
            try:
                output = pending.result()
                if folder is not None:
                    folder.commit(own_number, output)
            except Exception as error:
                del pending  # break the reference cycle: future, error, traceback, this frame
                drop_own_frames(error)
                add_note(error, f"in batch {own_number} of the stream, counted from 0")
                if hint is not None:
                    add_note(error, hint)
                # These are not about one batch: the next ones would fail in the same way.
                ends_stream = isinstance(error, (SessionError, CancelledError, ResumeError))
                if ends_stream or not return_exceptions:
                    # Python makes a RuntimeError of a StopIteration, which would end the stream.
                    raise
                output = error
            yield (batch, output) if with_inputs else output
            # The caller owns the output: no name keeps it while the lanes compute the next one.
            output = batch = pending = None
        if failure is not None:
            raise failure
        starter.end()
    finally:
        del failure  # its traceback holds this frame
        # After an error, an interrupt, or `close`. At the regular end there are none.
        for pending in flying:
            pending.cancel()


def _hint(batch: Any) -> str | None:
    """Return how a list or a dict is passed to the model, for the note of an error.

    The user may have meant another way.
    """
    if isinstance(batch, list) and batch and all(isinstance(item, str) for item in batch):
        return (
            f"the batch is a list of {len(batch)} texts, which map passes as one argument. To pass "
            "what a tokenizer makes of them, use map(..., prepare=tokenizer)"
        )
    if isinstance(batch, list):
        return (
            f"the batch is a list of {len(batch)} items, which map passes as one argument. For "
            "model(*batch), use map(..., prepare=tuple). For the first item, use "
            "map(..., prepare=lambda batch: batch[0])"
        )
    if isinstance(batch, Mapping) and all(isinstance(key, str) for key in batch):
        return (
            "the batch is a dict, which map passes as keyword arguments: model(**batch). To pass "
            "the dict itself as one argument, use map(..., prepare=lambda batch: (batch,))"
        )
    return None


def make_future(value: Any, tell: Tell | None = None) -> Future[Any]:
    """Return a future with a value."""
    future: Future[Any] = Future()
    future.set_result(value)
    if tell is not None:
        tell(future)
    return future


def make_failed_future(error: Exception, tell: Tell | None = None) -> Future[Any]:
    """Return a future with an error.

    The frames of its traceback do not hold the future: that would be a cycle.
    """
    future: Future[Any] = Future()
    future.set_exception(error)
    if tell is not None:
        tell(future)
    return future
