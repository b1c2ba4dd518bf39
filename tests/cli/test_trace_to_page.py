"""``parawrap timeline``: pages of traces."""

from __future__ import annotations

import pytest

from parawrap.cli import main
from parawrap.displays import Span, Timeline, write_timeline


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "lanes.json"
    write_timeline(
        path,
        Timeline(
            "Net in lanes", ["lane 0"], [Span(0, 0, 1_000_000, "forward, batch 0", "forward")]
        ),
    )
    return path


def test_page_is_next_to_trace(trace, tmp_path, capsys):
    """The command prints a summary and an address that browsers open. -o names another page."""
    assert main(["timeline", str(trace)]) == 0
    page = trace.with_suffix(".html")
    assert "forward, batch 0" in page.read_text()
    lines = capsys.readouterr().out.splitlines()
    assert (lines[0], lines[-1]) == ("Net in lanes: 1 span in 1 ms", f"wrote {page.as_uri()}")
    assert main(["timeline", str(trace), "-o", str(tmp_path / "other.html")]) == 0
    assert (tmp_path / "other.html").exists()


def test_output_may_begin_with_the_home_folder(trace, tmp_path, monkeypatch):
    """Shells do not expand the "~" in --output=~/page.html: the command does."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["timeline", str(trace), "--output=~/page.html"]) == 0
    assert (tmp_path / "page.html").exists()


@pytest.mark.parametrize("output", ["page.txt", "gone/page.html"])
def test_other_places_are_refused(trace, tmp_path, output):
    """The page ends with .html or .json, and its folder exists. Nothing is written."""
    assert main(["timeline", str(trace), "-o", str(tmp_path / output)]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["lanes.json"]
