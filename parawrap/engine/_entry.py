"""How a call comes into a session, and which calls come no further."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

__all__ = ["Entry", "Spared"]


class Spared:
    """Calls of one tensor that are to be plain: so many of them need not go through the session to learn it.

    Shape, grad mode and train mode have an iterator of tickets. Each call takes one, which no other thread takes too.
    """

    def __init__(self) -> None:
        self.tickets: dict[tuple[torch.Size, bool, bool], Iterator[int]] = {}


class Entry(NamedTuple):
    """Which way into the target a call takes.

    `plain` is the call as it would be without parawrap. `method` names what a replica is asked for; None calls it as a
    whole, hooks included. `spared` has the calls that need not ask, where somebody looks there before.
    """

    plain: Callable[..., Any]
    method: str | None = None
    spared: Spared | None = None

    def of(self, replica: Any) -> Callable[..., Any]:
        return replica if self.method is None else getattr(replica, self.method)  # type: ignore[no-any-return]
