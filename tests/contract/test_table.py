"""The table in the docs shows what the suite recorded. This file runs last, after all other tests have recorded."""

from __future__ import annotations

import pytest

from tests.contract.table import RECORDED, cells_on_page, masked, page_text

pytestmark = pytest.mark.contract


def test_the_page_is_up_to_date():
    """docs/launch_failures.md contains every cell that this run has recorded."""
    on_page = cells_on_page()
    differing = {place: (on_page.get(place), cell) for place, cell in RECORDED.cells.items() if on_page.get(place) != cell}
    assert not differing, "run `python -m tests.contract.table`"


def test_equal_cells_are_written_as_the_same():
    """A cell that equals the first column is written as "the same"."""
    cells = {("killed", "local"): "gone", ("killed", "ray"): "gone", ("raised", "inline"): masked("a|b, process 12")}
    text = page_text(cells)
    assert "| gone | - | - | the same | - |" in text
    assert "a\\|b, process …" in text
