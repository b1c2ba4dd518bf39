"""From what a user writes for devices to one torch device a lane, on a machine that may have the CPU alone."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from parawrap.backends import Backend, Traits, backend_of, best_backend, register_backend, resolve_device, resolve_devices
from parawrap.backends import _backend_registry as registry
from parawrap.backends.cpu_backend import usable_cores
from parawrap.errors import DeviceListError, DeviceUnavailableError, ParawrapError

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
    """The kind "meta", served by a module of this test."""
    monkeypatch.setattr(registry, "_MODULES", dict(registry._MODULES))
    monkeypatch.setattr(registry, "_loaded", dict(registry._loaded))
    module = types.ModuleType("parawrap_test_backend")
    module.BACKEND = FakeBackend()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    register_backend("meta", module.__name__)
    return module.BACKEND


@cpu_only
@pytest.mark.parametrize("devices", [None, "auto", "cpu"])
def test_without_accelerator_everything_visible_is_the_cpu(devices):
    """Nothing, "auto" and "cpu" give CPU lanes: at least one, and no more than there are cores."""
    found = resolve_devices(devices)
    assert set(found) == {CPU}
    assert 1 <= len(found) <= usable_cores()


@cpu_only
@pytest.mark.parametrize("lanes", [1, 2, 5, 64])
def test_a_number_is_that_many_lanes(lanes):
    """A number asks for so many lanes, on the CPU also more than it has cores."""
    assert resolve_devices(lanes) == (CPU,) * lanes


@pytest.mark.parametrize(
    "devices",
    [["cpu"], ("cpu", "cpu:0"), [CPU, "cpu", torch.device("cpu", 0)], "cpu:0", CPU, torch.device("cpu", 0)],
)
def test_a_sequence_is_one_lane_an_entry_and_cpu_0_is_the_cpu(devices):
    """Each entry is a lane; "cpu:0" becomes "cpu", which is how results report it."""
    found = resolve_devices(devices)
    assert set(found) == {CPU}
    assert all(device.index is None for device in found)
    assert len(found) == (len(devices) if isinstance(devices, (list, tuple)) else 1)


@pytest.mark.parametrize("device", ["cpu:1", "cpu:99999", torch.device("cpu", 1)])
@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: [d], lambda d: ["cpu", d]])
def test_a_second_cpu_is_not_there(device, wrap):
    """Where torch would take "cpu:1" and then copy at every `.to`, it is refused, with the cure."""
    with pytest.raises(DeviceUnavailableError, match=r'cpu:\d+.*\["cpu", "cpu"\]'):
        resolve_devices(wrap(device))


@cpu_only
@pytest.mark.parametrize(
    "device", ["cuda", "cuda:0", "mps", "mps:0", "xpu:1", torch.device("cuda", 0), torch.device("cuda")]
)
def test_an_accelerator_that_is_not_there_is_named_with_the_cure(device):
    """The message has the device that was asked for, and that "auto" takes what is there."""
    kind = str(device).partition(":")[0]
    for devices in (device, [device]):
        with pytest.raises(DeviceUnavailableError, match=f"{kind}.*auto"):
            resolve_devices(devices)


@cpu_only
def test_an_index_is_an_accelerators():
    """A bare index in a list means an accelerator's; the message says what to write for the CPU."""
    with pytest.raises(DeviceUnavailableError, match="'cpu'"):
        resolve_devices([0])


@pytest.mark.parametrize("kind", ["gpu", "meta", "nn", "jit", "CPU", "__name__", "auto"])
def test_a_kind_that_is_none_is_refused_naming_those_that_are(kind):
    """A kind that torch does not know, or a module of torch that is no device, is no kind."""
    with pytest.raises(DeviceUnavailableError, match=f"{kind}.*cpu.*cuda.*mps"):
        resolve_devices(f"{kind}:0")


@pytest.mark.parametrize(
    "devices", [[], (), "", 0, -1, True, False, 3.5, {"cpu"}, iter(["cpu"]), object(), {"cpu": 0}, b"cpu"]
)
def test_what_names_no_device_is_refused(devices):
    """Nothing to take, or nothing that can be read: a list error whatever the machine has."""
    with pytest.raises(DeviceListError):
        resolve_devices(devices)


@pytest.mark.parametrize("device", ["cpu:", "cpu:x", "cpu:-1", "cpu:0:0", "cpu: 0"])
def test_after_the_colon_comes_an_index(device):
    """A string with a colon and no index is refused, alone and in a list."""
    for devices in (device, [device]):
        with pytest.raises(DeviceListError, match="index"):
            resolve_devices(devices)


@pytest.mark.parametrize("entry", [None, True, 1.0, ["cpu"], "", ":0"])
def test_an_entry_that_is_no_device_is_refused(entry):
    """Each entry is an index, a string or a torch device."""
    with pytest.raises(ParawrapError):
        resolve_devices(["cpu", entry])


def test_a_list_error_is_a_value_error_and_a_missing_device_a_runtime_error():
    """Code that knows nothing of parawrap catches what it would expect."""
    with pytest.raises(ValueError, match="empty"):
        resolve_devices([])
    with pytest.raises(RuntimeError):
        resolve_devices("cpu:7")


def test_one_device_is_read_alone(fake):
    """resolve_device takes a string with or without index."""
    assert resolve_device("meta:2") == torch.device("meta", 2)
    assert resolve_device("meta") == torch.device("meta", 0)


def test_a_registered_backend_serves_its_kind(fake):
    """The kind alone is all of its devices, a list is read by it, and what it lacks is its own error."""
    assert backend_of("meta") is fake
    assert resolve_devices("meta") == tuple(torch.device("meta", index) for index in range(3))
    assert resolve_devices(["meta:1", "meta:1"]) == (torch.device("meta", 1),) * 2
    assert resolve_devices(torch.device("meta", 2)) == (torch.device("meta", 2),)
    with pytest.raises(DeviceUnavailableError, match="meta:0 to meta:2"):
        resolve_devices(["meta:3"])


def test_the_lanes_of_one_block_share_one_type(fake):
    """A list of two types is refused, naming both."""
    with pytest.raises(DeviceListError, match=r"cpu.*meta"):
        resolve_devices(["cpu", "meta:0"])


def test_registering_again_replaces(fake, monkeypatch):
    """The last module that was registered for a kind serves it, also when another was in use."""
    assert backend_of("meta") is fake
    module = types.ModuleType("parawrap_test_backend_two")
    module.BACKEND = FakeBackend()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    register_backend("meta", module.__name__)
    assert backend_of("meta") is module.BACKEND


def test_a_backend_is_imported_when_its_kind_is_first_named(fake):
    """Registering imports nothing; a module that cannot be imported is an error at its first use, and of its own type."""
    register_backend("lazy", "parawrap_no_such_backend")
    with pytest.raises(ModuleNotFoundError, match="parawrap_no_such_backend"):
        backend_of("lazy")


def test_a_backend_leaves_out_what_its_kind_does_not_have(fake):
    """The contract's defaults: no streams, captures or pinned memory, nothing to activate, no traits."""
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


def test_the_best_backend_is_one_with_devices():
    """Whatever is best here, it has a device."""
    assert best_backend().count() >= 1
