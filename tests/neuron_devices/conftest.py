"""The tests in this folder run with four simulated NeuronCores that are torch devices of kind
"neuron".

A stand-in for the newer torch_neuronx makes them. In ranks, torch loads it at import, like the
vendor's package.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest

from parawrap.neuroncores import _choose_runtime
from tests import simdevice
from tests.helpers.tiers import require

_ROOT = Path(__file__).parents[2]
_missing = simdevice.available("neuron")
_ENTRY_POINT = "[torch.backends]\ntorch_neuronx = torch_neuronx:_autoload\n"
_PACKAGE = """
import torch.distributed as dist
from tests import simdevice


def _autoload():
    simdevice.install(4, name="neuron")
    dist.Backend.register_backend("neuron", _group, devices=["neuron"])


def _group(store, rank, size, timeout):
    return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
"""


@pytest.fixture(scope="session")
def torch_neuronx(tmp_path_factory):
    """Install the stand-in for this process and for the processes that it starts."""
    require("sim", _missing)
    site = tmp_path_factory.mktemp("site")
    (site / "torch_neuronx.py").write_text(_PACKAGE)
    (site / "torch_neuronx-0.dist-info").mkdir()
    (site / "torch_neuronx-0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch_neuronx\nVersion: 0\n"
    )
    (site / "torch_neuronx-0.dist-info" / "entry_points.txt").write_text(_ENTRY_POINT)
    paths = os.pathsep.join(map(str, (site, _ROOT)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", paths, prepend=os.pathsep)
        patch.syspath_prepend(site)
        package = importlib.import_module("torch_neuronx")
        package._autoload()
        yield package


@pytest.fixture(autouse=True)
def _on_devices(torch_neuronx, monkeypatch):
    """Start every test without a chosen runtime, and fail it if the simulated devices report a
    race.
    """
    monkeypatch.delenv("PARAWRAP_NEURON_RUNTIME", raising=False)
    monkeypatch.setattr(_choose_runtime, "_chosen", None)
    simdevice.reset_stats()
    yield
    assert simdevice.stats().races == ()
