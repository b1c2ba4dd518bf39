"""Streams of batches, for `map`: each batch runs whole in one lane.

::

    source ──► stream (caller) ──► shared deque ──► lanes ──► stream (caller) ──► outputs

Lanes take the oldest batch first, and do not wait for the caller between batches. In `lanes.py`,
`Lanes.send` puts a batch into the deque and wakes an idle lane, and `Lane.take` takes batches from
it. The modes and the state of the model are read once per stream.
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
"""Takes a pending call when it has ended. The thread that has ended the call runs it."""

Prepare = Callable[[Any], Any]
"""Takes a batch, and returns the arguments of the call, in a form that `as_call` takes."""

_END = object()  # of a source, which may yield None


class Pending(Protocol):
    """A whole call that runs, or waits for a lane. Its result is read once, as of a future."""

    def result(self) -> Any: ...
    def done(self) -> bool: ...
    def cancel(self) -> bool: ...


class StreamSize(NamedTuple):
    """The number of batches in a message, in flight, and in the source of a stream.

    None: the option is not given.
    """

    chunksize: int | None = None
    buffersize: int | None = None
    total: int | None = None


class Starter(Protocol):
    """Starts the batches of one stream, for the thread that reads the stream.

    - `start` takes the number of a batch, the batch, and a function that gets the call when it has
      ended, or None. The function may run before `start` returns. `start` raises no error: an error
      becomes the outcome of the pending call.
    - The starter may keep batches back until `flush`, `wait_for`, or `result` of a pending call.
      The stream calls `flush` after the last batch.
    - `wait_for` waits until the function returns True.
    - `wait_for_some` takes the batches in flight, oldest first, and may wait for the first ones. It
      returns how many outputs the stream may read before the next call of `wait_for_some`.
    - `end` follows the last output.

    Attributes:
        most: The number of batches in flight by default.
        has_room: Takes the number of batches in flight, and True if the caller could get an output
            now. Returns True if the stream may read another batch first. None: `most` alone counts.
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
    # A packed sequence is a namedtuple, but one value for a model
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
    # The caller's thread runs this generator. Other threads end the pending calls, and put them
    # into `finished`, which is safe for threads. They reach nothing else here

    # The batches in flight, oldest first: the number, the batch if it is yielded, and the hint
    flying: dict[Pending, tuple[int, Any, str | None]] = {}
    # The calls that have ended, in the order of their ends; None if outputs keep that of batches
    finished: SimpleQueue[Pending] | None = None if ordered else SimpleQueue()
    tell: Tell | None = None if finished is None else finished.put

    def has_output() -> bool:
        """True if the caller can get the next output without a wait."""
        if finished is not None:
            return not finished.empty()
        return bool(flying) and next(iter(flying)).done()

    source = iter(batches)
    most = buffersize or starter.most
    has_room = None if buffersize else starter.has_room
    number, has_ended = 0, False  # of the next batch; of the source
    readable = 0  # outputs that may be read before the next `wait_for_some`
    failure: Exception | None = None  # of the source
    pending: Pending | None
    try:
        while True:
            # Start batches before the wait for an output: lanes have some while the caller's code
            # works on the last output. The loop has no condition: Python 3.13 compiles the jump
            # back of one that has outside of the `try`, so that Ctrl-C there skips the `finally`
            while True:
                if has_ended or len(flying) >= most:
                    break
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
                    # It is raised after the outputs of the earlier batches. Ctrl-C, which is not
                    # an Exception, ends the stream at once
                    drop_own_frames(error)
                    add_note(error, f"while batch {number} of the stream was read, counted from 0")
                    has_ended, failure = True, error
                    break
                hint = None  # made now, since the batch itself is not kept
                if prepare is None and type(batch) is not torch.Tensor:
                    hint = _hint(batch)
                if saved is None:
                    pending = starter.start(number, batch, tell)
                else:
                    pending = make_future(saved.output, tell)
                flying[pending] = number, batch if with_inputs else None, hint
                number += 1
                # The pending call has the batch. If the call ends while the source makes the next
                # batch, no name here keeps the memory
                batch = saved = pending = None
            if has_ended:
                starter.flush()
            if not flying:
                break
            if finished is None:
                if not readable:
                    readable = starter.wait_for_some(flying)
                readable -= 1
                pending = next(iter(flying))  # `result` below waits for it
            else:
                # First: `get` alone could block forever, since the starter may keep batches back,
                # or receive outcomes in this thread only
                starter.wait_for(has_output)
                pending = finished.get()
            # From here on, this frame alone holds the call and its output
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
                # The next batches would fail in the same way
                ends_stream = isinstance(error, (SessionError, CancelledError, ResumeError))
                if ends_stream or not return_exceptions:
                    # If it is a StopIteration, Python raises a RuntimeError instead
                    raise
                output = error
            yield (batch, output) if with_inputs else output
            # The caller owns the output: no name here keeps it while lanes compute the next one
            output = batch = pending = None
        if failure is not None:
            raise failure
        starter.end()
    finally:
        del failure  # its traceback holds this frame: a cycle
        # Batches are in flight after an error, Ctrl-C, or `close`; none at the regular end
        for pending in flying:
            pending.cancel()


def _hint(batch: Any) -> str | None:
    """Return how a list or a dict is passed to the model, and the other ways, for an error."""
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
    """Return a future with a value, and call `tell` with it."""
    future: Future[Any] = Future()
    future.set_result(value)
    if tell is not None:
        tell(future)
    return future


def make_failed_future(error: Exception, tell: Tell | None = None) -> Future[Any]:
    """Return a future with an error, and call `tell` with it.

    It is made here because the frames in the traceback of the error must not hold it: a cycle.
    """
    future: Future[Any] = Future()
    future.set_exception(error)
    if tell is not None:
        tell(future)
    return future
