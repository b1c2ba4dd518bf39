"""Draw the diagrams of the pages as SVG: ``python docs/drawings.py``, or ``make pictures``.

It needs nothing but Python. Each diagram is at most 560 wide, so that its text can be read on a
phone, and has a background of its own for the dark theme.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path

IMAGES = Path(__file__).parent / "images"

BLUE, ORANGE = "#3b6fb6", "#d9822b"  # rank or lane 0, and 1
RED, DARK, GRAY, WHITE = "#c0392b", "#1f2933", "#66788a", "#ffffff"
MONO = "Menlo, Consolas, monospace"
MIDDLE, LEFT, RIGHT = "middle", "start", "end"


class Drawing:
    """The elements of one diagram. Numbers are pixels, from the upper left corner."""

    def __init__(self, width: int, height: int, label: str) -> None:
        opening = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
            f' width="{width}" height="{height}" role="img" aria-label="{escape(label)}"'
            ' font-family="Helvetica, Arial, sans-serif" font-size="14">'
        )
        tip = (
            '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7"'
            f' markerHeight="7" orient="auto"><path d="M0 0 L10 5 L0 10 z" fill="{GRAY}"/>'
            "</marker></defs>"
        )
        background = f'<rect width="{width}" height="{height}" rx="10" fill="{WHITE}"/>'
        self._elements = [opening, tip, background]

    def __str__(self) -> str:
        return "\n".join([*self._elements, "</svg>", ""])

    def text(
        self,
        x: float,
        y: float,
        text: str,
        color: str = GRAY,
        *,
        anchor: str = MIDDLE,
        bold: bool = False,
        mono: bool = False,
        size: float = 14,
    ) -> None:
        """Write a line of text on the baseline `y`."""
        options = ' font-weight="bold"' * bold + f' font-family="{MONO}"' * mono
        self._elements.append(
            f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{color}" font-size="{size}"'
            f"{options}>{escape(text, quote=False)}</text>"
        )

    def bar(self, x: float, y: float, width: float, height: float, color: str) -> None:
        """Draw a filled rectangle."""
        self._elements.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="2" fill="{color}"/>'
        )

    def box(self, x: float, y: float, width: float, height: float, color: str) -> None:
        """Draw the outline of a rectangle."""
        self._elements.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" fill="none"'
            f' stroke="{color}" stroke-width="2"/>'
        )

    def circle(self, x: float, y: float, radius: float, color: str) -> None:
        """Draw a filled circle around a point."""
        self._elements.append(f'<circle cx="{x}" cy="{y}" r="{radius}" fill="{color}"/>')

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """Draw an arrow to the second point."""
        self._line(x1, y1, x2, y2, GRAY, ' marker-end="url(#tip)"')

    def dashes(self, x: float, y1: float, y2: float) -> None:
        """Draw a dashed vertical line."""
        self._line(x, y1, x, y2, GRAY, ' stroke-dasharray="4 4"')

    def cross(self, x: float, y: float) -> None:
        """Draw a red cross around a point."""
        self._line(x - 7, y - 7, x + 7, y + 7, RED)
        self._line(x - 7, y + 7, x + 7, y - 7, RED)

    def _line(
        self, x1: float, y1: float, x2: float, y2: float, color: str, options: str = ""
    ) -> None:
        self._elements.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{color}" stroke-width="2"'
            f"{options}/>"
        )


# -- three ways to use several devices, on the first page


def lanes() -> Drawing:
    """`parallel` cuts a batch for the lanes of one process, and joins their outputs."""
    drawing = _panel(
        "parallel",
        "one process, a thread per lane",
        "parallel: in one process, a batch of ten rows is cut in two. Lane 0 on cuda:0 and lane 1 "
        "on cuda:1 compute five rows each. The outputs are joined to ten rows.",
    )
    drawing.text(120, 84, "a batch, cut")
    _rows(drawing, 95, gap=0)
    _halves(drawing, ("lane 0", "cuda:0"), ("lane 1", "cuda:1"))
    _rows(drawing, 223, gap=0)
    drawing.text(120, 258, "one output, joined")
    return drawing


def ranks() -> Drawing:
    """`wrapper` calls a function once per rank, in processes of their own."""
    drawing = _panel(
        "@wrapper",
        "a process per rank",
        "wrapper: a call of train starts the processes of rank 0 and rank 1. Each runs the "
        "function. The call returns the result of every rank, in rank order.",
    )
    drawing.text(120, 84, "one call in your script")
    drawing.text(120, 108, "train(lr)", DARK, mono=True)
    _halves(drawing, ("rank 0", "train(lr)"), ("rank 1", "train(lr)"))
    drawing.circle(105, 230, 8, BLUE)
    drawing.circle(135, 230, 8, ORANGE)
    drawing.text(120, 258, "one result per rank, in order")
    return drawing


def mini_batches() -> Drawing:
    """`TupleParallel` runs the model on one mini-batch per device."""
    drawing = _panel(
        "TupleParallel",
        "a mini-batch per device",
        "TupleParallel: the collate function returns two mini-batches. The model runs on cuda:0 "
        "with one and on cuda:1 with the other. There is one loss per device.",
    )
    drawing.text(120, 84, "two mini-batches")
    _rows(drawing, 95, gap=37)
    _halves(drawing, ("model", "cuda:0"), ("model", "cuda:1"), bend=0)
    for x, color, name in ((64, BLUE, "loss 0"), (176, ORANGE, "loss 1")):
        drawing.circle(x, 230, 8, color)
        drawing.text(x, 258, name)
    return drawing


def _panel(title: str, note: str, label: str) -> Drawing:
    drawing = Drawing(240, 276, label)
    drawing.text(120, 30, title, DARK, bold=True, mono=True, size=16)
    drawing.text(120, 52, note)
    return drawing


def _rows(drawing: Drawing, y: float, *, gap: float) -> None:
    """Draw ten rows, five for each half, next to each other."""
    for row in range(10):
        color, shift = (BLUE, 0.0) if row < 5 else (ORANGE, gap)
        drawing.bar(46 - gap / 2 + 15 * row + shift, y, 13, 15, color)


def _halves(
    drawing: Drawing, left: tuple[str, str], right: tuple[str, str], *, bend: float = 0.4
) -> None:
    """Draw the boxes of both devices, with arrows to and from them, bent to the middle."""
    for x, color, (name, detail) in ((64, BLUE, left), (176, ORANGE, right)):
        inner = x + (120 - x) * bend
        drawing.arrow(inner, 116, x, 134)
        drawing.box(x - 48, 138, 96, 54, color)
        drawing.text(x, 160, name, DARK, bold=True)
        drawing.text(x, 181, detail, mono=True, size=13)
        drawing.arrow(x, 197, inner, 215)


# -- the sizes of shards


def sizes() -> Drawing:
    """Sizes of outputs that follow the rows differ between lanes."""
    drawing = Drawing(
        560,
        264,
        "Eight rows are cut into shards of five and three. Output y has five rows in lane 0 and "
        "three in lane 1, so it is concatenated. Output m has four values in both lanes, so it is "
        "refused.",
    )
    for x, title in ((52, "batch"), (338, "output y"), (478, "output m")):
        drawing.text(x, 30, title, DARK, bold=True)
    for row in range(8):
        drawing.bar(24, 68 + 16 * row, 56, 13, BLUE if row < 5 else ORANGE)
    lanes = ((50, BLUE, "lane 0", 5), (138, ORANGE, "lane 1", 3))
    for y, color, name, rows in lanes:
        drawing.box(128, y, 132, 68, color)
        drawing.text(194, y + 28, name, DARK, bold=True)
        drawing.text(194, y + 50, f"shard of {rows} rows")
        drawing.arrow(86, y + 42 if rows == 5 else y + 34, 122, y + 34)
        drawing.arrow(266, y + 34, 302, y + 34)
        _column(drawing, 310, y + 34, rows, color)
        drawing.text(372, y + 39, f"{rows} rows", anchor=LEFT)
        _column(drawing, 450, y + 34, 4, GRAY)
        drawing.text(512, y + 39, "4", anchor=LEFT)
    for x, reason, outcome in (
        (338, "follows the rows:", "concatenated"),
        (478, "does not:", "refused"),
    ):
        drawing.text(x, 230, reason)
        drawing.text(x, 250, outcome, DARK, bold=True)
    return drawing


def _column(drawing: Drawing, x: float, y: float, rows: int, color: str) -> None:
    """Draw rows below each other, with the middle at `y`."""
    for row in range(rows):
        drawing.bar(x, y - 8 * rows + 16 * row + 1.5, 56, 13, color)


# -- streams


def streams() -> Drawing:
    """`map` runs whole batches in the lanes; a call cuts one batch for all of them."""
    drawing = Drawing(
        560,
        318,
        "With p.map, lane 0 runs batches 0, 2, and 5, and lane 1 runs batches 1, 3, and 4, each "
        "whole: a lane takes the next batch as soon as it is idle. A call cuts its batch: both "
        "lanes run a half of batch 0, then of batch 1, and so on, and each call ends with a join.",
    )
    _heading(drawing, 30, "p.map(batches)", "each batch whole in one lane")
    for y, name, color, spans in (
        (48, "lane 0", BLUE, ((0, 110), (2, 130), (5, 90))),
        (82, "lane 1", ORANGE, ((1, 150), (3, 70), (4, 100))),
    ):
        _spans(drawing, y, name, color, spans, between=4)
    drawing.text(76, 136, "an idle lane takes the next batch", anchor=LEFT)
    _heading(drawing, 180, "p(batch)", "each batch cut, the outputs joined")
    halves = (55, 75, 65, 35, 50, 45)
    for y, name, color in ((198, "lane 0", BLUE), (232, "lane 1", ORANGE)):
        _spans(drawing, y, name, color, [*enumerate(halves)], between=20)
    for call in range(6):
        drawing.dashes(76 + sum(halves[: call + 1]) + 20 * call + 8, 194, 264)
    drawing.text(76, 286, "each call waits for all lanes, and joins", anchor=LEFT)
    drawing.arrow(410, 300, 540, 300)
    drawing.text(400, 305, "time", anchor=RIGHT)
    return drawing


def _heading(drawing: Drawing, y: float, code: str, text: str) -> None:
    drawing.text(16, y, code, DARK, anchor=LEFT, bold=True, mono=True)
    drawing.text(24 + 8.6 * len(code), y, text, DARK, anchor=LEFT)


def _spans(
    drawing: Drawing,
    y: float,
    name: str,
    color: str,
    spans: list[tuple[int, int]] | tuple[tuple[int, int], ...],
    *,
    between: float,
) -> None:
    """Draw the batches that a lane runs, one after the other: their numbers and widths."""
    drawing.text(16, y + 19, name, anchor=LEFT)
    x = 76.0
    for number, width in spans:
        drawing.bar(x, y, width, 28, color)
        drawing.text(x + width / 2, y + 19, str(number), WHITE, bold=True)
        x += width + between


# -- restarts


def restarts() -> Drawing:
    """A failed rank ends the attempt of all ranks; the next attempt has new processes."""
    drawing = Drawing(
        560,
        258,
        "In the first attempt, rank 0 saves checkpoints until rank 1 fails. parawrap then ends "
        "rank 0, whose finally blocks run for at most grace_s seconds. In the second attempt, both "
        "ranks are new processes with restart 1, load the checkpoint, and return their results.",
    )
    for x, number in ((175, 0), (425, 1)):
        drawing.text(x, 32, f"attempt {number}", DARK, bold=True)
        drawing.text(x, 52, f"restart == {number}", mono=True, size=13)
    for y, name in ((70, "rank 0"), (142, "rank 1")):
        drawing.text(16, y + 20, name, anchor=LEFT)
    drawing.bar(76, 70, 200, 30, BLUE)
    for x in (130, 190):
        drawing.circle(x, 85, 5, WHITE)
    drawing.bar(76, 113, 16, 16, BLUE)
    drawing.circle(84, 121, 5, WHITE)
    drawing.text(98, 126, "saves a checkpoint", anchor=LEFT)
    drawing.bar(76, 142, 166, 30, ORANGE)
    drawing.cross(252, 157)
    drawing.text(252, 192, "fails", RED)
    drawing.text(286, 90, "ended", RED, anchor=LEFT)
    drawing.dashes(340, 20, 206)
    for y, color in ((70, BLUE), (142, ORANGE)):
        drawing.bar(356, y, 140, 30, color)
        drawing.text(426, y + 20, "new process", WHITE)
        drawing.arrow(502, y + 15, 540, y + 15)
    drawing.text(426, 126, "load the checkpoint")
    drawing.text(498, 192, "results")
    drawing.text(16, 238, "finally blocks of an ended rank run for at most grace_s", anchor=LEFT)
    return drawing


# -- a notebook


def notebook() -> Drawing:
    """What cells send to ranks that stay, and what the ranks keep."""
    drawing = Drawing(
        560,
        352,
        "A notebook with ranks that stay. The cell ranks(load) sends the function load and the "
        "global lr, and load assigns model, optimizer, and losses in each rank. The cell "
        "ranks(train, 50) sends train and 50, and gets one result per rank. After lr = 0.001, the "
        "cell ranks(slow_down) sends slow_down and the new lr. The model, the optimizer, and the "
        "losses stay in the ranks.",
    )
    drawing.text(112, 32, "cells of the notebook", DARK, bold=True)
    drawing.text(440, 32, "ranks that stay", DARK, bold=True)
    cells = (
        (48, ("lr = 0.03", "ranks(load)"), "load, lr"),
        (118, ("ranks(train, 50)",), "train, 50"),
        (188, ("lr = 0.001", "ranks(slow_down)"), "slow_down, lr"),
        (258, ("ranks(train, 50)",), "50"),
    )
    for y, lines, sent in cells:
        drawing.box(16, y, 192, 56, GRAY)
        for number, line in enumerate(lines):
            middle = y + 33 - 10 * (len(lines) - 1) + 20 * number
            drawing.text(28, middle, line, DARK, anchor=LEFT, mono=True, size=13)
        drawing.text(266, y + 21, sent, size=13)
        drawing.arrow(214, y + 29, 320, y + 29)
    drawing.box(328, 48, 224, 266, GRAY)
    for y, color, name in ((60, BLUE, "rank 0"), (186, ORANGE, "rank 1")):
        drawing.box(340, y, 200, 116, color)
        drawing.text(440, y + 26, f"{name}: a process", DARK, bold=True)
        drawing.text(440, y + 52, "its globals:")
        drawing.text(440, y + 76, "model, optimizer,", mono=True, size=13)
        drawing.text(440, y + 96, "losses, x, y", mono=True, size=13)
    drawing.text(112, 340, "arrows: what a cell sends")
    drawing.text(440, 340, "kept between the cells")
    return drawing


DRAWINGS: dict[str, Callable[[], Drawing]] = {
    "lanes.svg": lanes,
    "ranks.svg": ranks,
    "mini_batches.svg": mini_batches,
    "sizes.svg": sizes,
    "streams.svg": streams,
    "restarts.svg": restarts,
    "ranks_that_stay.svg": notebook,
}


def main() -> None:
    """Write the diagrams to docs/images."""
    for name, draw in DRAWINGS.items():
        IMAGES.joinpath(name).write_text(str(draw()))


if __name__ == "__main__":
    main()
