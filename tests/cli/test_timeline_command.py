"""``parawrap timeline``: pages of traces."""

from __future__ import annotations

import pytest

from parawrap.cli import main
from parawrap.displays import Span, Timeline, write_timeline


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "lanes.json"
    write_timeline(path, Timeline("Net in lanes", ["lane 0"], [Span(0, 0, 1_000_000, "forward, batch 0", "forward")]))
    return path


def test_page_is_written_next_to_the_trace(trace, capsys):
    """The page has the name of the trace. The command prints a summary and an address that browsers open."""
    assert main(["timeline", str(trace)]) == 0
    page = trace.with_suffix(".html")
    assert "forward, batch 0" in page.read_text()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Net in lanes: 1 span in 1 ms"
    assert lines[-1] == f"wrote {page.as_uri()}"


def test_page_may_have_another_place(trace, tmp_path):
    """-o names the page."""
    assert main(["timeline", str(trace), "-o", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").exists()


@pytest.mark.parametrize("output", ["page.json", "gone/page.html", "page"])
def test_a_place_that_is_no_page_is_refused(trace, tmp_path, output):
    """The page ends with .html, and its folder exists. Nothing is written."""
    assert main(["timeline", str(trace), "-o", str(tmp_path / output)]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["lanes.json"]
