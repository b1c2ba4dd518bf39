"""Skip a page if a package that it uses is not installed."""

from __future__ import annotations

import pytest

from tests.helpers.tiers import require_packages

# Scripts that need the packages of the extras docs and browser
collect_ignore = ["conf.py", "pictures.py"]

_PACKAGES = {"transformers.md": ("transformers",)}


@pytest.fixture(autouse=True)
def _packages_of_the_page(request: pytest.FixtureRequest) -> None:
    require_packages(*_PACKAGES.get(request.node.path.name, ()))
