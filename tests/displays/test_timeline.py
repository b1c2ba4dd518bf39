"""Timelines: idle times, the two file formats, and paths that are refused."""

from __future__ import annotations

import json
import re

import pytest

from parawrap.displays import Span, Timeline, read_timeline, refusal_of_path, write_timeline

MS = 1_000_000


def span(track, start, end, name="forward", **details):
    return Span(track, start * MS, end * MS, name, "forward", details)


def timeline(*spans, tracks=("lane 0", "lane 1"), without_idle=()):
    return Timeline("a block", tracks, spans, without_idle)


def data_of(page):
    _, _, rest = page.partition('<script id="data" type="application/json">')
    return json.loads(rest.partition("</script>")[0])


def test_text_names_the_slowest_span():
    """`str` has one line per track and one for the slowest span. An aside has no idle time."""
    made = timeline(
        span(0, 0, 30),
        span(1, 0, 10, "forward, batch 3"),
        span(2, 0, 40),
        tracks="abc",
        without_idle=[2],
    )
    assert str(made).splitlines() == [
        "a block: 3 spans in 40 ms",
        "  a        1 span  idle     10 ms (25%)",
        "  b        1 span  idle     30 ms (75%)",
        "  c        1 span",
        "  slowest: forward, c, 40 ms",
    ]
    assert str(timeline()) == "a block: no spans"


def test_trace_has_the_format_of_chrome(tmp_path):
    """The trace has complete events in microseconds, and a thread name for each track.

    It is read as it was written.
    """
    made = timeline(
        span(0, 1, 2, "forward, batch 0", batch=0, rows=4),
        span(1, 1, 3, error="ValueError"),
        without_idle=[1],
    )
    write_timeline(tmp_path / "t.json", made)
    assert read_timeline(tmp_path / "t.json") == Timeline(
        "a block", ["lane 0", "lane 1"], list(made.spans), [1]
    )
    write_timeline(
        tmp_path / "t.json", timeline(span(0, 1, 3, "forward, 4 rows", rows=4, batch=None))
    )
    event = {
        "name": "forward, 4 rows",
        "cat": "forward",
        "ph": "X",
        "pid": 0,
        "tid": 0,
        "ts": 1000,
        "dur": 2000,
    }
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"] == [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": 0, "args": {"name": "lane 0"}},
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": 1, "args": {"name": "lane 1"}},
        event | {"args": {"rows": 4}},
    ]


def test_page_has_the_data(tmp_path):
    """Times in the page begin at 0, and are in microseconds. An aside has no gaps."""
    write_timeline(
        tmp_path / "t.html", timeline(span(0, 10, 30, rows=4), span(1, 20, 30), without_idle=[1])
    )
    data = data_of((tmp_path / "t.html").read_text())
    assert data["tracks"] == [{"label": "lane 0", "gaps": []}, {"label": "lane 1", "gaps": None}]
    assert data["spans"] == [
        [0, 0, 20000, "forward", 0, {"rows": 4}],
        [1, 10000, 10000, "forward", 0, {}],
    ]
    assert (data["duration"], data["slowest"], data["kinds"]) == (20000, 0, ["forward"])
    busy = [span(0, 10, 30), span(0, 20, 25), span(0, 40, 50), span(1, 12, 20), span(1, 20, 60)]
    write_timeline(tmp_path / "t.html", timeline(*busy))
    gaps = [track["gaps"] for track in data_of((tmp_path / "t.html").read_text())["tracks"]]
    assert gaps == [[[20000, 30000], [40000, 50000]], [[0, 2000]]]  # overlapping spans count once


def test_names_cannot_end_the_data(tmp_path):
    """Text that looks like HTML stays text. The page loads no script, style, font, or picture."""
    name = "</script><script>alert(1)</script><!--"
    write_timeline(tmp_path / "t.html", timeline(span(0, 1, 2, name), tracks=[name, "lane 1"]))
    page = (tmp_path / "t.html").read_text()
    assert not any(word in page for word in (name, "http:", "https:", "src=", "@import", "url("))
    data = data_of(page)
    assert data["spans"][0][3] == data["tracks"][0]["label"] == name


TRACK_BEFORE_ALL = """
{"otherData": {"title": "a", "without_idle": []}, "traceEvents": [
    {"ph": "M", "args": {"name": "lane 0"}},
    {"ph": "X", "name": "a", "cat": "b", "args": {}, "tid": -1, "ts": 1, "dur": 1}
]}
"""


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("{", "is not a trace of parawrap"),
        ('[{"ph": "X", "name": "a"}]', "is not a trace of parawrap"),
        (
            '{"traceEvents": [{"ph": "X", "name": "aten::mm", "pid": 7, "tid": 9, "ts": 5.5}]}',
            "is not a trace of parawrap",
        ),
        ('{"traceEvents": [], "otherData": {"title": "a", "without_idle": []}}', "has no spans"),
        (TRACK_BEFORE_ALL, "is not a trace of parawrap"),
    ],
    ids=range(5),
)
def test_other_files_are_refused(tmp_path, content, match):
    (tmp_path / "t.json").write_text(content)
    with pytest.raises(ValueError, match=match):
        read_timeline(tmp_path / "t.json")


@pytest.mark.parametrize(
    ("name", "match"),
    [
        (None, r"None is not a path\. Give a string or a pathlib\.Path"),
        ("t.txt", r"'.*t\.txt' is not NAME\.html .* or NAME\.json"),
        ("folder.html", r"'.*folder\.html' is a folder\. Give the path of a file in it"),
        ("gone/t.html", r"'.*t\.html' cannot be written: No such file .*\. Create its folder"),
        ("a\0b.html", r"'.*a\\x00b\.html' cannot be written: (utime: )?embedded null"),
    ],
)
def test_unwritable_paths_are_refused(tmp_path, name, match):
    (tmp_path / "folder.html").mkdir()
    found = refusal_of_path(f"{tmp_path}/{name}" if isinstance(name, str) else name)
    assert re.search(match, found), found
    assert [path.name for path in tmp_path.iterdir()] == ["folder.html"]
