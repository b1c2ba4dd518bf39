"""Turn the `devices` argument into one torch device per lane, on a machine that may have no
accelerator.
"""

from __future__ import annotations

import pytest
import torch

from parawrap.api.data_parallel import _resolve_lanes as data_parallel_lanes
from parawrap.backends import Backend, backend_of, resolve_device, resolve_devices
from parawrap.backends import _backend_registry as registry
from parawrap.errors import DeviceListError, DeviceUnavailableError, ParawrapError
from parawrap.launch import Device

CPU = torch.device("cpu")

cpu_only = pytest.mark.skipif(
    torch.accelerator.is_available(), reason="says what a machine without accelerator answers"
)


class FakeBackend(Backend):
    """Three devices of one of torch's types, without streams."""

    module = None

    def count(self):
        return 3


@pytest.fixture
def fakes(monkeypatch):
    """Three devices of the kind "meta", and three GPUs. No tensor is made on a GPU."""
    found = {kind: FakeBackend(kind) for kind in ("meta", "cuda")}
    monkeypatch.setattr(registry, "_backends", registry._backends | found)
    return found


@cpu_only
@pytest.mark.parametrize("device", ["cuda:0", "mps", "xpu:1", "GPU", torch.device("cuda", 0)])
def test_a_missing_accelerator(device):
    """The message names the device, and suggests "auto"."""
    for devices in (device, [device]):
        with pytest.raises(
            DeviceUnavailableError, match=f"{str(device).replace('GPU', 'cuda')}.*auto"
        ):
            resolve_devices(devices)
    with pytest.raises(DeviceUnavailableError, match="'cpu'"):
        resolve_devices([0])


@pytest.mark.parametrize("kind", ["meta", "NN", "__name__", "auto"])
def test_unknown_kinds_are_refused(kind):
    """Unknown names and torch modules that are not device modules raise, with the known kinds."""
    with pytest.raises(DeviceUnavailableError, match=f"{kind}.*cpu.*cuda.*mps"):
        resolve_devices(f"{kind}:0")


@pytest.mark.parametrize(
    "value", ["cpu:", "cpu:0:0", "cpu: 0", {"cpu"}, iter(["cpu"]), ["cpu", True], [":0"]]
)
def test_other_values_are_refused(value):
    with pytest.raises(ParawrapError):
        resolve_devices(value)


def test_a_backend_without_streams(fakes):
    """A backend without streams resolves lists. Missing indices, and lists of two kinds, are
    refused.
    """
    fake = fakes["meta"]
    every = tuple(torch.device("meta", index) for index in range(3))
    assert resolve_devices("meta") == every
    assert resolve_devices(["meta:1", every[1]]) == (every[1],) * 2
    assert (fake.new_stream(every[0]), fake.rng_state(every[0]), fake.is_capturing()) == (
        None,
        None,
        False,
    )
    with fake.activate(every[0], None):
        assert (resolve_device("meta:2"), resolve_device("meta")) == (every[2], every[0])
    with pytest.raises(DeviceUnavailableError, match="meta:0 to meta:2"):
        resolve_devices(["meta:3"])
    with pytest.raises(DeviceListError, match=r"cpu.*meta"):
        resolve_devices(["cpu", "meta:0"])


@pytest.mark.parametrize("name", ["gpu", "cuda", "GPU"])
@pytest.mark.usefixtures("fakes")
def test_gpu_and_cuda_mean_the_same(name):
    """Blocks, DataParallel, and launches accept the same names, in any case, with and without an
    index.
    """
    every = tuple(torch.device("cuda", index) for index in range(3))
    assert resolve_devices(name) == every
    assert resolve_devices([f"{name}:1", name, "cuda:0"]) == (every[1], every[0], every[0])
    assert data_parallel_lanes([f"{name}:0", "cuda:1"]) == every[:2]
    assert backend_of(name) is backend_of("cuda")
    assert Device.from_str(name) is Device.GPU
    with pytest.raises(DeviceUnavailableError, match="cuda:0 to cuda:2") as caught:
        resolve_devices([f"{name}:7"])
    assert "device 'cuda:7' is not available" in str(caught.value)
