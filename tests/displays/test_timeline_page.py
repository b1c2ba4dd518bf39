"""The page of a timeline in a real browser."""

from __future__ import annotations

import pytest

from parawrap.displays import Span, Timeline, write_timeline

MS = 1_000_000
FITS = "document.documentElement.scrollWidth <= innerWidth"


def batch(track, number, start, end, **details):
    name = f"forward, batch {number}, {number + 1} rows"
    return Span(
        track,
        start * MS,
        end * MS,
        name,
        "forward",
        {"batch": number, "rows": number + 1, **details},
    )


@pytest.fixture
def path(tmp_path):
    """A page with two lanes: three batches in the first, and two in the second, where the last
    raised.
    """
    spans = [batch(0, 0, 0, 10), batch(0, 2, 10, 20), batch(0, 3, 60, 80), batch(1, 1, 0, 15)]
    spans.append(batch(1, 4, 70, 100, error="ValueError"))
    write_timeline(
        tmp_path / "lanes.html", Timeline("Net in lanes", ["lane 0 on cpu", "lane 1 on cpu"], spans)
    )
    return tmp_path / "lanes.html"


def view(window):
    return tuple(round(each / 1000) for each in window.run("[view.from, view.to]"))  # milliseconds


def place_of(window, index):
    """Return the middle of a span in the window, in pixels."""
    x, y = window.run(
        "(([s, r]) => [r.left + 1 + (x(s.start) + x(s.end)) / 2, r.top + tracks[s.track].top + "
        f"LABEL + ROW / 2])([spans[{index}], canvas.getBoundingClientRect()])"
    )
    return x, y


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_page_fits_its_width(window, path, width, scheme):
    opened = window(path, width, color_scheme=scheme)
    opened.page.mouse.move(*place_of(opened, 4))  # the tip stays inside the page
    assert opened.run(FITS)
    assert opened.text("title") == opened.page.title() == "Net in lanes"
    assert opened.text("facts") == "5 spans on 2 tracks in 100 ms"
    assert opened.text("slowest") == "Slowest: forward, batch 4, 5 rows, 30 ms"
    assert opened.text("gap") == "Longest idle time: lane 1 on cpu, 55 ms"
    rows = [row.split("\t") for row in opened.text("tracks").splitlines()]
    assert rows[0] == ["lane 0 on cpu", "3", "40 ms", "60 ms", "60", "40 ms"]
    assert rows[1] == ["lane 1 on cpu", "2", "45 ms", "55 ms", "55", "55 ms"]
    assert opened.text("kinds").split("\n") == ["forward", "raised an exception"]


def test_hover_shows_rows_and_times(window, path):
    opened = window(path)
    opened.page.mouse.move(*place_of(opened, 4))
    assert opened.text("tip").splitlines() == [
        "forward, batch 4, 5 rows",
        "lane 1 on cpu",
        "30 ms, from 70 ms to 100 ms",
        "batch 4, rows 5",
        "raised ValueError",
    ]
    opened.page.mouse.move(5, 5)
    assert opened.run("tip.hidden")


def test_wheel_zooms_and_drag_pans(window, path):
    """The time under the mouse stays in place while zooming.

    Dragging moves the view by the same distance.
    """
    opened = window(path)
    x, y = place_of(opened, 2)
    opened.page.mouse.move(x, y)
    opened.page.mouse.wheel(0, -300)
    opened.page.wait_for_function("view.to - view.from < 0.6 * whole")
    zoomed = view(opened)
    assert place_of(opened, 2)[0] == pytest.approx(x, abs=1)
    opened.page.mouse.down()
    opened.page.mouse.move(x - 300, y, steps=3)
    opened.page.mouse.up()
    assert place_of(opened, 2)[0] == pytest.approx(x - 300, abs=3)
    assert zoomed[1] - zoomed[0] == pytest.approx(view(opened)[1] - view(opened)[0], abs=1)
    opened.page.click("#all")
    assert view(opened) == (0, 100)


def test_keys_reach_every_span(window, path):
    """Arrows go to the next span and track, Home and End to the ends, Enter and the letters change
    the view.
    """
    opened = window(path)
    opened.page.focus("#canvas")
    seen = []
    for key in ("ArrowRight", "ArrowRight", "End", "ArrowRight", "ArrowDown", "Home", "ArrowUp"):
        opened.press(key)
        seen.append(opened.run("selected.index"))
    assert seen == [0, 1, 2, 2, 4, 3, 0]
    opened.press("Enter")
    assert view(opened) == (-1, 29)
    opened.press("+")
    assert view(opened)[1] - view(opened)[0] == 18
    before = view(opened)
    opened.press("d")
    assert view(opened)[0] > before[0]
    opened.press("a", "-", "Escape")
    assert view(opened) == (0, 100)


def test_clicks_select_and_zoom(window, path):
    """The details of the selected span are below the picture.

    Each button zooms to its span or gap.
    """
    opened = window(path)
    opened.page.mouse.dblclick(*place_of(opened, 1))
    assert opened.text("details").startswith(
        "forward, batch 2, 3 rows\nlane 0 on cpu\n10 ms, from 10 ms to 20 ms"
    )
    assert view(opened) == (0, 30)
    opened.page.click("#all")
    assert opened.text("details") == "Select a span to see its details."
    opened.page.click("#slowest")
    assert opened.text("details").startswith("forward, batch 4")
    assert view(opened)[1] >= 100 > 70 > view(opened)[0]
    opened.page.click("#gap")
    assert opened.text("details") == "idle\nlane 1 on cpu\n55 ms, from 15 ms to 70 ms"


def test_names_are_shown_as_text(window, tmp_path):
    """A long title, label, or name that looks like HTML runs no script, is shown as it is, and does
    not widen the page.
    """
    name = f"<img src=x onerror=console.log(1)>{'x' * 300}"
    span = Span(0, 0, MS, name, name, {"error": name})
    write_timeline(tmp_path / "t.html", Timeline(name, [name], [span]))
    opened = window(tmp_path / "t.html", 390)
    opened.page.click("#slowest")
    assert opened.run(FITS)
    assert opened.text("title") == name
    assert name in opened.text("details")
