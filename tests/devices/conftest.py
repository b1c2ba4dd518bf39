"""The tests in this folder run on four simulated devices, which become the accelerator of the whole
test process.
"""

from __future__ import annotations

import gc

import pytest

from tests import simdevice
from tests.helpers.tiers import require

_missing = simdevice.available()
if _missing is None:
    # Install now: torch makes the worker threads of all devices at the first backward of the
    # process.
    simdevice.install(4)


@pytest.fixture(autouse=True)
def _races(monkeypatch):
    """Fail a test if the simulated devices report a race.

    A machine without simulated devices skips the test, or fails it if PARAWRAP_TEST_REQUIRE names
    them.
    """
    require("sim", _missing)
    gc.collect()  # garbage of earlier tests holds memory on the devices
    gc.freeze()
    simdevice.reset_stats()
    found: list[str] = []
    reset = simdevice.reset_stats

    def keep_and_reset():
        found.extend(simdevice.stats().races)
        reset()

    monkeypatch.setattr(simdevice, "reset_stats", keep_and_reset)
    yield
    assert (*found, *simdevice.stats().races) == ()
