"""The page and the picture over all suites: that they are what the results give."""

from __future__ import annotations

import json

import pytest

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


def test_the_page_is_what_the_results_give():
    """Nobody has changed one of them alone: `python -m benchmarks.summary` writes the page anew."""
    documents = summary._read(command.RESULTS, TITLES)
    assert (command.RESULTS / summary.PAGE).read_text() == summary.page(documents, TITLES)


def test_the_page_has_every_row_with_its_limits_and_its_peers():
    """And names at its head what was not held."""
    limits = {"limits": {"cores": 1.5}}
    page = summary.page(
        {"engine": document(row(peers="torch 2", extra=limits)), "neuron": document(row("b", held=False))}, TITLES
    )
    assert "1 of 2 held what was wanted of them\n- not held: b\n" in page
    assert "## [Engine and faces](engine.md)\n\n2026-01-02, x86_64, 2 cores, no GPU, torch 2.13.0" in page
    assert "| a call | twice | cores: 1.50 | once | yes | torch 2 |" in page
    assert "| b | twice |  | once | **no** |  |" in page


def test_a_bar_is_a_multiple_of_the_first_arms_time():
    """With its quartiles; each arm tells its time, each comparison its peers."""
    (panel,) = summary.panels({"engine": document(row(peers="torch 2"))})
    assert panel.title == "a call\nbeside torch 2"
    assert panel.bars == {"plain (2 us)": (1, 0.5, 1.5), "parawrap (1 us)": (0.5, 0.25, 0.75)}


def test_what_is_compared_with_nothing_is_not_drawn():
    """Rows of one arm or none, and the constants of a launch's size."""
    alone = Row("alone", {"it": Arm(1.0, 1.0, 1.0)}, "", "", held=True)
    assert list(summary.panels({"engine": document(alone), "sizing": document(row())})) == []


@pytest.mark.parametrize(("us", "told"), [(0.1234, "0.123 us"), (45.6, "45.6 us"), (7890.0, "7.89 ms"), (1.2e6, "1.2 s")])
def test_times_are_told_in_a_unit_that_suits(us, told):
    """Three figures."""
    assert summary._short(us) == told


def test_page_and_picture_are_written_beside_the_results(tmp_path):
    """From the suites that were measured, and from no others."""
    (tmp_path / "engine.json").write_text(json.dumps(document(row(), row("b"), row("c"))))
    summary.write(tmp_path, TITLES)
    assert (tmp_path / summary.PAGE).read_text().count("## ") == 1
    assert (tmp_path / summary.PICTURE).read_bytes().startswith(b"\x89PNG")
