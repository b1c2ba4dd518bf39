"""A log message for launches without progress: it says which ranks wait, and where."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from parawrap.launch.coordinator._rank_state import RankState

__all__ = ["STILL_S", "StandstillHint"]

STILL_S = 60.0
"""Seconds until a rank reports that its main thread is idle at one place."""

_ANSWER_S = 2.0
_log = logging.getLogger("parawrap.launch")


class StandstillHint:
    """Logs at most one hint per attempt. Used by the supervising thread.

    Args:
        states: The states of all ranks, by rank.
    """

    def __init__(self, states: Sequence[RankState]) -> None:
        self._states = states
        self._places: dict[int, str] = {}
        self._is_done = False
        self.due_at: float | None = None

    def on_still(self) -> None:
        """Handle a report that a rank is idle. On the first one, request the current place of all ranks."""
        if self.due_at is None and not self._is_done:
            self.due_at = time.monotonic() + _ANSWER_S
            for state in self._running():
                state.node.send(state.rank, "where")

    def on_where(self, rank: int, place: str) -> None:
        """Store a rank's place. Log the hint once all ranks have answered."""
        self._places[rank] = place
        if all(state.rank in self._places for state in self._running()):
            self.log()

    def log(self) -> None:
        """Log the hint. A rank that has not answered runs code that holds the GIL."""
        if self._is_done:
            return
        self._is_done, self.due_at = True, None
        ranks = [f"rank {state.rank} {self._places.get(state.rank, 'does not answer')}" for state in self._running()]
        _log.warning("no progress for %g s; the launch continues. %s", STILL_S, "; ".join(ranks))

    def _running(self) -> list[RankState]:
        return [state for state in self._states if state.is_running and state.pid]
