"""benchmarks/results/README.md and summary.png: what the JSON files of all suites hold, on one page and in one picture.

``python -m benchmarks.summary`` writes both from what is there, and measures nothing.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks._table import markdown

__all__ = ["page", "panels", "write"]

PAGE, PICTURE = "README.md", "summary.png"

_LEFT_OUT = ("sizing",)  # constants, which are compared with nothing
_INCHES_A_BAR, _WIDTH, _COLUMNS = 0.19, 9, 2
_OURS, _PLAIN, _PEERS = "C0", "C7", "C1"
_SAID = """\
One line for each comparison; what each was measured against stands in the last column, and the times in the suite's own
page. [How to read them](../../docs/benchmarks.md)."""


class Panel(NamedTuple):
    """One comparison as bars: each arm's time as a multiple of the first one's, between the quartiles."""

    title: str
    bars: Mapping[str, tuple[float, float, float]]


def write(results: Path, titles: Mapping[str, str]) -> None:
    """Both files, from the suites that were measured there."""
    documents = _read(results, titles)
    (results / PAGE).write_text(page(documents, titles))
    drawn = list(panels(documents))
    if drawn:
        _draw(drawn, results / PICTURE)


def _read(results: Path, titles: Mapping[str, str]) -> dict[str, Mapping[str, Any]]:
    return {name: json.loads(path.read_text()) for name in titles if (path := results / f"{name}.json").exists()}


def page(documents: Mapping[str, Mapping[str, Any]], titles: Mapping[str, str]) -> str:
    """The page, from the documents of the suites."""
    rows = [row for document in documents.values() for row in document["rows"]]
    missed = [row["name"] for row in rows if not row["held"]]
    held = f"{len(rows) - len(missed)} of {len(rows)} held what was wanted of them" + "".join(
        f"\n- not held: {name}" for name in missed
    )
    parts = ["# All benchmarks", _SAID, held, f"![the same as bars]({PICTURE})"]
    for name, document in documents.items():
        where = ", ".join(
            [
                document["date"],
                *document["hardware"].values(),
                *(f"{what} {version}" for what, version in document["versions"].items()),
            ]
        )
        parts += [f"## [{titles[name]}]({name}.md)", where, markdown(document["rows"], measured=False).rstrip("\n")]
    return "\n\n".join(parts) + "\n"


def panels(documents: Mapping[str, Mapping[str, Any]]) -> Iterator[Panel]:
    """The comparisons that can be drawn: those of two arms or more."""
    for name, document in documents.items():
        for row in document["rows"]:
            if name not in _LEFT_OUT and len(row["arms"]) > 1:
                first = next(iter(row["arms"].values()))["median_us"]
                bars = {
                    f"{arm} ({_short(times['median_us'])})": (
                        times["median_us"] / first,
                        times["low_us"] / first,
                        times["high_us"] / first,
                    )
                    for arm, times in row["arms"].items()
                }
                beside = [textwrap.fill(f"beside {row['peers']}", 78)] if row["peers"] else []
                yield Panel("\n".join([textwrap.fill(row["name"], 78), *beside]), bars)


def _short(microseconds: float) -> str:
    """Three figures, in a unit that suits.

    >>> _short(0.1234), _short(45.6), _short(7890.0), _short(1234567.0)
    ('0.123 us', '45.6 us', '7.89 ms', '1.23 s')
    """
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= size:
            return f"{microseconds / size:.3g} {unit}"
    return f"{microseconds:.3g} us"


def _draw(drawn: Sequence[Panel], path: Path) -> None:
    """In columns of about the same height; each panel has a scale of its own."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    columns = _columns(drawn)
    tall = max(map(_height, columns))
    figure = plt.figure(figsize=(_WIDTH * _COLUMNS, tall * _INCHES_A_BAR), layout="constrained")
    for part, column in zip(figure.subfigures(1, _COLUMNS, squeeze=False)[0], columns, strict=True):
        ratios = [_height([panel]) for panel in column]
        for axes, panel in zip(
            part.subplots(len(column), 1, squeeze=False, height_ratios=ratios)[:, 0] if column else [], column, strict=True
        ):
            _bars(axes, panel)
    figure.suptitle(
        "Time as a multiple of the first arm's, less is better; median and middle half. Blue: parawrap; grey: what it is "
        "measured against; orange: peers",
        fontsize=10,
    )
    figure.savefig(path, dpi=80)
    plt.close(figure)


def _columns(drawn: Sequence[Panel]) -> list[list[Panel]]:
    """In order, one column after the other."""
    columns: list[list[Panel]] = [[] for _ in range(_COLUMNS)]
    whole, done = _height(drawn), 0.0
    for panel in drawn:
        columns[min(_COLUMNS - 1, int(done / whole * _COLUMNS))].append(panel)
        done += _height([panel])
    return columns


def _height(column: Sequence[Panel]) -> float:
    """In bars; a title and an axis take as much as five."""
    return sum(len(panel.bars) + 5 for panel in column)


def _bars(axes: Any, panel: Panel) -> None:
    names = list(panel.bars)
    middle = [panel.bars[name][0] for name in names]
    around = [[abs(at - end) for at, *ends in panel.bars.values() for end in [ends[side]]] for side in (0, 1)]
    colours = [_OURS if _is_ours(name) else _PLAIN if at == 0 else _PEERS for at, name in enumerate(names)]
    axes.barh(range(len(names)), middle, xerr=around, color=colours, height=0.7, error_kw={"elinewidth": 1, "capsize": 2})
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=0.8)
    axes.tick_params(axis="x", labelsize=7)
    if max(middle) > 20 * min(middle):
        axes.set_xscale("log")
    axes.set_title(panel.title, fontsize=8, loc="left")


def _is_ours(arm: str) -> bool:
    return "parawrap" in arm or arm.startswith(("auto", "default", "lanes", "map"))


if __name__ == "__main__":
    from benchmarks.__main__ import RESULTS, SUITES

    write(RESULTS, {name: suite.title for name, suite in SUITES.items()})
