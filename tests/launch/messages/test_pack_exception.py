"""Stacks of ranks show source lines of functions without a file: notebook cells, doctests, exec."""

from __future__ import annotations

import linecache

import pytest

from parawrap import LaunchTimeoutError, wrapper
from tests.helpers.processes import SILENT_S, ranks
from tests.helpers.waiting import PATIENCE_S


def test_stacks_show_cells(monkeypatch):
    """The source of a notebook's cell is in linecache, not in a file."""
    source = "import time\ndef sleeper():\n    time.sleep(600)  # of the cell"
    name, namespace = "<ipython-input-1-of-test-rank-errors>", {}
    monkeypatch.setitem(linecache.cache, name, (len(source), None, source.splitlines(keepends=True), name))
    exec(compile(source, name, "exec"), namespace)
    with pytest.raises(LaunchTimeoutError) as caught:
        wrapper(ranks(1, hang_timeout_s=SILENT_S))(namespace["sleeper"]).submit().results(timeout=PATIENCE_S)
    assert "time.sleep(600)  # of the cell" in caught.value.stacks[0]
