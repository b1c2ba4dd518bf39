"""Counters of a session, as `p.stats` returns them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from parawrap.displays import Table


@dataclass(frozen=True, slots=True)
class LaneStats:
    """Counters of one lane.

    Attributes:
        device: The device of the lane.
        label: The name of the device, or of the NeuronCore that the lane feeds, such as "nc:0".
        tasks: The number of shards and whole calls that ran, including those that raised.
        rows: The rows of calls that returned.
        busy_s: The seconds that these tasks took.
    """

    device: torch.device
    label: str
    tasks: int
    rows: int
    busy_s: float


# The generated repr would list every lane on one line
@dataclass(frozen=True, slots=True, repr=False)
class Stats:
    """Counters of a parallel block since it was opened; `print` shows them as a table.

    A call counts when it returns. A call that raised, was refused, or was cancelled does not count.

    Attributes:
        calls: All calls, including plain calls.
        plain: Calls that ran plainly, on the original module in the caller's thread. Examples are
            calls with one row.
        shards: The number of rows of each lane in the last cut call that returned.
        refreshes: The number of times that parameters were copied to other devices; with workers,
            that a changed model was packed again.
        copied_bytes: The size in bytes of these tensors, and of the buffers that were copied to
            other devices.
        lanes: One entry per lane.
    """

    calls: int
    plain: int
    shards: tuple[int, ...]
    refreshes: int
    copied_bytes: int
    lanes: tuple[LaneStats, ...]

    def __repr__(self) -> str:
        return f"<Stats: {self.calls} calls ({self.plain} plain), {len(self.lanes)} lanes>"

    def __str__(self) -> str:
        return str(self._table())

    def _repr_html_(self) -> str:
        return self._table().html()

    def _table(self) -> Table:
        # `shards` is empty before the first cut call
        shards = f"last shards {list(self.shards)}, " if self.shards else ""
        refreshes = f"{self.refreshes} refreshes ({self.copied_bytes} bytes)"
        title = f"{self.calls} calls ({self.plain} plain), {shards}{refreshes}"
        rows = []
        for index, lane in enumerate(self.lanes):
            busy_s = f"{lane.busy_s:.3f}"
            rows.append((f"lane {index}", lane.label, f"{lane.tasks}", f"{lane.rows}", busy_s))
        titles = ("lane", "device", "tasks", "rows", "busy s")
        return Table(title, titles, rows, texts=("lane", "device"))
