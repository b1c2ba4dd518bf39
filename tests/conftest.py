"""Tiers that a machine may not be able to serve."""

from __future__ import annotations

import os

import pytest


def require(tier: str, missing: str | None) -> None:
    """Skip where a tier cannot run, saying why; fail where PARAWRAP_TEST_REQUIRE names it."""
    if missing is None:
        return
    if tier in os.environ.get("PARAWRAP_TEST_REQUIRE", "").split(","):
        pytest.fail(f"the {tier} tier is required and cannot run: {missing}")
    pytest.skip(f"{tier}: {missing}")
