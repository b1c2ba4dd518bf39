"""Tables: as aligned text, and as HTML for notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

# Title and footer: their line breaks are kept
_STYLE_OF_TEXT = "white-space:pre-line;padding:2px 0"
# The gray of the lines between rows shows on white and on black
_STYLE_OF_CELL = (
    "padding:2px 12px 2px 0;white-space:nowrap;border-bottom:1px solid rgba(128,128,128,.3)"
)
_DOTS = " ..."


class Table(NamedTuple):
    """A title, the names of the columns, rows with one text per column, and a text below them.

    The columns named in `texts` are aligned on the left. Other columns hold numbers, and are
    aligned on the right.

    >>> print(Table("times", ["way", "ms"], [["plain", "12"], ["lanes", "7"]], texts=["way"]))
    times
    way    ms
    plain  12
    lanes   7
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: Sequence[str] = ()
    footer: str = ""

    def __str__(self) -> str:
        columns = []
        for column in zip(self.header, *self.rows, strict=True):
            name, *_ = column
            width = max(map(len, column))
            # In a format, "<" aligns on the left, and ">" on the right
            side = "<" if name in self.texts else ">"
            columns.append([f"{cell:{side}{width}}" for cell in column])
        lines = [self.title]
        lines += ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]
        if self.footer:
            lines.append(self.footer)
        return "\n".join(lines)

    def html(self) -> str:
        """Return an HTML fragment for notebooks. Its colors are those of a dark or a light page."""
        head = ""
        for name in self.header:
            head += f'<th scope="col" style="{self._style(name)}">{escape(name)}</th>'
        body = "".join(map(self._row_html, self.rows))
        caption = (
            f'<caption style="text-align:left;{_STYLE_OF_TEXT}">{escape(self.title)}</caption>'
        )
        footer = ""
        if self.footer:
            footer = f'<div style="{_STYLE_OF_TEXT}">{escape(self.footer)}</div>'
        return (
            '<div style="overflow-x:auto">'
            '<table style="border-collapse:collapse;font-variant-numeric:tabular-nums">'
            f"{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{footer}</div>"
        )

    def _row_html(self, row: Sequence[str]) -> str:
        first_column, *columns = self.header
        name, *texts = row
        # Screen readers read the first cell as the header of its row. Browsers would show it bold
        style = f"{self._style(first_column)};font-weight:normal"
        cells = f'<th scope="row" style="{style}">{escape(name)}</th>'
        for column, text in zip(columns, texts, strict=True):
            cells += f'<td style="{self._style(column)}">{escape(text)}</td>'
        return f"<tr>{cells}</tr>"

    def _style(self, column: str) -> str:
        side = "left" if column in self.texts else "right"
        return f"{_STYLE_OF_CELL};text-align:{side}"


def shorten(text: str, most: int) -> str:
    """Return a text of at most `most` characters. A longer one is cut, and ends with dots.

    >>> shorten("a list of numbers", 12)
    'a list o ...'
    """
    return text if len(text) <= most else text[: most - len(_DOTS)] + _DOTS


def spell_count(count: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun. Give `plural` if it is not the noun with an "s".

    >>> spell_count(1, "rank"), spell_count(2, "rank"), spell_count(2, "process", "processes")
    ('1 rank', '2 ranks', '2 processes')
    """
    if count == 1:
        return f"1 {noun}"
    return f"{count} {plural or noun + 's'}"


def safe_repr(value: object) -> str:
    """Return the repr of a value; if `__repr__` raises, a text that names the exception."""
    try:
        return repr(value)
    except Exception as error:  # noqa: BLE001 (a __repr__ may raise anything)
        return f"<{type(value).__name__}: its __repr__ raised {type(error).__name__}>"
