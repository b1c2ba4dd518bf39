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

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton", "sphinxcontrib.svgbob"]
html_theme = "furo"
html_title = "parawrap"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_favicon = "images/icon.svg"
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

# Sphinx reads pages below its own folder only. The results stay with the benchmarks that write them.
shutil.rmtree(DOCS / "results", ignore_errors=True)
shutil.copytree(DOCS.parent / "benchmarks" / "results", DOCS / "results", ignore=shutil.ignore_patterns("*.json"))
_MOVED = {"](../benchmarks/results/": "](results/", "](../../docs/": "](../"}


def setup(app: Any) -> None:
    """Lead links of the repository to the copies of their pages."""
    app.connect("source-read", _lead_to_copies)


def _lead_to_copies(_app: object, _name: str, source: list[str]) -> None:
    for old, new in _MOVED.items():
        source[0] = source[0].replace(old, new)
