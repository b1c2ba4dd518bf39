"""Recognize ranks without progress: log where they wait, and detect deadlocks."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Protocol

from parawrap.launch._platform import Platform
from parawrap.launch.rank._control_thread import Status

__all__ = ["STILL_S", "STUCK_S", "Standstill", "report_interval_s"]

STILL_S = 60.0
"""Seconds that a rank's main thread may be idle at one place before the hint."""

STUCK_S = 20.0
"""Seconds that the remaining ranks may wait for other ranks after some have exited."""

_REPORT_S = 1.0  # often enough for limits of a few seconds
_REPORTS_PER_S = 1000  # a guess: the coordinator handles one report in less than 0.1 ms
_IDLE_S = 5.0  # a loop that polls, such as one over a queue, is busy
_MISSED = 3  # intervals without a report until a rank counts as one that does not answer
_log = logging.getLogger("parawrap.launch")


def report_interval_s(platform: Platform) -> float:
    """Return the seconds between two reports of a rank: a quarter of the shortest time that the reports must show.

    The ranks of large launches report less often, so that all of them together send at most `_REPORTS_PER_S`.
    """
    shortest_s = min(_REPORT_S, STILL_S / 4, STUCK_S / 4, (platform.hang_timeout_s or STILL_S) / 4)
    return max(shortest_s, platform.world_size / _REPORTS_PER_S)


class Observed(Protocol):
    """One rank and the last report on its main thread, as in `RankState`."""

    @property
    def rank(self) -> int: ...
    @property
    def pid(self) -> int: ...
    @property
    def is_running(self) -> bool: ...
    @property
    def status(self) -> Status | None: ...
    @property
    def status_at(self) -> float: ...


class Standstill:
    """Judges the reports of all ranks of one attempt. Used by the supervising thread.

    Args:
        states: The states of all ranks, by rank.
        report_s: Seconds between two reports of a rank.
    """

    def __init__(self, states: Sequence[Observed], report_s: float) -> None:
        self._states = states
        self._report_s = report_s
        self._has_hinted = False

    def hint(self) -> None:
        """Log the places of all ranks, once, if one of them has been idle for `STILL_S`.

        Wait for late reports at first. Later, a rank without a report is stopped, or runs code that holds the GIL.
        """
        running = [state for state in self._states if state.is_running and state.pid]
        if self._has_hinted or not any(state.status and state.status.still_s >= STILL_S for state in running):
            return
        now = time.monotonic()
        if any(self._report_s * 1.5 < now - state.status_at <= self._report_s * _MISSED for state in running):
            return
        self._has_hinted = True
        ranks = [f"rank {state.rank} {self._place_of(state, now)}" for state in running]
        _log.warning(
            "no progress for %g s; the launch continues, unless hang_timeout_s ends it. %s",
            STILL_S,
            "; ".join(ranks),
        )

    def _place_of(self, state: Observed, now: float) -> str:
        if state.status is None or now - state.status_at > self._report_s * _MISSED:
            return "does not answer"
        still_s = state.status.still_s  # that of ranks in one collective differs by a second or two
        return f"{f'idle for {still_s:.0f} s at' if still_s >= _IDLE_S else 'busy at'} {state.status.place}"

    def is_deadlock(self, departed_at: float) -> bool:
        """True if all running ranks have waited for other ranks for `STUCK_S` since the last rank exited."""
        running = [state for state in self._states if state.is_running]
        return time.monotonic() - departed_at >= STUCK_S and all(
            state.status is not None and state.status.waits_s >= STUCK_S for state in running
        )
