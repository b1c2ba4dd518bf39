"""benchmarks/results/README.md: the JSON files of all suites on one page.

``python -m benchmarks.summary`` writes the page without measuring.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks._table import markdown

__all__ = ["PAGE", "page", "read", "write"]

PAGE = "README.md"
_INTRODUCTION = "One row per comparison. The suites' own pages have the times. See [the guide](../../docs/benchmarks.md)."


def write(results: Path, titles: Mapping[str, str]) -> None:
    """Write the page from the suites in this folder."""
    (results / PAGE).write_text(page(read(results, titles), titles))


def read(results: Path, titles: Mapping[str, str]) -> dict[str, Mapping[str, Any]]:
    """Return the documents of the suites that have been measured."""
    return {name: json.loads(path.read_text()) for name in titles if (path := results / f"{name}.json").exists()}


def page(documents: Mapping[str, Mapping[str, Any]], titles: Mapping[str, str]) -> str:
    """Return the page for these documents."""
    rows = [row for document in documents.values() for row in document["rows"]]
    missed = [row["name"] for row in rows if not row["held"]]
    held = f"{len(rows) - len(missed)} of {len(rows)} rows meet their goal." + "".join(
        f"\n- not held: {name}" for name in missed
    )
    parts = ["# All benchmarks", _INTRODUCTION, held]
    for name, document in documents.items():
        versions = (f"{package} {version}" for package, version in document["versions"].items())
        where = ", ".join([document["date"], *document["hardware"].values(), *versions])
        parts += [f"## [{titles[name]}]({name}.md)", where, markdown(document["rows"], times=False).rstrip("\n")]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    from benchmarks.__main__ import RESULTS, SUITES

    write(RESULTS, {name: suite.title for name, suite in SUITES.items()})
