"""Runtimes of NeuronCores: the emulated one, doubles of the vendor's packages, and the vendor's own
on hardware.
"""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass

import pytest
import torch

from parawrap.neuroncores import NeuronRuntime, runtime
from parawrap.neuroncores._vendor_runtimes import TorchNeuron, TorchNeuronx
from parawrap.testing import NeuronHost, neuron_host
from tests.helpers.neuron_doubles import Double

CORES = 4
ADAPTERS = {"torch_neuronx": TorchNeuronx, "torch_neuron": TorchNeuron}
DOUBLES = [
    "torch_neuronx",
    "torch_neuronx.experimental",
    "torch_neuron",
    "torch_neuron.experimental",
]
ON_HARDWARE = ["hardware"] if os.environ.get("PARAWRAP_TEST_NEURON") == "1" else []


@pytest.fixture
def host():
    """Use four emulated cores in the process.

    A model that the test places must be freed when it ends.
    """
    torch.manual_seed(0)
    with neuron_host(cores=CORES) as host:
        yield host
        gc.collect()
        assert [core.models for core in host.stats()] == [0] * CORES


@dataclass
class Subject:
    """A runtime under test, with the emulated cores that do its work and the double that records
    its calls.
    """

    runtime: NeuronRuntime
    host: NeuronHost | None = None
    double: Double | None = None

    @property
    def tolerance(self):
        """The tolerance between a compiled and a plain model: neuron-cc multiplies matrices in
        bfloat16 by default.
        """
        return {"rtol": 2e-2, "atol": 2e-2} if self.host is None else {"rtol": 1e-5, "atol": 1e-6}


@pytest.fixture(params=["host", *DOUBLES, *ON_HARDWARE])
def subject(request, monkeypatch):
    """Every runtime of this machine.

    With PARAWRAP_TEST_NEURON=1 this includes the vendor's own runtime.
    """
    if request.param == "hardware":
        assert runtime().name != "host", (
            "PARAWRAP_TEST_NEURON=1, but no vendor runtime can be imported"
        )
        yield Subject(runtime())
        return
    yield from emulated(request.param, monkeypatch)


@pytest.fixture(params=DOUBLES)
def recorded(request, monkeypatch):
    """The adapters on doubles, which record every call."""
    yield from emulated(request.param, monkeypatch)


def emulated(which, monkeypatch):
    monkeypatch.setenv("NEURON_RT_NUM_CORES", str(CORES))
    monkeypatch.delenv("NEURON_RT_VISIBLE_CORES", raising=False)
    with neuron_host(cores=CORES) as host:
        if which == "host":
            yield Subject(host, host)
            return
        name, _, experimental = which.partition(".")
        double = Double(name, host, experimental=bool(experimental))
        double.install(monkeypatch)
        yield Subject(ADAPTERS[name](), host, double)
