"""`parallel` and `parawrap.neuron` if torch has devices of kind "neuron"."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch

from parawrap import DataParallel, DeviceUnavailableError, neuron, parallel, testing
from parawrap.cli import _doctor
from parawrap.neuroncores import runtime
from tests.helpers.device_models import assert_same_training_step, mlp, rows

ALL = ["neuron:0", "neuron:1", "neuron:2", "neuron:3"]


def named(p):
    """Return the names of the torch devices of a block."""
    assert all(isinstance(device, torch.device) for device in p.devices)
    return list(map(str, p.devices))


@pytest.mark.parametrize(
    ("devices", "expected"),
    [(["neuron:3", 1, "neuron:3"], ["neuron:3", "neuron:1", "neuron:3"]), (None, ALL)],
    ids=str,
)
def test_plain_models_on_devices(devices, expected):
    """Every spelling names torch devices.

    The plain model needs no trace, and has the plain outputs and gradients.
    """
    model = mlp().to("neuron:0")
    assert named(parallel(model, devices)) == expected
    assert_same_training_step(model, rows(13), devices)
    with closing(DataParallel(model)) as wrapped:
        assert wrapped.device_ids == [0, 1, 2, 3]
        assert wrapped(rows(8)).shape == (8, 3)


@pytest.mark.parametrize("name", ["", "torch_neuronx"])
@pytest.mark.parametrize(
    "use",
    [
        lambda model: parallel(model, ["nc:0", "neuron:1"]),
        lambda model: neuron.DataParallel(model, ["neuron:0", "neuron:1"]),
        lambda model: neuron.trace(model, rows(1)),
    ],
)
def test_no_trace_in_the_package(monkeypatch, use, name):
    """The error says so, and how to run the plain model, also if PARAWRAP_NEURON_RUNTIME names the
    package.
    """
    monkeypatch.setenv("PARAWRAP_NEURON_RUNTIME", name)
    with pytest.raises(
        DeviceUnavailableError,
        match=r"torch_neuronx has no trace.*parallel\(model, \['neuron:0', 'neuron:1'\]\)",
    ):
        use(mlp())
    assert named(parallel(mlp(), "neuron")) == ALL


def test_packages_with_trace(torch_neuronx, monkeypatch):
    """The generations are told apart by what they offer: here, "nc:0" is a core and "neuron:0" a
    torch device.
    """
    monkeypatch.setattr(torch_neuronx, "trace", torch.jit.trace, raising=False)
    monkeypatch.setenv("NEURON_RT_NUM_CORES", "2")
    assert runtime().name == "torch_neuronx"
    assert [str(core) for core in parallel(mlp(), "nc").devices] == ["nc:0", "nc:1"]
    assert named(parallel(mlp(), [torch.device("neuron", 1)])) == ["neuron:1"]


def test_emulated_cores_come_first(monkeypatch):
    """Inside `neuron_host`, and with PARAWRAP_NEURON_RUNTIME=host, "neuron" names the emulated
    cores.
    """
    with testing.neuron_host(cores=2):
        model = neuron.trace(mlp(), rows(1))
        with parallel(model, "neuron") as p:
            assert [str(core) for core in p.devices] == ["nc:0", "nc:1"]
            assert model(rows(3)).device.type == "cpu"
        assert neuron.core_count() == 2
    assert named(parallel(mlp(), "neuron")) == ALL
    monkeypatch.setenv("PARAWRAP_NEURON_RUNTIME", "host")
    monkeypatch.setenv("NEURON_RT_NUM_CORES", "3")
    assert [str(core) for core in parallel(mlp(), "neuron").devices] == ["nc:0", "nc:1", "nc:2"]


def test_doctor_counts_the_devices():
    assert _doctor._check_accelerators() == ("4 of kind neuron", "")
