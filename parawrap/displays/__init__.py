"""Pages, traces, and tables for people.

This package knows names and numbers, but not lanes, ranks, or tensors.
"""

from parawrap.displays._table import Table, safe_repr, shorten
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
    "write_timeline",
]
