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
    gc.freeze()  # what the imports made is for good: the many collections of these tests need not look at it


@pytest.fixture(autouse=True)
def _sim():
    """Skip or fail where the devices cannot be had; start every test from one seed; fail where they tell of a race."""
    require("sim", _missing)
    torch.manual_seed(0)
    simdevice.reset_stats()
    yield
    assert simdevice.stats().races == ()
    # A lane's own thread may be the last to let go of its pool: it then ends a moment after the test.
    for thread in [thread for thread in threading.enumerate() if thread.name.startswith("parawrap-")]:
        gc.collect()
        thread.join(0.5)
