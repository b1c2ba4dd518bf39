"""Write docs/launch_failures.md: the error of each failure under each launcher, as recorded by the
tests of launchers.

``python -m tests.contract.table`` runs these tests and writes the page. A cell is the behavior of
one launcher in one situation. The cells of launchers that cannot run on this machine stay as they
are, and so do cells that say why there is no error. In other runs, a test fails if a launcher
behaves differently from its cell.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "launch_failures.md"
_WRITES = "PARAWRAP_TEST_WRITES_TABLE"

LAUNCHERS = {
    "local": "local",
    "torchrun": "torchrun",
    "slurm": "Slurm",
    "ray": "Ray",
    "inline": "`.inline(...)`",
}
"""Maps each launcher to its name on the page, in the order of the rows."""

SITUATIONS = {
    "raised": "A rank raises an exception that pickle cannot rebuild while the others wait for it "
    "in a collective",
    "sys.exit": "A rank calls `sys.exit(3)`",
    "os._exit": "A rank calls `os._exit(7)`",
    "killed": "A rank is killed by SIGKILL",
    "argument": "An argument cannot be sent to another process",
    "result": "A result cannot be sent to another process",
    "nested": "A rank starts another launch",
    "left in a collective": "A rank returns while the others wait for it in a collective",
    "left elsewhere": "A rank returns while the others wait for it, but no connection breaks",
    "timeout": "A launch takes longer than `timeout_min`",
    "silence": "Ranks are silent for longer than `hang_timeout_s`",
    "cancel": "`launch.cancel()` is called",
    "node cannot import": "The Python of one node cannot import parawrap",
    "node lost": "A node is lost",
    "cancelled from outside": "Another process cancels the job",
    "no partition": "The partition does not exist",
    "too many nodes": "The platform needs more nodes than the cluster has",
    "no extra": "The package that the launcher needs is not installed",
    "no cluster": "This machine has no Slurm commands",
    "log folder": "The `console_logs` folder is not writable",
    "launch folder": "The folder for launch files is not writable",
}
"""Maps each situation to its title on the page, in the order of the page."""

_MASKS = [
    (r' \(the page "Errors" of the documentation, \w+\)', ""),  # of an error in the documentation
    (r"\(node \d+, [^)]*\)", "(node …)"),
    (r"node \d+, \S+ cannot", "node … cannot"),
    (r"(?<![\w.])/[\w./+~-]+", "…"),
    (r"process \d+", "process …"),
    (r"(timeout_min|hang_timeout_s)=[\d.]+", r"\1=…"),
    (r"(ranks were ended: rank 0 at ).*?\. Their stacks", r"\1…. Their stacks"),
    (r"job \d+", "job …"),
    (r"\S+ has (\d+) CPU", r"… has \1 CPU"),
    (r"within rank \d+ of \d+", "within rank … of …"),
    (r"Rank \d+ waited in one", "Rank … waited in one"),
    (r"rank \d+ of (\d+) was lost", r"rank … of \1 was lost"),
    (r"\|", r"\\|"),
    (r"__", r"\\_\\_"),
]
_written = {}


def check_cell(situation, launcher, behavior):
    """Fail if the page shows other behavior of a launcher.

    While the page is written, remember the behavior.
    """
    text = behavior if isinstance(behavior, str) else behavior_of(type(behavior), str(behavior))
    for pattern, replacement in _MASKS:
        text = re.sub(pattern, replacement, text)
    if _WRITES in os.environ:
        _written[situation, launcher] = text.strip()
    else:
        assert cells_on_page().get((situation, launcher)) == text.strip(), (
            "run `python -m tests.contract.table`"
        )


def behavior_of(kind, message):
    return f"`{kind.__name__}`: {(message.splitlines() or [''])[0]}"


def cells_on_page():
    """Return the behavior that the page shows, by situation and launcher."""
    titles = {title: situation for situation, title in SITUATIONS.items()}
    launchers = {name: launcher for launcher, name in LAUNCHERS.items()}
    cells, situation = {}, None
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            situation = titles[line.removeprefix("## ")]
        elif line.startswith("| ") and line != _HEADER[0]:
            names, text = line[2:-2].split(" | ", 1)
            cells |= {(situation, launchers[name]): text for name in names.split(", ")}
    return cells


_HEADER = "| launcher | error |", "|---|---|"


def page_of(cells):
    """Return the page that shows these cells, after the introduction of the page as it is."""
    lines = []
    for situation, title in SITUATIONS.items():
        by_text = {}  # the launchers with the same behavior, which share a row
        for launcher, name in LAUNCHERS.items():
            if (situation, launcher) in cells:
                by_text.setdefault(cells[situation, launcher], []).append(name)
        if by_text:
            rows = [f"| {', '.join(names)} | {text} |" for text, names in by_text.items()]
            lines += ["", f"## {title}", "", *_HEADER, *rows]
    introduction, _, _ = PAGE.read_text().partition("\n## ")
    return "\n".join([introduction.rstrip(), *lines, ""])


def main():
    import pytest

    from tests.contract.table import (
        _written as from_tests,  # this file runs as __main__, and tests import another copy
    )

    os.environ[_WRITES] = "1"
    tests = "contract", "launch/slurm", "launch/ray", "launch/test_missing_clusters.py"
    paths = [str(PAGE.parents[1] / "tests" / each) for each in tests]
    exit_code = pytest.main([*paths, *sys.argv[1:]])
    PAGE.write_text(page_of(cells_on_page() | from_tests))
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
