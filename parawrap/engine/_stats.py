"""What a session has done so far."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["LaneStats", "Stats"]


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
