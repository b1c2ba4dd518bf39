"""Configuration of the documentation site: ``make docs``."""

from __future__ import annotations

import re
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
html_static_path = ["static"]
html_css_files = ["site.css"]
pygments_style = "default"  # the theme's own style leaves added lines of a diff black
pygments_dark_style = "github-dark"  # the own style of the theme underlines modules like links
html_copy_source = False
html_show_sourcelink = False

myst_heading_anchors = 3
default_role = "literal"  # `name` in docstrings is code
smartquotes_action = "D"  # dashes only: readers search for messages, whose quotes are straight
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


# The empty line at the end of an example, which doctest needs
_LAST_LINE = re.compile(r"\n\n```\n(?=\n|$)")

_TABLE = re.compile(r"<table .*?</table>", re.DOTALL)
_CODE = re.compile(r'(?<=<span class="pre">)[^<]+')
# After a separator, and between the words of a name
_BREAK = re.compile(
    r"(?<=[\w)\];])[=.,(\[/:](?=[\w&'\[])|(?<=[^\W_])_(?=[^\W_])|(?<=[a-z])(?=[A-Z])"
)


def setup(app: Any) -> None:
    """Change pages before Sphinx parses them, and after it wrote them."""
    app.connect("source-read", _prepare_page)
    app.connect("html-page-context", _let_code_break)


def _prepare_page(_app: object, name: str, source: list[str]) -> None:
    """Lead links to the copies of their pages, and mark pages that no toctree lists."""
    if name.startswith(_UNLISTED):
        source[0] = f"---\norphan: true\n---\n\n{source[0]}"
    for old, new in _MOVED.items():
        source[0] = source[0].replace(old, new)
    source[0] = _LAST_LINE.sub("\n```\n", source[0])


def _let_code_break(
    _app: object, _name: str, _template: str, context: dict[str, Any], _tree: object
) -> None:
    """Allow line breaks between the parts of a name in a table, so that it fits a narrow window.

    A copied name has no breaks.
    """
    context["body"] = _TABLE.sub(_with_breaks_in_code, context.get("body", ""))


def _with_breaks_in_code(table: re.Match[str]) -> str:
    return _CODE.sub(lambda code: _BREAK.sub(r"\g<0><wbr>", code[0]), table[0])
