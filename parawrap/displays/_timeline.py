"""Timelines: spans of time on tracks.

They become a page for browsers, or a trace for chrome://tracing and ui.perfetto.dev.
"""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from parawrap.displays._table import spell_count

_SUFFIXES = ".html", ".json"
_TEMPLATE = Path(__file__).with_name("timeline.html")
_PLACE_OF_DATA = "/* data */"
_US = 1000  # nanoseconds per microsecond


class Span(NamedTuple):
    """A piece of work on one track.

    Attributes:
        track: The index of the track.
        start: The start in nanoseconds. All spans of a timeline use the same clock.
        end: The end in nanoseconds.
        name: The text in the picture.
        kind: Spans of one kind have one color.
        details: Further facts by name: strings, numbers, or None. The detail "error" marks a
            failure.
    """

    track: int
    start: int
    end: int
    name: str
    kind: str
    details: Mapping[str, Any] = {}

    @property
    def duration(self) -> int:
        """Nanoseconds from the start to the end."""
        return self.end - self.start


class Gap(NamedTuple):
    """An idle interval of a track, in nanoseconds."""

    start: int
    end: int


class Timeline(NamedTuple):
    """Tracks, by their labels, and the spans on them, in any order.

    `without_idle` are the indices of tracks whose idle time means nothing, such as that of the
    caller's thread.
    """

    title: str
    tracks: Sequence[str]
    spans: Sequence[Span]
    without_idle: Collection[int] = ()

    @property
    def duration(self) -> int:
        """Nanoseconds from the first start to the last end."""
        return max((span.end for span in self.spans), default=0) - self.start

    @property
    def start(self) -> int:
        """The first start."""
        return min((span.start for span in self.spans), default=0)

    @property
    def slowest(self) -> int | None:
        """The index of the longest span; None without spans."""
        durations = [span.duration for span in self.spans]
        return durations.index(max(durations)) if durations else None

    def gaps(self) -> list[list[Gap]]:
        """Return the idle intervals of each track between the first start and the last end."""
        by_track: list[list[Span]] = [[] for _ in self.tracks]
        for span in self.spans:
            by_track[span.track].append(span)
        began = self.start
        ended = began + self.duration
        return [_find_gaps(spans, began, ended) for spans in by_track]

    def __str__(self) -> str:
        """Return one line for each track, with its idle time, and one for the slowest span."""
        if self.slowest is None:
            return f"{self.title}: no spans"
        counts = Counter(span.track for span in self.spans)
        width = max(map(len, self.tracks))
        count = spell_count(len(self.spans), "span")
        lines = [f"{self.title}: {count} in {_spell_time(self.duration)}"]
        for track, (label, gaps) in enumerate(zip(self.tracks, self.gaps(), strict=True)):
            line = f"  {label:<{width}}  {spell_count(counts[track], 'span'):>12}"
            if track not in self.without_idle:
                idle = sum(gap.end - gap.start for gap in gaps)
                # Spans of 0 ns make a timeline of 0 ns
                share = 100 * idle / self.duration if self.duration else 0
                line += f"  idle {_spell_time(idle):>9} ({share:.0f}%)"
            lines.append(line)
        span = self.spans[self.slowest]
        duration = _spell_time(span.duration)
        lines.append(f"  slowest: {span.name}, {self.tracks[span.track]}, {duration}")
        return "\n".join(lines)


def _find_gaps(spans: Sequence[Span], began: int, ended: int) -> list[Gap]:
    """Return the times between `began` and `ended` at which no span of a track runs."""
    gaps = []
    busy_until = began
    for span in sorted(spans, key=lambda span: span.start):
        if span.start > busy_until:
            gaps.append(Gap(busy_until, span.start))
        busy_until = max(busy_until, span.end)  # spans may overlap
    if ended > busy_until:
        gaps.append(Gap(busy_until, ended))
    return gaps


def refusal_of_path(path: str | os.PathLike[str]) -> str | None:
    """Return why `write_timeline` cannot write a file at this path, and what to do; None if it can.

    Creates a file in the folder and removes it, which also detects missing permissions, read-only
    disks, and long names.
    """
    is_path = isinstance(path, (str, os.PathLike)) and isinstance(os.fspath(path), str)
    if not is_path:
        return f"{path!r} is not a path. Give a string or a pathlib.Path, such as 'lanes.html'"
    path = Path(path).expanduser()
    if path.suffix not in _SUFFIXES:
        return (
            f"{str(path)!r} is not NAME.html (a page for browsers) or NAME.json (a trace for "
            "ui.perfetto.dev)"
        )
    try:
        if path.is_dir():
            return (
                f"{str(path)!r} is a folder. Give the path of a file in it, such as "
                f"{str(path / 'lanes.html')!r}"
            )
        unfinished = _temporary_path(path)
        unfinished.touch()
        unfinished.unlink()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        return f"{str(path)!r} cannot be written: {why}. Create its folder, or give another path"
    return None


def write_timeline(path: str | os.PathLike[str], timeline: Timeline) -> None:
    """Write a page if the path ends with ``.html``, and a trace if it ends with ``.json``.

    Replaces an existing file.
    """
    path = Path(path)
    text = _make_page(timeline) if path.suffix == ".html" else json.dumps(_make_trace(timeline))
    # A file next to it, renamed at the end: a reader never finds half a page
    unfinished = _temporary_path(path)
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    finally:  # after an error or Ctrl-C: a renamed file is not there any more
        unfinished.unlink(missing_ok=True)


def _temporary_path(path: Path) -> Path:
    # Its own for each thread: two blocks may write traces to one path
    return path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")


def read_timeline(path: str | os.PathLike[str]) -> Timeline:
    """Read a trace that `write_timeline` wrote.

    Raises:
        ValueError: If the file is not such a trace, or has no spans.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        events, other = content["traceEvents"], content["otherData"]
        # In Chrome's format, "M" is metadata: here the name of a track. "X" is a span
        tracks = [event["args"]["name"] for event in events if event["ph"] == "M"]
        known_tracks = range(len(tracks))
        spans: list[Span] = []
        for event in events:
            if event["ph"] != "X":
                continue
            track = known_tracks[event["tid"]]  # raises for a track that the file does not name
            start = round(event["ts"] * _US)
            end = start + round(event["dur"] * _US)
            spans.append(Span(track, start, end, event["name"], event["cat"], event["args"]))
        timeline = Timeline(other["title"], tracks, spans, other["without_idle"])
    except (ValueError, LookupError, TypeError) as error:
        msg = (
            f"{os.fspath(path)!r} is not a trace of parawrap. Give a .json file that p.trace wrote"
        )
        raise ValueError(msg) from error
    if not spans:
        msg = f"{os.fspath(path)!r} has no spans, so there is nothing to show"
        raise ValueError(msg)
    return timeline


def _make_trace(timeline: Timeline) -> dict[str, Any]:
    """Return a timeline in the format of Chrome and Perfetto, which counts in microseconds."""
    names = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": track, "args": {"name": label}}
        for track, label in enumerate(timeline.tracks)
    ]
    work = [
        {
            "name": span.name,
            "cat": span.kind,
            "ph": "X",
            "pid": 0,
            "tid": span.track,
            "ts": span.start / _US,
            "dur": span.duration / _US,
            "args": _select_known(span.details),
        }
        for span in timeline.spans
    ]
    return {
        "traceEvents": [*names, *work],
        "otherData": {"title": timeline.title, "without_idle": sorted(timeline.without_idle)},
    }


def _make_page(timeline: Timeline) -> str:
    """Return a page that needs no other file and no network."""
    kinds = list(dict.fromkeys(span.kind for span in timeline.spans))
    began = timeline.start
    tracks: list[dict[str, Any]] = []
    for track, gaps in enumerate(timeline.gaps()):
        shown: list[list[float]] | None = None
        if track not in timeline.without_idle:
            shown = [[(gap.start - began) / _US, (gap.end - began) / _US] for gap in gaps]
        tracks.append({"label": timeline.tracks[track], "gaps": shown})
    # The script of the page reads these fields by their positions
    spans = [
        [
            span.track,
            (span.start - began) / _US,
            span.duration / _US,
            span.name,
            kinds.index(span.kind),
            _select_known(span.details),
        ]
        for span in timeline.spans
    ]
    data = {
        "title": timeline.title,
        "duration": timeline.duration / _US,
        "slowest": timeline.slowest,
        "kinds": kinds,
        "tracks": tracks,
        "spans": spans,
    }
    template = _TEMPLATE.read_text(encoding="utf-8")
    # No text of the data ends the script element: without "<", it has no tags
    inert = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return template.replace(_PLACE_OF_DATA, inert)


def _select_known(details: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in details.items() if value is not None}


def _spell_time(nanoseconds: float) -> str:
    for unit, size in (("s", 1e9), ("ms", 1e6)):
        if nanoseconds >= size:
            return f"{nanoseconds / size:.3g} {unit}"
    return f"{nanoseconds / 1e3:.3g} us"
