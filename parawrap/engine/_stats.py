"""What a session has done so far."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from parawrap.lanes import Lane
from parawrap.replicas import Freshness

__all__ = ["LaneStats", "Stats", "Tally"]


@dataclass(frozen=True, slots=True)
class LaneStats:
    """One lane: its device and its label, the pieces of work it did, their rows, and the seconds it was busy.

    The label is the device's name, or that of the NeuronCore that the lane feeds, "nc:0" say.
    """

    device: torch.device
    label: str
    tasks: int
    rows: int
    busy_s: float


@dataclass(frozen=True, slots=True)
class Stats:
    """Counters of a parallel block since it was opened; `print` shows them as a table.

    Attributes:
        calls: every call, also those that ran plainly.
        plain: calls that ran plainly, on the original, in the caller: with one shard on the CPU, say, or while traced.
        shards: the sizes of the last cut call's shards, in lane order.
        refreshes: how often something had changed and was copied into the replicas, in place.
        copied_bytes: the bytes of these copies.
        lanes: one entry a lane.
    """

    calls: int
    plain: int
    shards: tuple[int, ...]
    refreshes: int
    copied_bytes: int
    lanes: tuple[LaneStats, ...]

    def __str__(self) -> str:
        shards = f"last shards {list(self.shards)}, " if self.shards else ""
        head = f"{self.calls} calls ({self.plain} plain), {shards}{self.refreshes} refreshes ({self.copied_bytes} bytes)"
        rows = (
            f"  lane {index} {lane.label:<8} {lane.tasks:>7} tasks {lane.rows:>9} rows {lane.busy_s:>9.3f} s"
            for index, lane in enumerate(self.lanes)
        )
        return "\n".join([head, *rows])


class Tally:
    """Counts what a session does. Any number of threads may count at once; refers to no session."""

    def __init__(self, lanes: int) -> None:
        self._counting = threading.Lock()
        self._calls = self._plain = 0
        self._rows = [0] * lanes
        self._shards: tuple[int, ...] = ()

    def plain(self) -> None:
        """Count a plain call."""
        with self._counting:
            self._calls += 1
            self._plain += 1

    def cut(self, sizes: tuple[int, ...]) -> None:
        """Count a call that was cut into shards of these sizes."""
        with self._counting:
            self._calls += 1
            self._shards = sizes
            for shard, size in enumerate(sizes):
                self._rows[shard % len(self._rows)] += size

    def whole(self) -> None:
        """Count a call that some lane is to run whole."""
        with self._counting:
            self._calls += 1

    def rows(self, lane: int, rows: int) -> None:
        """Count the rows of a whole call, which that lane runs."""
        with self._counting:
            self._rows[lane] += rows

    def stats(self, lanes: Sequence[Lane], fresh: Freshness) -> Stats:
        """The counters as they stand."""
        of_lanes = tuple(
            LaneStats(lane.device, lane.label, lane.tasks, rows, lane.busy_ns / 1e9)
            for lane, rows in zip(lanes, self._rows, strict=True)
        )
        return Stats(self._calls, self._plain, self._shards, fresh.refreshes, fresh.copied_bytes, of_lanes)
