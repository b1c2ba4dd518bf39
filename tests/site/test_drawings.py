"""The diagrams of the pages."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def drawings():
    spec = importlib.util.spec_from_file_location("drawings", DOCS / "drawings.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_images_are_drawn_by_the_script(drawings):
    """`python docs/drawings.py` writes the committed files. Each is small, and has a label."""
    for name, draw in drawings.DRAWINGS.items():
        text = (DOCS / "images" / name).read_text()
        assert text == str(draw()), name
        assert 'role="img" aria-label="' in text
        assert len(text) < 12_000


def test_pages_show_every_diagram(drawings):
    """Each diagram is on a page, with a text for readers who do not see it."""
    pages = "".join(path.read_text() for path in DOCS.glob("*.md"))
    for name in drawings.DRAWINGS:
        before, found, _ = pages.partition(f"](images/{name})")
        assert found, name
        assert len(before.rpartition("![")[2]) > 40
