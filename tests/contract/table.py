"""Write docs/launch_failures.md: the error of each failure under each launcher, as recorded by the contract suite.

``python -m tests.contract.table`` runs the suite and writes the page. The columns of launchers that cannot run on this
machine stay as they are.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "launch_failures.md"

COLUMNS = {"local": "local", "torchrun": "torchrun", "slurm": "Slurm", "ray": "Ray", "inline": "`.inline(...)`"}

SITUATIONS = {
    "raised": "A rank raises `KeyError('weight', 7)` while the others wait for it in a collective",
    "odd": "A rank raises an exception that pickle cannot rebuild",
    "sys.exit": "A rank calls `sys.exit(3)`",
    "os._exit": "A rank calls `os._exit(7)`",
    "killed": "A rank is killed by SIGKILL",
    "crash": "A rank crashes in C code",
    "argument": "An argument cannot be sent to another process",
    "result": "A result cannot be sent to another process",
    "nested": "A rank starts another launch",
    "left in a collective": "A rank returns while the others wait for it in a collective",
    "left elsewhere": "A rank returns while the others wait for it, but no connection breaks",
    "timeout": "A launch takes longer than `timeout_min`",
    "silence": "Ranks are silent for longer than `hang_timeout_s`",
    "cancel": "`launch.cancel()` is called",
    "restarts": "A rank fails in every start that `max_restarts=1` allows",
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
"""Maps each situation to its title on the page, in the order of the rows."""

_INTRODUCTION = """\
# Errors of a failed launch

The table has one row per failure and one column per launcher. A cell shows the exception and the first line of its message.

- `…` replaces text that changes from run to run: process and job numbers, hosts, paths.
- "the same" means the same as in the first column.
- `-` means that the row does not apply to this launcher, or that no test covers it.

The notes of each exception add the traceback of the rank, the node of the rank, and the outcome of the other ranks.
[Launch a function on several ranks](launching.md#failures) describes the attributes of the exceptions.

`python -m tests.contract.table` runs the contract suite in `tests/contract` and writes this page. The suite fails if a
launcher behaves differently from its cell.

"""

PLACE = re.compile(r" \(docs/errors\.md#\w+\)")  # of an error in the documentation
_MASKS = [
    (r"\[[^\]]*gloo[^\]]*\].*", "… (gloo) connection closed"),
    (r"Connection (closed|reset) by peer.*", "… (gloo) connection closed"),
    (r"Rank \d+ waited in one", "Rank … waited in one"),
    (r"\(node \d+, [^)]*\)", "(node …)"),
    (r"node \d+ \([^)]*\)", "node …"),
    (r"(?<![\w.])/[\w./+~-]+", "…"),
    (r"process \d+", "process …"),
    (r"(timeout_min|hang_timeout_s)=[\d.]+", r"\1=…"),
    (r"job \d+", "job …"),
    (r"on node\d\S*", "on …"),
    (r"\S+ has (\d+) CPU", r"… has \1 CPU"),
    (r"rank \d+ of (\d+) was lost", r"rank … of \1 was lost"),
]


class Table:
    """The cells that one run of the suite has recorded, by situation and launcher."""

    def __init__(self):
        self.cells = {}

    def note(self, situation, launcher, behaviour, reason=None):
        """Record the behaviour of a launcher in a situation.

        Args:
            situation: A key of `SITUATIONS`.
            launcher: The name of the launcher.
            behaviour: An `ErrorRecord`, or a sentence.
            reason: Why this launcher differs from the others, as a sentence.
        """
        assert situation in SITUATIONS
        self.cells[situation, launcher] = _cell(behaviour) + (f" ({reason})" if reason else "")


RECORDED = Table()
"""The table of this run."""


def _cell(behaviour):
    if isinstance(behaviour, str):
        return masked(behaviour)
    lines = PLACE.sub("", behaviour.message).splitlines() or [""]
    return f"`{behaviour.kind.__name__}`: {masked(lines[0])}"


def masked(text):
    """Replace text that changes from run to run with `…`, and escape the text for a table cell."""
    for pattern, instead in _MASKS:
        text = re.sub(pattern, instead, text)
    return text.replace("|", "\\|").replace("__", "\\_\\_").strip()


def cells_on_page():
    """Read the cells from the page."""
    rows = [line.strip("| \n").split(" | ") for line in PAGE.read_text().splitlines()] if PAGE.exists() else []
    titles = {title: situation for situation, title in SITUATIONS.items()}
    cells = {}
    for title, *row in rows:
        if title in titles and len(row) == len(COLUMNS):
            filled = [row[0] if cell == _SAME else cell for cell in row]
            cells |= {(titles[title], name): cell for name, cell in zip(COLUMNS, filled, strict=True) if cell != _NONE}
    return cells


_SAME, _NONE = "the same", "-"


def page_text(cells):
    """Return the text of the page."""
    lines = ["| What happens | " + " | ".join(COLUMNS.values()) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for situation, title in SITUATIONS.items():
        row = [cells.get((situation, name), _NONE) for name in COLUMNS]
        shortened = [row[0], *(_SAME if cell == row[0] != _NONE else cell for cell in row[1:])]
        if set(row) != {_NONE}:
            lines.append("| " + " | ".join([title, *shortened]) + " |")
    return _INTRODUCTION + "\n".join(lines) + "\n"


class _Writer:
    """A pytest plugin that writes the page at the end of the run."""

    def pytest_sessionfinish(self, exitstatus):
        # This file runs as __main__, and the tests import a second copy.
        from tests.contract.table import RECORDED as FROM_TESTS

        PAGE.write_text(page_text(cells_on_page() | FROM_TESTS.cells))


def main():
    """Run the suite without the test of the page, and write the page."""
    import pytest

    return pytest.main(
        [str(Path(__file__).parent), "--deselect", "tests/contract/test_table.py", *sys.argv[1:]], [_Writer()]
    )


if __name__ == "__main__":
    sys.exit(main())
