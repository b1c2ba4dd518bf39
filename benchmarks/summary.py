"""The pages in benchmarks/results/: one page per suite, and README.md over all suites with its
pictures.

``python -m benchmarks.summary`` writes them from the JSON files, without measuring.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks._table import peers_table, results_tables, times_table
from benchmarks.plots import claims_of, draw

__all__ = ["PAGE", "machine_of", "page", "read", "suite_page", "tables", "write", "write_suite"]

PAGE = "README.md"
_INTRODUCTION = """\
`make bench` measures and writes this page. [The guide](../../docs/benchmarks.md) explains terms
and goals. A line on a bar shows the quartiles of a time, or the 95% confidence interval of a
ratio."""

Document = Mapping[str, Any]


def write(results: Path, titles: Mapping[str, str]) -> None:
    """Write README.md and its pictures from the suites in this folder.

    Without matplotlib, pictures stay as they are.
    """
    documents = read(results, titles)
    (results / PAGE).write_text(page(documents, titles))
    if importlib.util.find_spec("matplotlib") is None:
        print("The pictures were not drawn: matplotlib is not installed.")
    else:
        draw(documents, results)


def write_suite(results: Path, name: str, title: str, time_unit: str) -> None:
    """Write the page of one suite from its JSON file in this folder."""
    document = json.loads((results / f"{name}.json").read_text())
    (results / f"{name}.md").write_text(suite_page(title, document, time_unit))


def read(results: Path, titles: Mapping[str, str]) -> dict[str, Document]:
    """Return the documents of the suites that have been measured."""
    return {
        name: json.loads(path.read_text())
        for name in titles
        if (path := results / f"{name}.json").exists()
    }


def machine_of(document: Document) -> str:
    """Return the date, the machine, and the versions of a document."""
    versions = (f"{package} {version}" for package, version in document["versions"].items())
    return ", ".join([document["date"], *document["hardware"].values(), *versions])


def page(documents: Mapping[str, Document], titles: Mapping[str, str]) -> str:
    """Return the page over all suites: the goals that are missed, a picture per claim, and all
    goals.
    """
    rows = [row for document in documents.values() for row in document["rows"]]
    goals = [result["met"] for row in rows for result in row["results"] if result["goal"]]
    parts = [
        "# Benchmark summary",
        _INTRODUCTION,
        f"{sum(goals)} of {len(goals)} goals are met. "
        f"{'These are missed:' if not all(goals) else ''}".rstrip(),
    ]
    if not all(goals):
        parts.append(results_tables(rows, lambda result: not result["met"]).rstrip())
    for claim in claims_of(documents):
        sentence = claim.sentence(documents[claim.suite])
        parts += [f"## {claim.title}", sentence, f"![{claim.title}]({claim.picture})"]
    parts += [
        "## All goals",
        results_tables(rows, lambda result: bool(result["goal"])).rstrip()
        or "No benchmark has a goal.",
    ]
    suites = [
        f"| [{titles[name]}]({name}.md) | {machine_of(document)} |"
        for name, document in documents.items()
    ]
    parts += ["## All results", "\n".join(["| suite | measured |", "|---|---|", *suites])]
    return "\n\n".join(parts) + "\n"


def suite_page(title: str, document: Document, time_unit: str) -> str:
    """Return the page of one suite."""
    command, _, module = document["command"].partition(" (")
    method = (
        f"Command: `{command}` (`{module.rstrip(')')}`). Arms take turns. A time is the median of "
        "an arm's rounds. A value without a goal is only reported."
    )
    return (
        "\n\n".join(
            [f"# {title}", machine_of(document), method, tables(document["rows"], time_unit)]
        )
        + "\n"
    )


def tables(rows: Sequence[Mapping[str, Any]], time_unit: str) -> str:
    """Return the results, the times, and the peers of these rows."""
    notes = "\n".join(f"- {row['name']}: {row['note']}." for row in rows if row["note"])
    sections = {
        "Results": results_tables(rows),
        "Times": times_table(rows, time_unit),
        "Peers": peers_table(rows),
        "Outcomes": "\n".join(
            row["extra"]["markdown"] for row in rows if "markdown" in row["extra"]
        ),
        "Notes": notes,
    }
    return "\n\n".join(f"## {head}\n\n{text.rstrip()}" for head, text in sections.items() if text)


if __name__ == "__main__":
    from benchmarks.__main__ import RESULTS, SUITES, suite_of, titles

    every = titles()
    for each in read(RESULTS, every):
        write_suite(RESULTS, each, every[each], SUITES[suite_of(each)].time_unit)
    write(RESULTS, every)
