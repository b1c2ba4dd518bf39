"""Tables: as aligned text, and as HTML for notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

_LINES = "white-space:pre-line;padding:2px 0"
# The gray of the lines between rows shows on white and on black
_CELL = (
    "padding:2px 12px 2px 0;white-space:nowrap;border-bottom:1px solid "
    "rgba(128,128,128,.3);text-align"
)
_DOTS = " ..."


class Table(NamedTuple):
    """A title, a header, rows of texts, and a text below them.

    The columns named in `texts` are left-aligned; others hold numbers.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: Sequence[str] = ()
    footer: str = ""

    def __str__(self) -> str:
        aligned: list[list[str]] = []
        for name, *cells in zip(self.header, *self.rows, strict=True):
            column = [name, *cells]
            width = max(map(len, column))
            if name in self.texts:
                aligned.append([cell.ljust(width) for cell in column])
            else:
                aligned.append([cell.rjust(width) for cell in column])
        lines = [self.title]
        lines += ["  ".join(row).rstrip() for row in zip(*aligned, strict=True)]
        if self.footer:
            lines.append(self.footer)
        return "\n".join(lines)

    def html(self) -> str:
        """Return a fragment without styles or scripts of the page, for dark and light notebooks."""
        head = "".join(self._cell(name, name, "th", ' scope="col"') for name in self.header)
        body = "".join(f"<tr>{self._row_html(row)}</tr>" for row in self.rows)
        caption = f'<caption style="text-align:left;{_LINES}">{escape(self.title)}</caption>'
        rows = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
        footer = f'<div style="{_LINES}">{escape(self.footer)}</div>' if self.footer else ""
        return (
            '<div style="overflow-x:auto">'
            '<table style="border-collapse:collapse;font-variant-numeric:tabular-nums">'
            f"{caption}{rows}</table>{footer}</div>"
        )

    def _row_html(self, row: Sequence[str]) -> str:
        # Its first cell names the row for screen readers, but is not bold
        (column, name), *others = zip(self.header, row, strict=True)
        cells = [self._cell(column, name, "th", ' scope="row"', ";font-weight:normal")]
        cells += [self._cell(column, text) for column, text in others]
        return "".join(cells)

    def _cell(
        self, column: str, text: str, tag: str = "td", scope: str = "", weight: str = ""
    ) -> str:
        side = "left" if column in self.texts else "right"
        return f'<{tag}{scope} style="{_CELL}:{side}{weight}">{escape(text)}</{tag}>'


def shorten(text: str, most: int) -> str:
    """Return the text, cut to `most` characters, with dots at the end if it was longer."""
    return text if len(text) <= most else text[: most - len(_DOTS)] + _DOTS


def spell_count(count: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun. `plural` is for nouns that take more than an "s".

    >>> spell_count(1, "rank"), spell_count(2, "rank"), spell_count(2, "process", "processes")
    ('1 rank', '2 ranks', '2 processes')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {plural or noun + 's'}"


def safe_repr(value: object) -> str:
    """Return the repr of a value, or a text that says that it raises."""
    try:
        return repr(value)
    except Exception as error:  # noqa: BLE001 (a __repr__ may raise anything)
        return f"<{type(value).__name__}: its __repr__ raised {type(error).__name__}>"
