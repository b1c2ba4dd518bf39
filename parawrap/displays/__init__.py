"""Pages, traces, and tables for people.

This package knows names and numbers, but not lanes, ranks, or tensors.

file          | contents                                            | tests
------------- | --------------------------------------------------- | ------------------------------
_table.py     | tables as text and as HTML; short reprs             | displays/test_tables.py
_timeline.py  | spans on tracks: idle times, the two file formats,  | displays/test_timeline.py
              | refused paths                                       |
timeline.html | the page of a timeline: zoom, hover, keys           | displays/test_timeline_page.py
"""

from parawrap.displays._table import Table, safe_repr, shorten, spell_count
from parawrap.displays._timeline import (
    Span,
    Timeline,
    read_timeline,
    refusal_of_path,
    write_timeline,
)

__all__ = [
    "Span",
    "Table",
    "Timeline",
    "read_timeline",
    "refusal_of_path",
    "safe_repr",
    "shorten",
    "spell_count",
    "write_timeline",
]
