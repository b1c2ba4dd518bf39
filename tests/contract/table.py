"""The page docs/launch_failures.md: what a user sees of each failure under each launcher, as the contract suite saw it.

``python -m tests.contract.table`` runs the suite and writes the page. Launchers that cannot run here keep their columns.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "launch_failures.md"

COLUMNS = {"local": "local", "torchrun": "torchrun", "slurm": "Slurm", "ray": "Ray", "inline": "`.inline(...)`"}

SITUATIONS = {
    "raised": "A rank raises `KeyError('weight', 7)`; the others wait for it in a collective",
    "odd": "It raises an exception that pickle cannot carry",
    "sys.exit": "It calls `sys.exit(3)`",
    "os._exit": "It calls `os._exit(7)`",
    "killed": "It is killed by SIGKILL",
    "crash": "It crashes in C",
    "argument": "An argument cannot be sent",
    "result": "A result cannot be sent",
    "nested": "A rank launches ranks",
    "left in a collective": "A rank returns; the others wait for it in a collective",
    "left elsewhere": "A rank returns; the others wait for it where no connection breaks",
    "timeout": "Ranks take longer than `timeout_min`",
    "silence": "Ranks give no sign of life for `hang_timeout_s`",
    "cancel": "`launch.cancel()`",
    "restarts": "A rank fails in each start that `max_restarts=1` allows",
    "node cannot import": "The Python of a node cannot import parawrap",
    "node lost": "A node is lost",
    "cancelled from outside": "The job is cancelled by somebody else",
    "no partition": "There is no such partition",
    "too many nodes": "More nodes are asked for than there are",
    "no extra": "What the launcher needs is not installed",
    "no cluster": "There is no cluster here",
    "log folder": "The folder of `console_logs` cannot be written to",
    "launch folder": "The folder for launches cannot be written to",
}
"""What happens, in the words of the page, in its order."""

_INTRODUCTION = """\
# What you see when a launch fails

What the contract suite (`tests/contract`) has seen, written down by `python -m tests.contract.table`. A test of the suite
fails when it sees anything else. Of each message this is the first line; `…` stands for what differs from run to run:
process and job numbers, hosts, paths. Notes on the exception tell more: the traceback of the rank, where it ran, what
became of the others.
[launching.md](launching.md#failures) says what the exceptions carry.

"""

_MASKS = [
    (r"\[[^\]]*gloo[^\]]*\].*", "… (gloo) connection closed"),
    (r"Connection (closed|reset) by peer.*", "… (gloo) connection closed"),
    (r"Rank \d+ waited in one", "Rank … waited in one"),
    (r"\(node \d+, [^)]*\)", "(node …)"),
    (r"node \d+ \([^)]*\)", "node …"),
    (r"(?<![\w.])/[\w./+~-]+", "…"),
    (r"process \d+", "process …"),
    (r"job \d+", "job …"),
    (r"on node\d\S*", "on …"),
    (r"\S+ has (\d+) CPU", r"… has \1 CPU"),
    (r"rank \d+ of (\d+) was lost", r"rank … of \1 was lost"),
]


class Table:
    """The cells that this run has seen, by situation and launcher."""

    def __init__(self):
        self.seen = {}

    def note(self, situation, launcher, seen, reason=None):
        """Note what was seen; `reason` says why a launcher does otherwise than others.

        Args:
            situation: one of `SITUATIONS`.
            launcher: its name.
            seen: an exception that was told, or a sentence.
            reason: a sentence.
        """
        assert situation in SITUATIONS
        self.seen[situation, launcher] = _cell(seen) + (f" ({reason})" if reason else "")


SEEN = Table()
"""Of this run."""


def _cell(seen):
    if isinstance(seen, str):
        return masked(seen)
    lines = seen.message.splitlines() or [""]
    return f"`{seen.kind.__name__}`: {masked(lines[0])}"


def masked(text):
    """The text without what differs from run to run, fit for a cell."""
    for pattern, instead in _MASKS:
        text = re.sub(pattern, instead, text)
    return text.replace("|", "\\|").strip()


def written():
    """The cells that stand in the page."""
    rows = [line.strip("| \n").split(" | ") for line in PAGE.read_text().splitlines()] if PAGE.exists() else []
    titles = {title: situation for situation, title in SITUATIONS.items()}
    cells = {}
    for title, *row in rows:
        if title in titles and len(row) == len(COLUMNS):
            told = [row[0] if cell == _SAME else cell for cell in row]
            cells |= {(titles[title], name): cell for name, cell in zip(COLUMNS, told, strict=True) if cell != _NONE}
    return cells


_SAME, _NONE = "the same", "-"


def page(cells):
    """The text of the page."""
    lines = ["| What happens | " + " | ".join(COLUMNS.values()) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for situation, title in SITUATIONS.items():
        row = [cells.get((situation, name), _NONE) for name in COLUMNS]
        told = [row[0], *(_SAME if cell == row[0] != _NONE else cell for cell in row[1:])]
        if set(row) != {_NONE}:
            lines.append("| " + " | ".join([title, *told]) + " |")
    return _INTRODUCTION + "\n".join(lines) + "\n"


class _Writer:
    """A plugin of pytest: takes the cells of the run, and writes the page."""

    def pytest_sessionfinish(self, exitstatus):
        from tests.contract.table import SEEN as OF_THE_RUN  # this file is __main__ here

        PAGE.write_text(page(written() | OF_THE_RUN.seen))


def main():
    """Run the suite, but for the test of the page, and write the page."""
    import pytest

    return pytest.main(
        [str(Path(__file__).parent), "--deselect", "tests/contract/test_table.py", *sys.argv[1:]], [_Writer()]
    )


if __name__ == "__main__":
    sys.exit(main())
