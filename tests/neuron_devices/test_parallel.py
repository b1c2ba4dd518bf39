"""`parallel` and `parawrap.neuron` if torch has devices of kind "neuron"."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from parawrap import DataParallel, DeviceUnavailableError, neuron, parallel, testing
from parawrap.backends import backend_of, best_backend, names_cores
from parawrap.backends.accelerator_backend import AcceleratorBackend
from parawrap.cli._machine import machine_checks
from parawrap.neuroncores import runtime

ALL = ["neuron:0", "neuron:1", "neuron:2", "neuron:3"]


def mlp():
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def named(p):
    """Return the names of the torch devices of a block."""
    assert all(isinstance(device, torch.device) for device in p.devices)
    return list(map(str, p.devices))


def test_neuron_is_an_accelerator_like_any_other():
    """Its backend is the general accelerator backend, which is also the best one of this process."""
    assert type(backend_of("neuron")) is AcceleratorBackend
    assert best_backend() is backend_of("neuron")


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (["neuron:0", "neuron:1"], ALL[:2]),
        (["neuron:3", 1, "neuron:3"], ["neuron:3", "neuron:1", "neuron:3"]),
        ("neuron:2", ALL[2:3]),
        ("neuron", ALL),
        (2, ALL[:2]),
        (None, ALL),
    ],
    ids=str,
)
def test_a_plain_model_runs_on_the_devices(devices, expected):
    """Every spelling names torch devices. The plain model needs no trace, and each device computes some rows."""
    plain = mlp()
    model = copy.deepcopy(plain).to("neuron:0")
    x = torch.randn(13, 5)
    with torch.no_grad(), parallel(model, devices) as p:
        assert named(p) == expected
        for _ in range(2):
            output = model(x)
            assert str(output.device) == "neuron:0"
            torch.testing.assert_close(output.cpu(), plain(x))
        assert len(p.stats().shards) == len(expected)


def test_a_training_step_has_the_gradients_of_the_plain_model():
    """Unlike compiled models, models on these devices have gradients."""
    plain = mlp().double()
    model = copy.deepcopy(plain).to("neuron:0")
    x = torch.randn(9, 5, dtype=torch.float64)
    plain(x).square().sum().backward()
    with parallel(model, ["neuron:0", "neuron:1"]):
        model(x).square().sum().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad)


def test_data_parallel_uses_all_devices():
    """`parawrap.DataParallel` has the indices of the torch devices."""
    plain = mlp()
    model = DataParallel(copy.deepcopy(plain).to("neuron:0"))
    x = torch.randn(8, 5)
    with torch.no_grad():
        torch.testing.assert_close(model(x).cpu(), plain(x))
    assert model.device_ids == [0, 1, 2, 3]


def test_a_device_that_the_process_does_not_see_is_refused():
    """The error lists the devices, as for other accelerators."""
    with pytest.raises(DeviceUnavailableError, match="'neuron:7' is not available: this process sees neuron:0 to neuron:3"):
        parallel(mlp(), ["neuron:0", "neuron:7"])


@pytest.mark.parametrize(
    "use",
    [
        lambda model: parallel(model, ["nc:0", "nc:1"]),
        lambda model: parallel(model, ["nc:0", "neuron:1"]),
        lambda model: neuron.DataParallel(model, ["neuron:0", "neuron:1"]),
        lambda model: neuron.DataParallel(model),
        lambda model: neuron.trace(model, torch.zeros(1, 5)),
    ],
)
def test_compiled_models_are_refused_without_trace(use):
    """The error says that the package has no trace, and how to run the plain model."""
    with pytest.raises(
        DeviceUnavailableError, match=r"torch_neuronx has no trace.*parallel\(model, \['neuron:0', 'neuron:1'\]\)"
    ):
        use(mlp())


def test_the_refusal_is_the_same_if_the_runtime_is_named(monkeypatch):
    """PARAWRAP_NEURON_RUNTIME=torch_neuronx names both generations."""
    monkeypatch.setenv("PARAWRAP_NEURON_RUNTIME", "torch_neuronx")
    with pytest.raises(DeviceUnavailableError, match="torch_neuronx has no trace"):
        neuron.DataParallel(mlp())
    assert named(parallel(mlp(), "neuron")) == ALL


def test_a_package_that_also_offers_trace_runs_compiled_models(torch_neuronx, monkeypatch):
    """The generations are told apart by what they offer: here, "nc:0" is a core and "neuron:0" a torch device."""
    monkeypatch.setattr(torch_neuronx, "trace", torch.jit.trace, raising=False)
    monkeypatch.setenv("NEURON_RT_NUM_CORES", "2")
    assert runtime().name == "torch_neuronx"
    assert [str(core) for core in parallel(mlp(), "nc").devices] == ["nc:0", "nc:1"]
    assert named(parallel(mlp(), [torch.device("neuron", 1)])) == ["neuron:1"]


def test_a_device_module_that_cannot_count_is_not_used(monkeypatch):
    """Then "neuron:0" is a core for compiled models."""
    monkeypatch.delattr(torch.neuron, "device_count")
    assert names_cores("neuron:0")


def test_a_device_module_need_not_say_that_it_is_available(monkeypatch):
    """Then its devices are counted."""
    monkeypatch.delattr(torch.neuron, "is_available")
    assert neuron.core_count() == 4
    assert named(parallel(mlp(), "neuron")) == ALL


def test_core_count_is_the_number_of_devices():
    """It needs no runtime for compiled models."""
    assert neuron.core_count() == 4


def test_emulated_cores_take_precedence():
    """Inside `neuron_host`, "neuron" names the emulated cores, whatever package is installed."""
    with testing.neuron_host(cores=2):
        model = neuron.trace(mlp(), torch.zeros(1, 5))
        with parallel(model, "neuron") as p:
            assert [str(core) for core in p.devices] == ["nc:0", "nc:1"]
            assert model(torch.randn(3, 5)).device.type == "cpu"
        assert neuron.core_count() == 2
    assert named(parallel(mlp(), "neuron")) == ALL


def test_emulated_cores_can_be_named_by_the_environment(monkeypatch):
    """PARAWRAP_NEURON_RUNTIME=host has the same effect."""
    monkeypatch.setenv("PARAWRAP_NEURON_RUNTIME", "host")
    monkeypatch.setenv("NEURON_RT_NUM_CORES", "3")
    assert [str(core) for core in parallel(mlp(), "neuron").devices] == ["nc:0", "nc:1", "nc:2"]


@pytest.mark.parametrize(("count", "state"), [(4, "ok"), (0, "warning")])
def test_doctor_counts_the_devices(monkeypatch, count, state):
    """`parawrap doctor` counts torch devices, and warns if the driver shows none."""
    monkeypatch.setattr(torch.neuron, "device_count", lambda: count)
    (check,) = [check for check in machine_checks() if check.name == "NeuronCores"]
    assert (check.state, check.detail) == (state, f"{count} torch devices of kind 'neuron'")
