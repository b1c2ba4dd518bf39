"""How many threads an operator may use, for as long as a caller works as a lane.

torch.set_num_threads sets the calling thread's figure, and beside it the figure that a thread takes when it runs its
first operator. The two are what make the order of calls matter:

- a new thread must read its figure before it sets one, or its first parallel operator undoes the setting;
- a caller that lowers its figure must restore it, which restores the figure for new threads as well;
- a caller that runs its first operator while another caller has lowered the figure would take the lowered one for its
  own. It is recognised here and given what was in force before.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch

__all__ = ["adopted", "intra_op_threads", "settle"]

_counting = threading.Lock()
_inside = 0
_outside_figure = 0
_seen = threading.local()


def settle(threads: int) -> None:
    """Give the calling thread its figure for good: for a lane, as the first thing it does."""
    torch.get_num_threads()
    torch.set_num_threads(threads)
    _seen.yes = _seen.is_lane = True


@contextmanager
def adopted(threads: int | None) -> Iterator[None]:
    """In a lane's own thread, operators use that many threads inside the block; elsewhere nothing changes.

    The figure for new threads changes too. Whoever waits for the lane, until after the block, restores that with its own.
    """
    figure = torch.get_num_threads()
    changes = threads is not None and figure != threads and getattr(_seen, "is_lane", False)
    if changes:
        torch.set_num_threads(cast("int", threads))
    try:
        yield
    finally:
        if changes:
            torch.set_num_threads(figure)


class intra_op_threads:  # noqa: N801
    """Operators of the calling thread use that many threads inside the ``with`` block (None: as many as before)."""

    __slots__ = ("_before", "_threads")

    def __init__(self, threads: int | None) -> None:
        self._threads = threads
        self._before = 0  # 0: nothing was changed

    def __enter__(self) -> None:
        figure = torch.get_num_threads()
        if self._threads is None or (figure == self._threads and getattr(_seen, "yes", False)):
            return
        self._before = _enter(figure)
        torch.set_num_threads(self._threads)

    def __exit__(self, *error: object) -> None:
        if self._before:
            _leave(self._before)


def _enter(figure: int) -> int:
    """Count one more caller inside; the figure that it shall get back."""
    global _inside, _outside_figure
    with _counting:
        if _inside == 0:
            _outside_figure = figure
        elif not getattr(_seen, "yes", False):
            figure = _outside_figure
        _inside += 1
    _seen.yes = True
    return figure


def _leave(figure: int) -> None:
    global _inside
    with _counting:
        _inside -= 1
    torch.set_num_threads(figure)
