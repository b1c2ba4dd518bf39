"""Tiers that a machine may not be able to serve, and who runs the batches of a map."""

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


@pytest.fixture
def helps_at_once(monkeypatch):
    """Who iterates over a map on the CPU runs batches from the first one on, whatever they take, while it waits."""
    monkeypatch.setattr("parawrap.lanes._backlog._KNOWN", 0)
    monkeypatch.setattr("parawrap.lanes._backlog.perf_counter_ns", lambda: 0)  # it is never away


@pytest.fixture(params=["by lanes alone", "by who iterates too"])
def run_either_way(request):
    """Batches of a map that are run by lanes alone, as the first ones are, or also by who iterates."""
    if request.param == "by who iterates too":
        request.getfixturevalue("helps_at_once")
