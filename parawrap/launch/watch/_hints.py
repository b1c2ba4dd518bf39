"""A hint for the user when a rank has stood still for long: which ranks wait, and where."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from parawrap.launch.watch._rank_state import RankState

__all__ = ["STILL_S", "StandstillHint"]

STILL_S = 60.0
"""Seconds that a rank's main thread has been idle at one place when it reports that."""

_ANSWER_S = 2.0
_log = logging.getLogger("parawrap.launch")


class StandstillHint:
    """Logs one hint per attempt. Belongs to the thread that watches.

    Args:
        states: of all ranks, in their order.
    """

    def __init__(self, states: Sequence[RankState]) -> None:
        self._states = states
        self._places: dict[int, str] = {}
        self._is_done = False
        self.due_at: float | None = None

    def on_still(self) -> None:
        """Ask all ranks where they are, at the first report that a rank stands still."""
        if self.due_at is None and not self._is_done:
            self.due_at = time.monotonic() + _ANSWER_S
            for state in self._running():
                state.node.tell(state.rank, "where")

    def on_where(self, rank: int, place: str) -> None:
        """Note where a rank is, and log the hint once all have answered."""
        self._places[rank] = place
        if all(state.rank in self._places for state in self._running()):
            self.log()

    def log(self) -> None:
        """Log the hint. A rank that has not answered runs code that keeps Python's lock."""
        if self._is_done:
            return
        self._is_done, self.due_at = True, None
        ranks = [f"rank {state.rank} {self._places.get(state.rank, 'does not answer')}" for state in self._running()]
        _log.warning("no progress for %g s; the launch goes on. %s", STILL_S, "; ".join(ranks))

    def _running(self) -> list[RankState]:
        return [state for state in self._states if state.is_running and state.pid]
