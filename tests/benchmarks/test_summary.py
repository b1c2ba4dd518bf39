"""The page over all suites."""

from __future__ import annotations

import json

from benchmarks import __main__ as command
from benchmarks import summary
from benchmarks._measure import Arm, Row

TITLES = {name: suite.title for name, suite in command.SUITES.items()}


def document(*rows):
    return {
        "date": "2026-01-02",
        "command": "make bench",
        "hardware": {"machine": "x86_64", "cores": "2 cores", "gpu": "no GPU"},
        "versions": {"torch": "2.13.0"},
        "rows": [row.as_json() for row in rows],
    }


def row(name="a call", *, held=True, **given):
    arms = {"plain": Arm(2.0, 1.0, 3.0), "parawrap": Arm(1.0, 0.5, 1.5)}
    return Row(name, arms, "twice", "once", held, **given)


def test_the_page_matches_the_results():
    """`python -m benchmarks.summary` updates the page."""
    documents = summary.read(command.RESULTS, TITLES)
    assert (command.RESULTS / summary.PAGE).read_text() == summary.page(documents, TITLES)


def test_the_page_has_every_row_with_its_limits_and_its_peers():
    """Missed goals are listed first."""
    limits = {"limits": {"cores": 1.5}}
    page = summary.page(
        {"engine": document(row(peers="torch 2", extra=limits)), "neuron": document(row("b", held=False))}, TITLES
    )
    assert "1 of 2 rows meet their goal.\n- not held: b\n" in page
    assert "## [Engine and faces](engine.md)\n\n2026-01-02, x86_64, 2 cores, no GPU, torch 2.13.0" in page
    assert "| a call | twice | cores: 1.50 | once | yes | torch 2 |" in page
    assert "| b | twice |  | once | **no** |  |" in page


def test_the_page_is_written_beside_the_results(tmp_path):
    """Suites that have not been measured are missing."""
    (tmp_path / "engine.json").write_text(json.dumps(document(row(), row("b"))))
    summary.write(tmp_path, TITLES)
    assert (tmp_path / summary.PAGE).read_text().count("## ") == 1
