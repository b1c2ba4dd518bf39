"""What every test shares: tiers that may be missing, and the promise that nothing is left behind."""

from __future__ import annotations

import gc
import os
import sys
import threading
from pathlib import Path

import pytest

# A simulated accelerator becomes torch's accelerator for the whole process: those tests run in a process of their own.
collect_ignore = [] if any("simdevice" in arg or "devices" in arg for arg in sys.argv) else ["simdevice", "devices"]


def require(tier: str, missing: str | None) -> None:
    """Skip where a tier cannot run, saying why; fail where PARAWRAP_TEST_REQUIRE names it."""
    if missing is None:
        return
    if tier in os.environ.get("PARAWRAP_TEST_REQUIRE", "").split(","):
        pytest.fail(f"the {tier} tier is required and cannot run: {missing}")
    pytest.skip(f"{tier}: {missing}")


@pytest.fixture(autouse=True)
def _nothing_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """No lane outlives its test, and no test writes into the folder it was started from."""
    monkeypatch.chdir(tmp_path)
    yield
    gc.collect()
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("parawrap-")]
    assert not left, f"lanes left behind: {left}"
