"""Tracebacks from ranks show source lines of functions without a file: notebook cells, doctests, exec."""

from __future__ import annotations

import linecache

import pytest

from parawrap import LaunchTimeoutError, wrapper
from tests.helpers.processes import SILENT_S, notes_of, ranks
from tests.helpers.waiting import PATIENCE_S

CELLS = [
    "def helper(value):\n    raise KeyError(value)  # of the first cell",
    "def function(value):\n    return helper(value)  # of the second cell",
    "import time\ndef sleeper():\n    time.sleep(600)  # of the sleeper's cell",
]


@pytest.fixture
def cells():
    """The namespace of executed notebook cells. Their source is in linecache, not in a file."""
    namespace = {}
    names = [f"<ipython-input-{number}-of-test-rank-errors>" for number in range(len(CELLS))]
    for name, source in zip(names, CELLS, strict=True):
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        exec(compile(source, name, "exec"), namespace)
    yield namespace
    for name in names:
        del linecache.cache[name]


def test_tracebacks_show_lines_of_cells(cells):
    with pytest.raises(KeyError) as caught:
        wrapper(ranks(1))(cells["function"])("value")
    assert "return helper(value)  # of the second cell" in notes_of(caught.value)
    assert "raise KeyError(value)  # of the first cell" in notes_of(caught.value)


def test_stacks_show_lines_of_cells(cells):
    with pytest.raises(LaunchTimeoutError) as caught:
        wrapper(ranks(1, hang_timeout_s=SILENT_S))(cells["sleeper"]).submit().results(timeout=PATIENCE_S)
    assert "time.sleep(600)  # of the sleeper's cell" in caught.value.stacks[0]
