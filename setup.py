"""The parts of a build that need code. setup.cfg has the rest.

Relative links lead nowhere on the page of a package index. ``PARAWRAP_REPOSITORY=https://...
python -m build`` makes the links of the README absolute; without it, links become text.
``PARAWRAP_DOCUMENTATION=https://...`` is the address that errors cite; without it, they cite the
titles of pages.
"""

import os
import re
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

REPOSITORY = os.environ.get("PARAWRAP_REPOSITORY", "").rstrip("/")
DOCUMENTATION = os.environ.get("PARAWRAP_DOCUMENTATION", "").rstrip("/")
URLS = {"Source": REPOSITORY, "Documentation": f"{REPOSITORY}/tree/HEAD/docs"}
HERE = Path(__file__).parent
PICTURE = re.compile(r"!\[([^]]*)\]\((?!https?:)([^)]*)\)")
LINK = re.compile(r"(?<!!)\[([^]]*)\]\((?!https?:)([^)]*)\)")


def readme(repository: str) -> str:
    """Return the README with absolute links, or without links if there is no repository."""
    text = (HERE / "README.md").read_text(encoding="utf-8")
    text = PICTURE.sub(rf"![\1]({repository}/raw/HEAD/\2)" if repository else "", text)
    return LINK.sub(rf"[\1]({repository}/blob/HEAD/\2)" if repository else r"\1", text)


class BuildWithAddress(build_py):
    """Copy the package, and set the address of the documentation in the copy."""

    def run(self) -> None:
        super().run()
        if DOCUMENTATION and not self.editable_mode:
            module = Path(self.build_lib, "parawrap", "errors.py")
            text = module.read_text(encoding="utf-8")
            text = text.replace('ADDRESS = ""', f"ADDRESS = {DOCUMENTATION!r}", 1)
            module.write_text(text, encoding="utf-8")


setup(
    cmdclass={"build_py": BuildWithAddress},
    long_description=readme(REPOSITORY),
    long_description_content_type="text/markdown",
    project_urls=URLS if REPOSITORY else {},
)
