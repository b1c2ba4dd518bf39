"""How a call comes into a session, and what it has of one that is on its way."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

from parawrap.lanes import Lane

__all__ = ["Entry", "LanesAwaitThread", "Ticket"]


class Entry(NamedTuple):
    """Which way into the target a call takes.

    `plain` is the call as it would be without parawrap. `method` names what a replica is asked for; None calls it as a
    whole, hooks included.
    """

    plain: Callable[..., Any]
    method: str | None = None

    def of(self, replica: Any) -> Callable[..., Any]:
        return replica if self.method is None else getattr(replica, self.method)  # type: ignore[no-any-return]


class Ticket(NamedTuple):
    """A whole call on its way through one lane, with its rows."""

    future: Future[Any]
    lane: Lane
    rows: int
    hint: str = ""  # what to tell where it fails


class LanesAwaitThread(Exception):  # noqa: N818
    """Not an error: the call is to run plainly. Never reaches a user."""
