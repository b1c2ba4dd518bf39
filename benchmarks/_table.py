"""Rows of the JSON files as tables in Markdown: one quantity per line, and the
unit in the header.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

__all__ = ["number", "peers_table", "results_tables", "times_table"]

_PER_US = {"us": 1.0, "ms": 1e-3}

Rows = Sequence[Mapping[str, Any]]


def results_tables(rows: Rows, keep: Callable[[Mapping[str, Any]], bool] = lambda _: True) -> str:
    """Return one table per unit. `keep` selects the results."""
    by_unit: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    for row in rows:
        for result in row["results"]:
            if keep(result):
                by_unit.setdefault(result["unit"], []).append((row["name"], result))
    return "\n".join(_results_table(unit, results) for unit, results in by_unit.items())


def _results_table(unit: str, results: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    ranges = any(result["low"] is not None for _, result in results)
    goals = any(result["goal"] for _, result in results)
    ends = ("95% low", "95% high") if unit == "ratio" else ("lower quartile", "upper quartile")
    head = ["benchmark", "quantity", f"value ({unit})"]
    head += [f"{end} ({unit})" for end in ends] if ranges else []
    head += [f"goal ({unit})", "met"] if goals else []
    lines = []
    for name, result in results:
        cells = [name, result["quantity"], number(result["value"], unit)]
        if ranges:
            cells += [
                "" if result[end] is None else number(result[end], unit) for end in ("low", "high")
            ]
        if goals:
            cells += [
                result["goal"],
                ("yes" if result["met"] else "**no**") if result["goal"] else "",
            ]
        lines.append(cells)
    return _table(head, lines)


def times_table(rows: Rows, unit: str = "us") -> str:
    """Return the table of the times of all arms, in microseconds ("us") or milliseconds ("ms")."""
    head = [
        "benchmark",
        "arm",
        *(f"{word} ({unit})" for word in ("median", "lower quartile", "upper quartile")),
    ]
    return _table(
        head,
        [
            [
                row["name"],
                name,
                *(
                    number(arm[key] * _PER_US[unit], unit)
                    for key in ("median_us", "low_us", "high_us")
                ),
            ]
            for row in rows
            for name, arm in row["arms"].items()
        ],
    )


def peers_table(rows: Rows) -> str:
    """Return the table of the software that each benchmark compares parawrap with."""
    return _table(
        ["benchmark", "compared with"],
        [[row["name"], row["peers"]] for row in rows if row["peers"]],
    )


def number(value: float, unit: str) -> str:
    """Format a ratio below ten or an exponent with two decimals, a percentage with one, and other
    values with four digits.

    >>> number(1.958, "ratio"), number(18.02, "ratio"), number(14.863, "%")
    ('1.96', '18.0', '14.9')
    >>> number(13995.7, "us"), number(0.58186, "us")
    ('13,996', '0.5819')
    """
    if unit in ("ratio", "exponent", "%"):
        return f"{value:,.{1 if unit == '%' or value >= 10 else 2}f}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a table.

    Only the first of successive lines about one benchmark names it. Without lines, return nothing.
    """
    text, before = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)], ""
    for first, *others in lines:
        text.append(f"| {' | '.join(['' if first == before else first, *others])} |")
        before = first
    return "\n".join(text) + "\n" if before else ""
