"""Errors for XLA devices on machines without them."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from parawrap import DeviceUnavailableError, parallel
from parawrap.backends import backend_of, best_backend, xla_backend


@pytest.fixture(autouse=True)
def _no_runtime():
    xla_backend._runtime.cache_clear()
    yield
    xla_backend._runtime.cache_clear()


def test_missing_torch_xla(monkeypatch):
    """The error names the module, the matching release of torch, and the available devices."""
    monkeypatch.setitem(sys.modules, "torch_xla", None)
    assert backend_of("xla").count() == 0
    assert backend_of("xla").compiles_each_shape
    for devices in ("xla", ["xla:0", "xla:1"]):
        with pytest.raises(DeviceUnavailableError, match=r"torch_xla cannot be imported") as caught:
            parallel(torch.tanh, devices)
        assert f"torch {torch.__version__}" in str(caught.value)
        assert repr(best_backend().type) in str(caught.value)


def test_a_runtime_that_does_not_start(monkeypatch):
    """The error has torch_xla's reason and the value of PJRT_DEVICE. A second use does not start the runtime again."""
    started = []

    def device_count():
        started.append(1)
        raise OSError("libtpu not found")

    monkeypatch.setitem(sys.modules, "torch_xla", SimpleNamespace(device_count=device_count))
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    for _ in range(2):
        assert backend_of("xla").count() == 0
        with pytest.raises(DeviceUnavailableError, match=r"PJRT_DEVICE='TPU' \(libtpu not found\)"):
            parallel(torch.tanh, "xla")
    assert started == [1]
