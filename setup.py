"""What the page of a package index shows, where relative links lead nowhere. setup.cfg has the rest.

``PARAWRAP_REPOSITORY=https://... python -m build`` makes the links of the README absolute. Without it, links become text.
"""

import os
import re
from pathlib import Path

from setuptools import setup

REPOSITORY = os.environ.get("PARAWRAP_REPOSITORY", "").rstrip("/")
HERE = Path(__file__).parent
PICTURE = re.compile(r"!\[([^]]*)\]\((?!https?:)([^)]*)\)")
LINK = re.compile(r"(?<!!)\[([^]]*)\]\((?!https?:)([^)]*)\)")


def readme(repository: str) -> str:
    """Return the README with absolute links, or without links if there is no repository."""
    text = (HERE / "README.md").read_text(encoding="utf-8")
    text = PICTURE.sub(rf"![\1]({repository}/raw/HEAD/\2)" if repository else "", text)
    return LINK.sub(rf"[\1]({repository}/blob/HEAD/\2)" if repository else r"\1", text)


setup(
    long_description=readme(REPOSITORY),
    long_description_content_type="text/markdown",
    project_urls={"Source": REPOSITORY, "Documentation": f"{REPOSITORY}/tree/HEAD/docs"} if REPOSITORY else {},
)
