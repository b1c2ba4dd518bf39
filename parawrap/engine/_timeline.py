"""A timeline of the lanes, in the format of Chrome tracing and Perfetto."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from parawrap.lanes import Lane, Span

__all__ = ["Trace"]


class Trace:
    """Records the work of each lane inside the ``with`` block, and writes the file at its end.

    `spans` has one entry per task: the index of the lane, and the start and end in nanoseconds of
    ``time.perf_counter_ns``.
    """

    def __init__(self, lanes: Sequence[Lane], path: str | Path) -> None:
        self._lanes = lanes
        self._path = Path(path)
        self.spans: list[Span] = []

    def __enter__(self) -> Self:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        for lane in self._lanes:
            lane.recorders = (*lane.recorders, self.spans)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for lane in self._lanes:
            lane.recorders = tuple(spans for spans in lane.recorders if spans is not self.spans)
        names = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": lane.index, "args": {"name": str(lane)}}
            for lane in self._lanes
        ]
        work = [
            {"name": "work", "ph": "X", "pid": 0, "tid": s.lane, "ts": s.start / 1e3, "dur": (s.end - s.start) / 1e3}
            for s in self.spans
        ]
        self._path.write_text(json.dumps({"traceEvents": [*names, *work]}))
