"""The pages in benchmarks/results/: tables, claims, and pictures."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks import summary
from benchmarks._measure import Arm, Result, Row
from benchmarks.plots import CLAIMS

TITLES = {name: suite.title for name, suite in command.SUITES.items()}
RESULTS = summary.read(command.RESULTS, TITLES)
ON_A_GPU = summary.read(command.RESULTS / "device", TITLES)
ROOT = Path(__file__).parents[2]
SPEED_UP = Result("speed-up", 2.0, "ratio", 1.9, 2.1).held_to("at least", 1.5)


def document(*rows):
    return {
        "date": "2026-01-02",
        "command": "make bench (python -m benchmarks engine)",
        "hardware": {"machine": "x86_64", "cores": "2 cores", "gpu": "no GPU"},
        "versions": {"torch": "2.13.0"},
        "rows": [row.as_json() for row in rows],
    }


def row(name="a call", *results, **given):
    arms = {"plain": Arm(2.0, 1.0, 3.0), "parawrap": Arm(1.0, 0.5, 1.5)}
    return Row(name, arms, results or [SPEED_UP], **given)


def test_summary_matches_results():
    """`python -m benchmarks.summary` updates the page."""
    assert (command.RESULTS / summary.PAGE).read_text() == summary.page(RESULTS, TITLES)


@pytest.mark.parametrize("name", RESULTS)
def test_pages_match_results(name):
    """`python -m benchmarks.summary` updates the pages of all suites."""
    suite = command.SUITES[name]
    expected = summary.suite_page(suite.title, RESULTS[name], suite.time_unit)
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
    times = [(arm[f"median_{each}"], each) for arm in arms for each in scale if f"median_{each}" in arm]
    times += [(result["value"], result["unit"]) for result in results if result["unit"] in scale]
    return [value * scale[each] for value, each in times]


@pytest.mark.parametrize("page", ["README.md", "docs/will_it_help.md"])
def test_figures_of_pages_are_results(page):
    """Each figure is a rounded time or result of benchmarks/results."""
    text = (ROOT / page).read_text()
    rows = re.findall(r"^\| .+ \| (us|ms|times) \| ([\d.,]+) \| .+ \| ([\d.,]*) ?\|$", text, re.MULTILINE)
    assert len(rows) >= 5
    for unit, *figures in rows:
        for figure in filter(None, (each.replace(",", "") for each in figures)):
            digits = len(figure.partition(".")[2])
            is_baseline = unit == "times" and figure == "1"
            assert is_baseline or f"{float(figure):.{digits}f}" in {f"{each:.{digits}f}" for each in measured(unit)}, figure


def test_missed_goals_come_first():
    """Results without a goal stay on the pages of the suites."""
    results = [SPEED_UP.held_to("at least", 3), Result("memory", 4.0, "MB")]
    page = summary.page({"engine": document(row()), "neuron": document(row("b", *results))}, TITLES)
    head = "| benchmark | quantity | value (ratio) | 95% low (ratio) | 95% high (ratio) | goal (ratio) | met |"
    missed = f"1 of 2 goals are met. These are missed:\n\n{head}\n|---|---|---|---|---|---|---|\n"
    assert missed + "| b | speed-up | 2.00 | 1.90 | 2.10 | at least 3 | **no** |\n\n## All goals" in page
    assert "| a call | speed-up | 2.00 | 1.90 | 2.10 | at least 1.5 | yes |" in page
    assert "| [Engine and public classes](engine.md) | 2026-01-02, x86_64, 2 cores, no GPU, torch 2.13.0 |" in page
    assert "memory" not in page


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.title)
def test_claims_report_missed_goals(claim):
    """The sentence changes with the data."""
    missed, met = (copy.deepcopy(RESULTS[claim.suite]) for _ in range(2))
    for value, each in ((False, missed), (True, met)):
        for result in [result for row in each["rows"] for result in row["results"]]:
            result["met"] = value
    if "goal" in claim.sentence(met):
        assert claim.sentence(met).endswith("met.")
        assert claim.sentence(missed).endswith("missed.")
