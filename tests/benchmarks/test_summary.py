"""The pages in benchmarks/results/: tables, claims, and pictures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks import summary

TITLES = command.titles()
RESULTS = summary.read(command.RESULTS, TITLES)
ON_A_GPU = summary.read(command.RESULTS / "device", TITLES)
ROOT = Path(__file__).parents[2]


def test_summary_matches_results():
    """`python -m benchmarks.summary` updates the page."""
    assert (command.RESULTS / summary.PAGE).read_text() == summary.page(RESULTS, TITLES)


@pytest.mark.parametrize("name", RESULTS)
def test_pages_match_results(name):
    """`python -m benchmarks.summary` updates the pages of all suites."""
    suite = command.SUITES[command.suite_of(name)]
    expected = summary.suite_page(TITLES[name], RESULTS[name], suite.time_unit)
    assert (command.RESULTS / f"{name}.md").read_text() == expected


def measured(unit):
    """Return all committed times and results in a unit."""
    documents = [*RESULTS.values(), *ON_A_GPU.values()]
    rows = [row for document in documents for row in document["rows"]]
    arms = [arm for row in rows for arm in row["arms"].values()]
    results = [result for row in rows for result in row["results"]]
    if unit == "times":
        return [result["value"] for result in results if result["unit"] == "ratio"]
    scale = {"us": {"us": 1, "ms": 1e3, "s": 1e6}, "ms": {"us": 1e-3, "ms": 1, "s": 1e3}}[unit]
    times = [
        (arm[f"median_{each}"], each) for arm in arms for each in scale if f"median_{each}" in arm
    ]
    times += [(result["value"], result["unit"]) for result in results if result["unit"] in scale]
    return [value * scale[each] for value, each in times]


@pytest.mark.parametrize(
    ("page", "least"), [("README.md", 3), ("docs/benchmarks.md", 3), ("docs/compare.md", 5)]
)
def test_figures_of_pages_are_results(page, least):
    """Each figure is a rounded time or result of benchmarks/results."""
    text = (ROOT / page).read_text()
    rows = re.findall(
        r"^\| .+ \| (us|ms|times) \| ([\d.,]+) \| (?:.+ \| )?([\d.,]*) ?\|$", text, re.MULTILINE
    )
    assert len(rows) >= least
    for unit, *figures in rows:
        for figure in filter(None, (each.replace(",", "") for each in figures)):
            digits = len(figure.partition(".")[2])
            is_baseline = unit == "times" and figure == "1"
            assert is_baseline or f"{float(figure):.{digits}f}" in {
                f"{each:.{digits}f}" for each in measured(unit)
            }, figure
