"""Turn the `devices` argument into one torch device per lane, on a machine that may have no accelerator."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from parawrap.api.data_parallel import _lanes as data_parallel_lanes
from parawrap.backends import Backend, Traits, backend_of, best_backend, register_backend, resolve_device, resolve_devices
from parawrap.backends import _backend_registry as registry
from parawrap.backends.cpu_backend import usable_cores
from parawrap.errors import DeviceListError, DeviceUnavailableError, ParawrapError
from parawrap.launch import Device

CPU = torch.device("cpu")

cpu_only = pytest.mark.skipif(torch.accelerator.is_available(), reason="says what a machine without accelerator answers")


class FakeBackend(Backend):
    """Three devices of torch's type "meta"."""

    type = "meta"

    def count(self):
        return 3

    def device(self, index):
        index = 0 if index is None else index
        if index >= 3:
            msg = f"device 'meta:{index}' is not available: this process sees meta:0 to meta:2"
            raise DeviceUnavailableError(msg)
        return torch.device("meta", index)


@pytest.fixture
def fake(monkeypatch):
    """The kind "meta", with a backend that this test registers."""
    monkeypatch.setattr(registry, "_MODULES", dict(registry._MODULES))
    monkeypatch.setattr(registry, "_loaded", dict(registry._loaded))
    module = types.ModuleType("parawrap_test_backend")
    module.BACKEND = FakeBackend()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    register_backend("meta", module.__name__)
    return module.BACKEND


@cpu_only
@pytest.mark.parametrize("devices", [None, "auto", "cpu"])
def test_without_an_accelerator_auto_means_cpu_lanes(devices):
    """None, "auto", and "cpu" give CPU lanes: at least one, and at most one per core."""
    found = resolve_devices(devices)
    assert set(found) == {CPU}
    assert 1 <= len(found) <= usable_cores()


@cpu_only
@pytest.mark.parametrize("lanes", [1, 2, 5, 64])
def test_a_number_is_that_many_lanes(lanes):
    """A number is the number of lanes, which may exceed the number of cores."""
    assert resolve_devices(lanes) == (CPU,) * lanes


@pytest.mark.parametrize(
    "devices",
    [["cpu"], ("cpu", "cpu:0"), [CPU, "cpu", torch.device("cpu", 0)], "cpu:0", CPU, torch.device("cpu", 0)],
)
def test_a_sequence_is_one_lane_per_entry(devices):
    """Each entry is a lane. "cpu:0" becomes "cpu", the device of tensors on the CPU."""
    found = resolve_devices(devices)
    assert set(found) == {CPU}
    assert all(device.index is None for device in found)
    assert len(found) == (len(devices) if isinstance(devices, (list, tuple)) else 1)


@pytest.mark.parametrize("device", ["cpu:1", "cpu:99999", torch.device("cpu", 1)])
@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: [d], lambda d: ["cpu", d]])
def test_a_second_cpu_is_refused(device, wrap):
    """The device "cpu:1" raises with a remedy. With torch it would copy at every `.to`."""
    with pytest.raises(DeviceUnavailableError, match=r'cpu:\d+.*\["cpu", "cpu"\]'):
        resolve_devices(wrap(device))


@cpu_only
@pytest.mark.parametrize(
    "device", ["cuda", "cuda:0", "mps", "mps:0", "xpu:1", torch.device("cuda", 0), torch.device("cuda")]
)
def test_a_missing_accelerator_is_named_with_a_remedy(device):
    """The message names the requested device and suggests "auto"."""
    kind = str(device).partition(":")[0]
    for devices in (device, [device]):
        with pytest.raises(DeviceUnavailableError, match=f"{kind}.*auto"):
            resolve_devices(devices)


@cpu_only
def test_an_index_means_an_accelerator():
    """An index in a list means an accelerator. Without one, the message says what to write for the CPU."""
    with pytest.raises(DeviceUnavailableError, match="'cpu'"):
        resolve_devices([0])


@pytest.mark.parametrize("kind", ["meta", "nn", "jit", "NN", "__name__", "auto"])
def test_an_unknown_kind_is_refused_with_the_known_kinds(kind):
    """Unknown names and torch modules that are not device modules raise."""
    with pytest.raises(DeviceUnavailableError, match=f"{kind}.*cpu.*cuda.*mps"):
        resolve_devices(f"{kind}:0")


@pytest.mark.parametrize(
    "devices", [[], (), "", 0, -1, True, False, 3.5, {"cpu"}, iter(["cpu"]), object(), {"cpu": 0}, b"cpu"]
)
def test_invalid_device_lists_are_refused(devices):
    """An empty or unreadable list raises DeviceListError on every machine."""
    with pytest.raises(DeviceListError):
        resolve_devices(devices)


@pytest.mark.parametrize("device", ["cpu:", "cpu:x", "cpu:-1", "cpu:0:0", "cpu: 0"])
def test_a_colon_without_an_index_is_refused(device):
    """A string with a colon and no index raises, alone and in a list."""
    for devices in (device, [device]):
        with pytest.raises(DeviceListError, match="index"):
            resolve_devices(devices)


@pytest.mark.parametrize("entry", [None, True, 1.0, ["cpu"], "", ":0"])
def test_an_entry_that_is_not_a_device_is_refused(entry):
    """Each entry must be an index, a string, or a torch device."""
    with pytest.raises(ParawrapError):
        resolve_devices(["cpu", entry])


def test_a_list_error_is_a_value_error_and_a_missing_device_a_runtime_error():
    """The errors inherit from the built-in exceptions that other code catches."""
    with pytest.raises(ValueError, match="empty"):
        resolve_devices([])
    with pytest.raises(RuntimeError):
        resolve_devices("cpu:7")


def test_resolve_device_takes_one_device(fake):
    """resolve_device takes a string with or without an index."""
    assert resolve_device("meta:2") == torch.device("meta", 2)
    assert resolve_device("meta") == torch.device("meta", 0)


def test_a_registered_backend_serves_its_kind(fake):
    """A registered backend counts its devices, resolves lists, and refuses missing indices."""
    assert backend_of("meta") is fake
    assert resolve_devices("meta") == tuple(torch.device("meta", index) for index in range(3))
    assert resolve_devices(["meta:1", "meta:1"]) == (torch.device("meta", 1),) * 2
    assert resolve_devices(torch.device("meta", 2)) == (torch.device("meta", 2),)
    with pytest.raises(DeviceUnavailableError, match="meta:0 to meta:2"):
        resolve_devices(["meta:3"])


def test_a_list_of_two_device_types_is_refused(fake):
    """The message names both types."""
    with pytest.raises(DeviceListError, match=r"cpu.*meta"):
        resolve_devices(["cpu", "meta:0"])


def test_registering_again_replaces(fake, monkeypatch):
    """The last module registered for a kind is used, even after an earlier one was used."""
    assert backend_of("meta") is fake
    module = types.ModuleType("parawrap_test_backend_two")
    module.BACKEND = FakeBackend()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    register_backend("meta", module.__name__)
    assert backend_of("meta") is module.BACKEND


def test_a_backend_is_imported_when_its_kind_is_first_named(fake):
    """Registering imports nothing. A module that cannot be imported raises its own error at the first use."""
    register_backend("lazy", "parawrap_no_such_backend")
    with pytest.raises(ModuleNotFoundError, match="parawrap_no_such_backend"):
        backend_of("lazy")


def test_defaults_of_a_backend(fake):
    """By default, a backend has no streams, captures, pinned memory, activation, or traits."""
    device, host = torch.device("meta", 0), torch.zeros(1)
    assert fake.stream(device) is None
    assert fake.new_stream(device) is None
    assert not fake.is_capturing()
    assert not fake.compiles_each_shape
    assert fake.pinned(host) is host
    with fake.activate(torch.device("meta", 0), None):
        pass
    assert fake.intra_op_threads(4) is None
    assert fake.traits(torch.device("meta", 0)) is None
    assert Traits(memory=1, cores=2) == (1, 2)


def test_the_best_backend_has_devices():
    """The best backend of this machine has at least one device."""
    assert best_backend().count() >= 1


class FakeGpus(Backend):
    """Three devices of torch's type "cuda"."""

    type = "cuda"

    def count(self):
        return 3

    def device(self, index):
        if index is not None and index >= 3:
            raise registry.not_there("cuda", index, 3)
        return torch.device("cuda", index or 0)


@pytest.fixture
def three_gpus(monkeypatch):
    """Three GPUs, of which no tensor is made."""
    monkeypatch.setattr(registry, "_loaded", registry._loaded | {"cuda": FakeGpus()})


@pytest.mark.parametrize("name", ["gpu", "cuda", "GPU", "Cuda"])
@pytest.mark.usefixtures("three_gpus")
def test_gpu_and_cuda_mean_the_same(name):
    """Blocks and launches accept the same names, in any case, with and without an index."""
    every = tuple(torch.device("cuda", index) for index in range(3))
    assert resolve_devices(name) == every
    assert resolve_devices(f"{name}:2") == (every[2],)
    assert resolve_devices([f"{name}:1", name, "cuda:0"]) == (every[1], every[0], every[0])
    assert resolve_device(f"{name}:1") == every[1]
    assert backend_of(name) is backend_of("cuda")
    assert Device.from_str(name) is Device.GPU


@pytest.mark.usefixtures("three_gpus")
def test_data_parallel_accepts_gpu():
    """The `device_ids` of DataParallel name GPUs either way."""
    assert data_parallel_lanes(["gpu:0", "cuda:1"]) == (torch.device("cuda", 0), torch.device("cuda", 1))


@pytest.mark.parametrize("name", ["cpu", "CPU", "Cpu"])
def test_device_names_ignore_case(name):
    """Case does not matter, as in `Platform`."""
    assert set(resolve_devices(name)) == {CPU}
    assert resolve_devices([f"{name}:0", name]) == (CPU, CPU)


@pytest.mark.parametrize("name", ["gpu:7", "GPU:7", "cuda:7"])
@pytest.mark.usefixtures("three_gpus")
def test_a_missing_gpu_is_named_as_the_user_wrote_it(name):
    """The message echoes the name, and lists the devices under torch's names."""
    with pytest.raises(DeviceUnavailableError, match="cuda:0 to cuda:2") as caught:
        resolve_devices([name])
    assert f"device {name!r} is not available" in str(caught.value)


@cpu_only
@pytest.mark.parametrize("name", ["gpu", "GPU"])
def test_a_kind_without_devices_is_named_as_the_user_wrote_it(name):
    """On a machine without GPUs, the message names "gpu", not "cuda"."""
    for devices in (name, [name]):
        with pytest.raises(DeviceUnavailableError, match=f"device '{name}' is not available"):
            resolve_devices(devices)
