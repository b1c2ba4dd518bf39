"""Run whole batches through the lanes: outputs in order, a bounded number in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, Protocol

from torch.nn.utils.rnn import PackedSequence

from parawrap.engine._session import Entry, Ticket
from parawrap.lanes import note

__all__ = ["Stream", "as_call", "stream"]

_END = object()
_HINT = "the batch is a list, which map passes as one argument. Use a tuple to pass several: model(*batch)"


class Stream(Protocol):
    """The part of a session that a stream uses."""

    def submit(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ticket: ...


def stream(
    session: Stream,
    entry: Entry,
    batches: Iterable[Any],
    buffersize: int,
    arrived: Callable[[Ticket], None] | None = None,
) -> Iterator[Any]:
    """Yield the output of every batch, in order; at most `buffersize` batches are in flight.

    An error of the model or of `batches` is raised in place of the batch's output, after all earlier outputs. Closing the
    generator drops the batches that no lane has started.
    """
    flying: deque[tuple[Ticket, bool]] = deque()
    source = iter(batches)
    failure: Exception | None = None
    try:
        while True:
            try:
                batch = next(source, _END)
                if batch is _END:
                    break
                args, kwargs = as_call(batch)
                flying.append((session.submit(entry, args, kwargs), isinstance(batch, list)))
            except Exception as error:  # noqa: BLE001
                failure = error
                break
            del batch, args, kwargs  # free the batch while the source makes the next one
            if len(flying) >= buffersize:
                yield _landed(*flying.popleft(), arrived)
        while flying:
            yield _landed(*flying.popleft(), arrived)
        if failure is not None:
            raise failure
    finally:
        del failure  # its traceback holds this frame
        while flying:
            flying.pop()[0].future.cancel()


def _landed(ticket: Ticket, was_list: bool, arrived: Callable[[Ticket], None] | None) -> Any:
    future: Future[Any] = ticket.future
    try:
        output = future.result()
    except Exception as error:
        del future, ticket  # break the reference cycle: future, error, traceback, this frame
        if isinstance(error, StopIteration):
            msg = f"the model raised StopIteration, which would end the stream without an error: {error}"
            raise RuntimeError(msg) from error
        if was_list:
            note(error, _HINT)
        raise
    if arrived is not None:
        arrived(ticket)
    return output


def as_call(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A tuple is ``model(*batch)``, a dict ``model(**batch)``, anything else ``model(batch)``."""
    if isinstance(batch, Mapping) and all(isinstance(key, str) for key in batch):
        return (), dict(batch)
    is_spread = isinstance(batch, tuple) and not isinstance(batch, PackedSequence)
    return (tuple(batch), {}) if is_spread else ((batch,), {})
