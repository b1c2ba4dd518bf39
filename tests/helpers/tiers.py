"""Skip or require the test tiers that a machine may not be able to run."""

from __future__ import annotations

import importlib.util
import os

import pytest


def require(tier: str, missing: str | None) -> None:
    """Skip the test if `missing` says why the tier cannot run; fail if PARAWRAP_TEST_REQUIRE names
    the tier.
    """
    if missing is None:
        return
    if tier in os.environ.get("PARAWRAP_TEST_REQUIRE", "").split(","):
        pytest.fail(f"the {tier} tier is required and cannot run: {missing}")
    pytest.skip(f"{tier}: {missing}")


def require_packages(*names: str) -> None:
    """Skip the test if a package is not installed. The name of the package is its tier."""
    for name in names:
        require(name, None if importlib.util.find_spec(name) else f"{name} is not installed")
