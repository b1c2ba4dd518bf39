"""Rows of the JSON files as a table in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks._measure import Arm

__all__ = ["markdown"]

_HEAD = ("benchmark", "times", "result", "limits", "wanted", "held", "compared with")


def markdown(rows: Sequence[Mapping[str, Any]], *, times: bool = True) -> str:
    """Return the table, with or without the column of times."""
    head = [word for word in _HEAD if times or word != "times"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in rows:
        limits = row["extra"].get("limits", {})
        cells = {
            "benchmark": row["name"],
            "times": _times(row),
            "result": row["verdict"],
            "limits": "<br>".join(f"{name}: {value:.2f}" for name, value in limits.items()),
            "wanted": row["wanted"],
            "held": "yes" if row["held"] else "**no**",
            "compared with": row["peers"],
        }
        lines.append(f"| {' | '.join(cells[word] for word in head)} |")
    return "\n".join(lines) + "\n"


def _times(row: Mapping[str, Any]) -> str:
    arms = "<br>".join(f"{name}: {Arm(**arm)}" for name, arm in row["arms"].items())
    return arms or "<br>".join(f"{key}: {value}" for key, value in row["extra"].get("us", {}).items())
