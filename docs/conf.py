"""Configuration of the documentation site: ``make docs``."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import parawrap

DOCS = Path(__file__).parent

project = "parawrap"
author = "the parawrap contributors"
copyright = f"2026, {author}"  # noqa: A001 (a name of Sphinx)
release = version = parawrap.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
html_theme = "furo"
html_title = "parawrap"
html_favicon = "images/icon.svg"
pygments_style = "default"  # the theme's own style leaves added lines of a diff black
html_copy_source = False
html_show_sourcelink = False

myst_heading_anchors = 3
default_role = "literal"  # `name` in docstrings is code
autodoc_typehints = "description"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_use_rtype = False
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

# Sphinx reads pages below its own folder only. The results stay with the benchmarks that write
# them.
shutil.rmtree(DOCS / "results", ignore_errors=True)
shutil.copytree(
    DOCS.parent / "benchmarks" / "results",
    DOCS / "results",
    ignore=shutil.ignore_patterns("*.json"),
)
# Pages outside of the sidebar, which other pages link
_UNLISTED = ("versions", "neuron_hardware", "results/")
_MOVED = {"](../benchmarks/results/": "](results/", "](../../docs/": "](../"}


def setup(app: Any) -> None:
    """Change pages before Sphinx parses them."""
    app.connect("source-read", _prepare_page)


def _prepare_page(_app: object, name: str, source: list[str]) -> None:
    """Lead links to the copies of their pages, and mark pages that no toctree lists."""
    if name.startswith(_UNLISTED):
        source[0] = f"---\norphan: true\n---\n\n{source[0]}"
    for old, new in _MOVED.items():
        source[0] = source[0].replace(old, new)
