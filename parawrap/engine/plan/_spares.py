"""Tickets for short plain calls, which spare them the way through the session: it would only tell them to be plain."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from operator import length_hint
from typing import Any

import torch

from parawrap.engine._entry import Entry
from parawrap.shards import FlatCall
from parawrap.tree import flatten_call

__all__ = ["Spares"]

_MOST_CALLS = 1000
_MOST_SHAPES = 1024
_ASKING_NS = 200_000  # what it takes to look up a choice and to time the call, after many that did not
_FOR_ASKING = 0.005  # of the time of plain calls


class Spares:
    """The tickets of one session. Safe to share between threads."""

    def __init__(self) -> None:
        self._access = threading.Lock()
        self._tickets: dict[tuple[Any, ...], tuple[Iterator[int], int]] = {}
        self._used_up = 0
        self._entries: list[Entry] = []

    def grant(
        self,
        entry: Entry,
        flat: FlatCall,
        *,
        training: bool,
        took_ns: int = 0,
        may_be_plain: Callable[[], bool] = lambda: True,
    ) -> None:
        """Have calls like this one be plain, and go no further than where they come in.

        The shorter they are, the more of them; where it is not known what they take (0), as many as there can be.
        `may_be_plain` is asked when nobody can withdraw: whoever does that has it say no before.
        """
        calls = min(_MOST_CALLS, int(_ASKING_NS / (_FOR_ASKING * took_ns))) if took_ns else _MOST_CALLS
        if not calls or entry.spared is None or len(flat.leaves) != 1 or type(flat.leaves[0]) is not torch.Tensor:
            return
        if flat.spec == flatten_call((flat.leaves[0],), {})[1]:
            like = flat.leaves[0].shape, torch.is_grad_enabled(), training
            with self._access:
                left = self._left((entry.method, *like), calls) if may_be_plain() else None
                if left is not None:
                    if not any(entry is other for other in self._entries):
                        self._entries.append(entry)
                    entry.spared.tickets[like] = left

    def withdraw(self) -> None:
        """Have all calls go the whole way again."""
        with self._access:
            for entry in self._entries:
                if entry.spared is not None:
                    entry.spared.tickets.clear()
            for left, given in self._tickets.values():
                self._used_up += given - sum(1 for _ in left)  # whoever looked them up finds none
            self._tickets.clear()

    def used(self) -> int:
        """How many calls took a ticket."""
        with self._access:
            return self._used_up + sum(given - length_hint(left) for left, given in self._tickets.values())

    def _left(self, like: tuple[Any, ...], calls: int) -> Iterator[int] | None:
        """The tickets that are left for such calls, or new ones; None where there are too many kinds of them.

        None are let go of before the last is taken: a thread may have looked them up, and take one a moment later.
        """
        left, given = self._tickets.get(like, (None, 0))
        if left is not None and length_hint(left):
            return left
        if left is None and len(self._tickets) >= _MOST_SHAPES:
            return None
        self._used_up += given
        left = iter(range(calls))
        self._tickets[like] = left, calls
        return left
