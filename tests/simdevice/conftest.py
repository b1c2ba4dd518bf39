"""The tests in this folder run on four simulated devices, installed before the first backward pass."""

from __future__ import annotations

import gc
import os
from types import ModuleType

import pytest
import torch

from . import available, install, reset_stats


@pytest.fixture(scope="session", name="installed")
def _installed() -> ModuleType:
    """Install four devices. If that is impossible, skip, or fail if PARAWRAP_TEST_REQUIRE names them."""
    if (reason := available()) is not None:
        if "sim" in os.environ.get("PARAWRAP_TEST_REQUIRE", "").split(","):
            pytest.fail(f"the simulated device is required, but {reason}")
        pytest.skip(reason)
    module = install(4)
    try:
        torch.autograd.backward(torch.ones(1, device="sim:3", requires_grad=True).sum())
    except RuntimeError as error:
        pytest.fail(f"installed after the first backward pass of this process, which is too late: {error}")
    return module


@pytest.fixture(autouse=True)
def sim(installed: ModuleType) -> ModuleType:
    """The device module, with idle devices and counters at zero."""
    gc.collect()  # what earlier tests left has memory there
    for index in range(installed.device_count()):
        installed.synchronize(index)
    reset_stats()
    return installed
