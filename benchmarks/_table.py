"""Rows as a table in markdown, from what the JSON files hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks._limits import listed
from benchmarks._measure import Arm

__all__ = ["markdown"]

_HEAD = ("what", "measured", "result", "limits", "wanted", "held", "beside")


def markdown(rows: Sequence[Mapping[str, Any]], *, measured: bool = True) -> str:
    """All of it, or without the times."""
    head = [word for word in _HEAD if measured or word != "measured"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in rows:
        cells = {
            "what": row["name"],
            "measured": _times(row),
            "result": row["verdict"],
            "limits": listed(row["extra"].get("limits", {})),
            "wanted": row["wanted"],
            "held": "yes" if row["held"] else "**no**",
            "beside": row["peers"],
        }
        lines.append(f"| {' | '.join(cells[word] for word in head)} |")
    return "\n".join(lines) + "\n"


def _times(row: Mapping[str, Any]) -> str:
    arms = "<br>".join(f"{name}: {Arm(**arm)}" for name, arm in row["arms"].items())
    return arms or "<br>".join(f"{key}: {value}" for key, value in row["extra"].get("us", {}).items())
