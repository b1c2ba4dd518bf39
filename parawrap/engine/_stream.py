"""Whole batches through the lanes, results in order, a bounded number in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from parawrap.engine._call import Ticket, failed
from parawrap.engine._entry import Entry
from parawrap.engine._session import Session
from parawrap.lanes import Hand, note

__all__ = ["stream"]

_HINT = "the batch was a list, which map gives to the model as one argument; a tuple is spread: model(*batch)"


def stream(
    session: Session,
    entry: Entry,
    batches: Iterable[Any],
    window: int,
    arrived: Callable[[Ticket], None] | None = None,
) -> Iterator[Any]:
    """Yield the output of every batch, in order; at most `window` batches are taken and not yet given back.

    An error, of the model or of `batches` itself, is raised in its batch's place, after the results before it. Closing
    the generator drops the batches that no lane has begun.
    """
    flying: deque[Ticket] = deque()
    hand = session.hand(window)
    tickets = _tickets(session, entry, batches, hand)
    try:
        for ticket in tickets:
            flying.append(ticket)
            del ticket  # one that fails has the error, whose traceback holds this frame
            if len(flying) >= window:
                yield _landed(flying, hand, arrived)
        while flying:
            yield _landed(flying, hand, arrived)
    finally:
        while flying:
            flying.pop().future.cancel()


def _landed(flying: deque[Ticket], hand: Hand | None, arrived: Callable[[Ticket], None] | None) -> Any:
    ticket = flying.popleft()
    try:
        if hand is not None:
            hand.wait_for(ticket.future)
        result = ticket.future.result()
    except BaseException as error:
        if ticket.hint and isinstance(error, Exception):
            note(error, ticket.hint)
        del ticket
        raise
    if hand is not None:
        hand.back_to_caller()
    if arrived is not None:
        arrived(ticket)
    return result


def _tickets(session: Session, entry: Entry, batches: Iterable[Any], hand: Hand | None) -> Iterator[Ticket]:
    """One ticket a batch; a source of batches that fails gives a last ticket that raises its error."""
    source = iter(batches)
    while True:
        try:
            batch = next(source)
        except StopIteration:
            return
        except Exception as error:  # noqa: BLE001
            yield Ticket(failed(error), 0)
            return
        args, kwargs = _as_call(batch)
        try:
            ticket = session.submit(entry, args, kwargs, hand)
        except Exception as error:  # noqa: BLE001
            yield Ticket(failed(error), 0)
            return
        ticket = ticket._replace(hint=_HINT if isinstance(batch, list) else "")
        del batch, args, kwargs  # the source may take long to give the next one
        yield ticket


def _as_call(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A tuple is ``model(*batch)``, a dict ``model(**batch)``, anything else ``model(batch)``."""
    if isinstance(batch, Mapping) and all(isinstance(key, str) for key in batch):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, tuple) else ((batch,), {})
