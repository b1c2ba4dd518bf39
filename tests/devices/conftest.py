"""The tests in this folder run on four simulated devices, which become the accelerator of the whole test process."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from tests import simdevice
from tests.conftest import require

_missing = simdevice.available()
if _missing is None:
    # Now, since torch makes the worker threads of all devices at the first backward of the process.
    simdevice.install(4)


@pytest.fixture(autouse=True)
def races(monkeypatch):
    """Skip or fail where the devices cannot be had; start every test from one seed; fail where they tell of a race.

    The list is of the races told of until the test last reset the counters.
    """
    require("sim", _missing)
    gc.collect()  # what earlier tests left has memory on the devices
    gc.freeze()
    torch.manual_seed(0)
    simdevice.reset_stats()
    found: list[str] = []
    reset = simdevice.reset_stats

    def keep_and_reset():
        found.extend(simdevice.stats().races)
        reset()

    monkeypatch.setattr(simdevice, "reset_stats", keep_and_reset)
    yield found
    assert (*found, *simdevice.stats().races) == ()
    # A lane's own thread may be the last to let go of its pool: it then ends a moment after the test.
    for thread in [thread for thread in threading.enumerate() if thread.name.startswith("parawrap-")]:
        gc.collect()
        thread.join(0.5)
