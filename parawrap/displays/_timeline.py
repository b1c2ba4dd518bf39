"""Timelines: spans of time on tracks.

A timeline is written as a page for browsers, or as a trace for chrome://tracing and
ui.perfetto.dev.
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

_TEMPLATE = Path(__file__).with_name("timeline.html")
_PLACE_OF_DATA = "/* data */"  # in the template
_NS_PER_US = 1000  # a span counts nanoseconds, and a file microseconds


class Span(NamedTuple):
    """A piece of work on one track.

    Attributes:
        track: The index of the track.
        start: The start in nanoseconds. All spans of a timeline use the same clock.
        end: The end in nanoseconds.
        name: The text in the picture.
        kind: Spans of one kind have one color.
        details: Further facts by name: strings, numbers, or None if a fact is not known. The page
            marks a span with the detail "error" as failed.
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
    """Spans on tracks.

    Attributes:
        title: The text above the picture.
        tracks: The label of each track.
        spans: The spans on all tracks, in any order.
        without_idle: The indices of tracks whose idle time means nothing, such as that of the
            caller's thread.
    """

    title: str
    tracks: Sequence[str]
    spans: Sequence[Span]
    without_idle: Collection[int] = ()

    @property
    def start(self) -> int:
        """The first start in nanoseconds; 0 without spans."""
        return min((span.start for span in self.spans), default=0)

    @property
    def duration(self) -> int:
        """Nanoseconds from the first start to the last end."""
        last_end = max((span.end for span in self.spans), default=0)
        return last_end - self.start

    @property
    def slowest(self) -> int | None:
        """The index of the longest span, of the first one if several are; None without spans."""
        durations = [span.duration for span in self.spans]
        if not durations:
            return None
        return durations.index(max(durations))

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
        duration = self.duration
        count = spell_count(len(self.spans), "span")
        lines = [f"{self.title}: {count} in {_spell_time(duration)}"]
        counts = Counter(span.track for span in self.spans)
        width = max(map(len, self.tracks))
        for track, gaps in enumerate(self.gaps()):
            count = spell_count(counts[track], "span")
            line = f"  {self.tracks[track]:<{width}}  {count:>12}"
            if track not in self.without_idle:
                idle = sum(gap.end - gap.start for gap in gaps)
                # Spans of 0 ns make a timeline of 0 ns
                share = 100 * idle / duration if duration else 0
                line += f"  idle {_spell_time(idle):>9} ({share:.0f}%)"
            lines.append(line)
        span = self.spans[self.slowest]
        track_label = self.tracks[span.track]
        lines.append(f"  slowest: {span.name}, {track_label}, {_spell_time(span.duration)}")
        return "\n".join(lines)


def _find_gaps(spans: Sequence[Span], began: int, ended: int) -> list[Gap]:
    """Return the times between `began` and `ended` at which none of these spans runs."""
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

    The check creates a file in the folder and removes it. So it finds missing permissions,
    read-only disks, and names that are too long.
    """
    # os.fspath returns bytes for paths of bytes, which pathlib refuses
    is_path = isinstance(path, (str, os.PathLike)) and isinstance(os.fspath(path), str)
    if not is_path:
        return f"{path!r} is not a path. Give a string or a pathlib.Path, such as 'lanes.html'"
    path = Path(path).expanduser()
    if path.suffix not in (".html", ".json"):
        return (
            f"{str(path)!r} is not NAME.html (a page for browsers) or NAME.json (a trace for "
            "ui.perfetto.dev)"
        )
    try:
        if path.is_dir():
            file = str(path / "lanes.html")
            return f"{str(path)!r} is a folder. Give the path of a file in it, such as {file!r}"
        unfinished = _temporary_path(path)
        unfinished.touch()
        unfinished.unlink()
    except (OSError, ValueError) as error:  # ValueError: a path with a null character
        why = error.strerror if isinstance(error, OSError) else error
        return f"{str(path)!r} cannot be written: {why}. Create its folder, or give another path"
    return None


def write_timeline(path: str | os.PathLike[str], timeline: Timeline) -> None:
    """Write a page if the path ends with ``.html``, and otherwise a trace.

    An existing file is replaced.

    Raises:
        OSError: If the file cannot be written. Call `refusal_of_path` first.
    """
    path = Path(path)
    make_text = _make_page if path.suffix == ".html" else _make_trace
    text = make_text(timeline)
    # A temporary file is renamed at the end: a reader of the path never finds half a page
    unfinished = _temporary_path(path)
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    finally:  # removes the temporary file after an error or Ctrl-C; a renamed one is gone
        unfinished.unlink(missing_ok=True)


def _temporary_path(path: Path) -> Path:
    # Each thread has its own: two blocks may write to one path at the same time
    return path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")


def read_timeline(path: str | os.PathLike[str]) -> Timeline:
    """Read a trace that `write_timeline` wrote.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file is not such a trace, or has no spans.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        events = content["traceEvents"]
        other = content["otherData"]
        # In Chrome's format, "M" is metadata: here the name of a track. "X" is a span
        tracks = [event["args"]["name"] for event in events if event["ph"] == "M"]
        known_tracks = range(len(tracks))
        spans: list[Span] = []
        for event in events:
            if event["ph"] != "X":
                continue
            track = event["tid"]
            if track not in known_tracks:
                msg = f"the file does not name track {track!r}"
                raise ValueError(msg)
            start = round(event["ts"] * _NS_PER_US)
            end = start + round(event["dur"] * _NS_PER_US)
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


def _make_trace(timeline: Timeline) -> str:
    """Return a timeline in the format of Chrome and Perfetto, which counts in microseconds."""
    # Chrome shows the threads of processes: here each track is a thread of process 0
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
            "ts": span.start / _NS_PER_US,
            "dur": span.duration / _NS_PER_US,
            "args": _known_details(span),
        }
        for span in timeline.spans
    ]
    other = {"title": timeline.title, "without_idle": sorted(timeline.without_idle)}
    return json.dumps({"traceEvents": names + work, "otherData": other})


def _make_page(timeline: Timeline) -> str:
    """Return a page that needs no other file and no network."""
    # In the order of their first spans. Each span holds the position of its kind in this list
    kinds = list(dict.fromkeys(span.kind for span in timeline.spans))
    began = timeline.start
    tracks: list[dict[str, Any]] = []
    for track, gaps in enumerate(timeline.gaps()):
        shown = None  # the page shows no idle time of this track
        if track not in timeline.without_idle:
            shown = [
                ((gap.start - began) / _NS_PER_US, (gap.end - began) / _NS_PER_US) for gap in gaps
            ]
        tracks.append({"label": timeline.tracks[track], "gaps": shown})
    # The script of the page reads these fields by their positions
    spans = [
        [
            span.track,
            (span.start - began) / _NS_PER_US,
            span.duration / _NS_PER_US,
            span.name,
            kinds.index(span.kind),
            _known_details(span),
        ]
        for span in timeline.spans
    ]
    data = {
        "title": timeline.title,
        "duration": timeline.duration / _NS_PER_US,
        "slowest": timeline.slowest,
        "kinds": kinds,
        "tracks": tracks,
        "spans": spans,
    }
    template = _TEMPLATE.read_text(encoding="utf-8")
    text = json.dumps(data, separators=(",", ":"))
    # A "</script>" in a name would end the script element of the page: JSON may escape each "<"
    return template.replace(_PLACE_OF_DATA, text.replace("<", "\\u003c"))


def _known_details(span: Span) -> dict[str, Any]:
    return {name: value for name, value in span.details.items() if value is not None}


def _spell_time(nanoseconds: float) -> str:
    for unit, size in (("s", 1e9), ("ms", 1e6)):
        if nanoseconds >= size:
            return f"{nanoseconds / size:.3g} {unit}"
    return f"{nanoseconds / 1e3:.3g} us"
