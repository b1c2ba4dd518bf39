"""What a session has of a call that is on its way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from parawrap.engine._entry import Entry
from parawrap.lanes import LaneFuture
from parawrap.shards import FlatCall, ShardPlan

if TYPE_CHECKING:
    from parawrap.engine.plan import Turn

__all__ = ["Call", "LanesAwaitThread", "Ticket", "failed"]


class Call(NamedTuple):
    """A call on its way: how it came, the plan that cuts it, what it is made of, and its turn where ways are chosen."""

    entry: Entry
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    plan: ShardPlan
    flat: FlatCall
    turn: Turn | None = None


class Ticket(NamedTuple):
    """A whole call on its way through one lane, with its rows."""

    future: LaneFuture
    rows: int
    hint: str = ""  # what to tell where it fails


class LanesAwaitThread(Exception):  # noqa: N818
    """Not an error: the call is to run plainly. Never reaches a user."""


def failed(error: Exception) -> LaneFuture:
    """A future that fails, known to no frame that the error's traceback holds."""
    future = LaneFuture()
    future.set_exception(error)
    return future
