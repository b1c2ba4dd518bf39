"""The table in the docs is what the suite has seen; in the last file, so that it has seen all."""

from __future__ import annotations

import pytest

from tests.contract.table import SEEN, masked, page, written

pytestmark = pytest.mark.contract


def test_the_page_is_what_was_seen():
    """Every cell that this run has seen stands in docs/launch_failures.md; `python -m tests.contract.table` writes it."""
    on_page = written()
    differing = {place: (on_page.get(place), cell) for place, cell in SEEN.seen.items() if on_page.get(place) != cell}
    assert not differing, "run `python -m tests.contract.table`"


def test_a_page_that_is_written_is_read_as_it_was():
    """Cells that are the same are written once, and read by all."""
    cells = {("killed", "local"): "gone", ("killed", "ray"): "gone", ("raised", "inline"): masked("a|b, process 12")}
    text = page(cells)
    assert "| gone | - | - | the same | - |" in text
    assert "a\\|b, process …" in text
