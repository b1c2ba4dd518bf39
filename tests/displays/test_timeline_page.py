"""The page of a timeline in a real browser."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parawrap import parallel
from parawrap.displays import Span, Timeline, write_timeline

MS = 1_000_000
WIDTHS = pytest.mark.parametrize("width", [1280, 390])
FITS = "document.documentElement.scrollWidth <= innerWidth"


def batch(track, number, start, end, **details):
    name = f"forward, batch {number}, {number + 1} rows"
    return Span(track, start * MS, end * MS, name, "forward", {"batch": number, "rows": number + 1, **details})


@pytest.fixture
def path(tmp_path):
    """A page with two lanes: three batches in the first, two in the second, the last of which raised."""
    spans = [batch(0, 0, 0, 10), batch(0, 2, 10, 20), batch(0, 3, 60, 80), batch(1, 1, 0, 15)]
    spans.append(batch(1, 4, 70, 100, error="ValueError"))
    write_timeline(tmp_path / "lanes.html", Timeline("Net in lanes", ["lane 0 on cpu", "lane 1 on cpu"], spans))
    return tmp_path / "lanes.html"


def view(window):
    return tuple(round(each / 1000) for each in window.run("[view.from, view.to]"))  # milliseconds


def place_of(window, index):
    """Return the middle of a span in the window, in pixels."""
    x, y = window.run(
        f"(([s, r]) => [r.left + 1 + (x(s.start) + x(s.end)) / 2, r.top + tracks[s.track].top + LABEL + ROW / 2])"
        f"([spans[{index}], canvas.getBoundingClientRect()])"
    )
    return x, y


@WIDTHS
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_fits_its_width(window, path, width, scheme):
    """The page fits into its width, in both color schemes, and has the figures of the timeline."""
    opened = window(path, width, color_scheme=scheme)
    assert opened.run(FITS)
    assert opened.text("title") == opened.page.title() == "Net in lanes"
    assert opened.text("facts") == "5 spans on 2 tracks in 100 ms"
    assert opened.text("slowest") == "Slowest: forward, batch 4, 5 rows, 30 ms"
    assert opened.text("gap") == "Longest idle time: lane 1 on cpu, 55 ms"
    rows = [row.split("\t") for row in opened.text("tracks").splitlines()]
    assert rows[0] == ["lane 0 on cpu", "3", "40 ms", "60 ms", "60", "40 ms"]
    assert rows[1] == ["lane 1 on cpu", "2", "45 ms", "55 ms", "55", "55 ms"]
    assert opened.text("kinds").split("\n") == ["forward", "raised an exception"]


def test_long_names_fit(window, tmp_path):
    """Names without spaces wrap, or are cut off in the picture."""
    name = "x" * 300
    write_timeline(tmp_path / "t.html", Timeline(name, [name, name], [Span(0, 0, MS, name, name, {"error": name})]))
    opened = window(tmp_path / "t.html", 390)
    opened.page.click("#slowest")
    assert opened.run(FITS)


def test_spans_are_painted_where_they_lie(window, path):
    """Batches have one color, the batch that raised has another, and the lane has its own color where it is idle."""
    opened = window(path)
    places = [(5000, 0), (70000, 0), (85000, 1), (40000, 0)]
    batch_color, other_batch, error, idle = opened.run(
        f"""() => {{
          const {{ data, width }} = pen.getImageData(0, 0, canvas.width, canvas.height);
          const pixel = (left, top) => 4 * (Math.round(left) + top * width);
          const colorAt = (...place) => data.slice(pixel(...place), pixel(...place) + 3);
          const places = {[list(place) for place in places]};
          return places.map(([us, track]) => colorAt(x(us), tracks[track].top + LABEL + 3).join());
        }}"""
    )
    assert batch_color == other_batch
    assert len({batch_color, error, idle}) == 3


def test_hover_shows_rows_and_times(window, path):
    """The tip over a span has its name, track, duration, and details. It disappears beside the span."""
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


@WIDTHS
def test_tip_stays_inside_the_page(window, path, width):
    """The tip of the last span does not widen the page."""
    opened = window(path, width)
    opened.page.mouse.move(*place_of(opened, 4))
    assert opened.run(FITS)
    assert opened.run("tip.getBoundingClientRect().right <= innerWidth")


def test_wheel_zooms_and_drag_pans(window, path):
    """The time under the mouse stays in place while zooming. Dragging moves the view by the same distance."""
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


def test_clicks_select_and_zoom(window, path):
    """The details of the selected span are below the picture. A click beside the spans selects none."""
    opened = window(path)
    opened.page.mouse.click(*place_of(opened, 1))
    assert opened.text("details").startswith("forward, batch 2, 3 rows\nlane 0 on cpu\n10 ms, from 10 ms to 20 ms")
    opened.page.mouse.dblclick(*place_of(opened, 1))
    assert view(opened) == (0, 30)
    opened.page.click("#all")
    assert opened.text("details") == "Select a span to see its details."


def test_keys_reach_every_span(window, path):
    """Arrows go to the next span and track, Home and End to the ends, Enter and the letters change the view."""
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


def test_tab_reaches_every_control(window, path):
    """Tab goes through the buttons, the picture, and the idle times of the table, in this order."""
    opened = window(path)
    reached = []
    for _ in range(8):
        opened.press("Tab")
        reached.append(opened.run("document.activeElement.id || document.activeElement.textContent"))
    assert reached == ["in", "out", "all", "slowest", "gap", "canvas", "40 ms", "55 ms"]


def test_buttons_show_extremes(window, path):
    """Each button zooms to its span or gap, and says what it shows."""
    opened = window(path)
    opened.page.click("#slowest")
    assert opened.text("details").startswith("forward, batch 4")
    assert view(opened)[1] >= 100 > 70 > view(opened)[0]
    opened.page.click("#gap")
    assert opened.text("details") == "idle\nlane 1 on cpu\n55 ms, from 15 ms to 70 ms"
    opened.page.click("#tracks button >> nth=0")
    assert opened.text("details") == "idle\nlane 0 on cpu\n40 ms, from 20 ms to 60 ms"


def test_two_fingers_zoom(window, path):
    """Moving two touches apart shows a shorter time."""
    opened = window(path, 390, has_touch=True)
    opened.run(
        """() => {
          const touch = (kind, pointerId, clientX) =>
            canvas.dispatchEvent(new PointerEvent(kind, { pointerId, clientX, clientY: 300 }));
          canvas.setPointerCapture = () => {};
          touch("pointerdown", 1, 150); touch("pointerdown", 2, 200);
          touch("pointermove", 2, 300); touch("pointerup", 1, 150); touch("pointerup", 2, 300);
        }"""
    )
    assert opened.run("view.to - view.from") == pytest.approx(opened.run("whole") / 3, rel=0.05)


def test_overlapping_spans_lie_in_rows(window, tmp_path):
    """On one track, a span that begins before another has ended goes into the next row."""
    spans = [batch(0, 0, 0, 10), batch(0, 1, 5, 15), batch(0, 2, 10, 20)]
    write_timeline(tmp_path / "t.html", Timeline("t", ["lane 0"], spans))
    assert window(tmp_path / "t.html").run("spans.map(span => span.row)") == [0, 1, 0]


@pytest.mark.parametrize(("count", "scale", "track"), [(3000, 1, 0), (3000, 1, 2999), (600, 4, 300)])
def test_long_pages_show_every_track(window, tmp_path, count, scale, track):
    """Thousands of tracks are painted while the page scrolls, also on screens with many pixels."""
    spans = [batch(track, track, 0, 10) for track in range(count)]
    write_timeline(tmp_path / "t.html", Timeline("t", [f"lane {track}" for track in range(count)], spans))
    opened = window(tmp_path / "t.html", device_scale_factor=scale)
    opened.run(f"scrollTo(0, tracks[{track}].top - 100)")
    opened.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    left, top = opened.run(
        f"(view => [view.left + x(5000), view.top + tracks[{track}].top + LABEL + 4])"
        '(element("view").getBoundingClientRect())'
    )
    opened.page.mouse.move(left, top)
    assert f"\nlane {track}\n" in opened.run("tip.textContent")
    alpha = opened.run(
        f"""(canvasBox => {{
          const [left, top] = [{left} - canvasBox.left, {top} - canvasBox.top];
          return pen.getImageData(left * devicePixelRatio, top * devicePixelRatio, 1, 1).data[3];
        }})(canvas.getBoundingClientRect())"""
    )
    assert alpha == 255


def test_tall_pages_scroll_to_spans(window, tmp_path):
    """A selected span is in the window. The wheel scrolls a tall page, and zooms with Ctrl."""
    spans = [batch(track, track, 0, 10) for track in range(100)]
    spans.append(batch(99, 100, 10, 90))
    write_timeline(tmp_path / "t.html", Timeline("t", [f"lane {track}" for track in range(100)], spans))
    opened = window(tmp_path / "t.html")
    inside = "(top => top >= 0 && top < innerHeight)(element('view').getBoundingClientRect().top + tracks[{}].top)"
    opened.page.click("#slowest")
    assert opened.run(inside.format(99))
    opened.run("scrollTo(0, 0)")
    opened.page.click("#gap")
    gap = opened.run("tracks.findIndex(track => element('gap').textContent.includes(track.label + ','))")
    assert opened.run(inside.format(gap))
    opened.run("select(spans[0])")
    opened.page.focus("#canvas")
    for _ in range(60):
        opened.page.keyboard.press("ArrowDown")
    assert opened.run(inside.format(60))
    opened.page.keyboard.press("Escape")
    opened.run("scrollTo(0, 0)")
    opened.page.mouse.move(600, 400)
    opened.page.mouse.wheel(0, 300)
    opened.page.wait_for_function("scrollY > 100")
    assert view(opened) == (0, 90)
    opened.page.keyboard.down("Control")
    opened.page.mouse.wheel(0, -300)
    opened.page.wait_for_function("view.to - view.from < 0.6 * whole")


def test_page_without_spans(window, tmp_path):
    """The page says that nothing was recorded, and its keys and buttons do nothing."""
    write_timeline(tmp_path / "t.html", Timeline("t", ["lane 0"], []))
    opened = window(tmp_path / "t.html")
    assert opened.text("facts") == "No spans were recorded."
    opened.page.focus("#canvas")
    opened.press("ArrowRight", "+", "Enter", "Home")
    opened.page.click("#in")


def test_names_are_text(window, tmp_path):
    """A title, a label, or a name that looks like HTML runs no script, and is shown as it is."""
    name = "<img src=x onerror=console.log(1)>"
    span = Span(0, 0, MS, name, name, {"error": name})
    write_timeline(tmp_path / "t.html", Timeline(name, [name], [span]))
    opened = window(tmp_path / "t.html")
    opened.page.click("#slowest")
    assert opened.text("title") == name
    assert name in opened.text("details")


@pytest.mark.parametrize("count", [50_000])
def test_many_spans_are_painted(window, tmp_path, count):
    """A page of 50,000 spans is painted without a delay that a person notices. Only visible pixels are painted."""
    spans = [batch(number % 4, number, number, number + 3) for number in range(count)]
    write_timeline(tmp_path / "t.html", Timeline("t", [f"lane {lane}" for lane in range(4)], spans))
    opened = window(tmp_path / "t.html")
    assert opened.run("spans.length") == count
    calls = opened.run(
        """() => {
          const fill = pen.fillRect.bind(pen);
          let calls = 0;
          pen.fillRect = (...each) => { calls++; fill(...each); };
          paint();
          return calls;
        }"""
    )
    assert 100 < calls < 6 * opened.run("width()")


def test_trace_of_a_block_is_a_page(window, tmp_path):
    """The page of a real block has one span per call, lane, and batch."""
    model = nn.Linear(3, 2)
    with torch.no_grad(), parallel(model, ["cpu", "cpu"], out_dims=0) as p, p.trace(tmp_path / "lanes.html") as trace:
        model(torch.zeros(5, 3))
        list(p.map(torch.zeros(8, 3).split(2)))
    opened = window(tmp_path / "lanes.html")
    names = opened.run("spans.map(span => span.name)")
    assert len(names) == len(trace.spans) == 6
    assert {"forward, 3 rows", "forward, 2 rows", "forward, batch 3, 2 rows"} <= set(names)
    assert opened.run("tracks.map(track => track.label)") == ["lane 0 on cpu", "lane 1 on cpu"]
