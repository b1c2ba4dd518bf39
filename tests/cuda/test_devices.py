"""The visible GPUs, their traits, and copies between them."""

from __future__ import annotations

import copy

import pytest
import torch

from parawrap import DataParallel, DeviceUnavailableError, parallel
from parawrap.backends import Traits, backend_of
from tests.cuda.gpus import HOME, KIND, every
from tests.helpers.device_models import assert_same_gradients, mlp, rows

GIB = 1 << 30


# -- one GPU is enough


@pytest.mark.parametrize("make", [parallel, DataParallel])
@pytest.mark.parametrize("devices", [[f"{KIND}:99"], [HOME, f"{KIND}:99"]], ids=str)
def test_a_missing_gpu_is_refused(make, devices):
    """The error names the requested GPU and the visible ones."""
    with pytest.raises(DeviceUnavailableError, match=rf"'{KIND}:99' is not available.*{HOME}"):
        make(mlp().to(HOME), devices)


def test_every_visible_gpu_is_the_default():
    """A block without devices, or with the kind alone, has one lane per GPU."""
    for devices in (None, "auto", KIND):
        assert [str(device) for device in parallel(mlp(), devices).devices] == every()


@pytest.fixture
def two_gpus(monkeypatch):
    """Return a function that makes the backend report two GPUs with these traits."""

    def told(*traits):
        monkeypatch.setattr(type(backend_of(KIND)), "count", lambda self: 2)
        monkeypatch.setattr(type(backend_of(KIND)), "traits", lambda self, device: traits[device.index])
        return [f"{KIND}:0", f"{KIND}:1"]

    return told


@pytest.mark.parametrize(
    ("lesser", "what"), [(Traits(40 * GIB, 132), "memory"), (Traits(80 * GIB, 56), "cores")], ids=["memory", "cores"]
)
def test_unequal_gpus(lesser, what, two_gpus):
    """DataParallel warns about a GPU with less memory or fewer cores, and names the difference."""
    devices = two_gpus(Traits(80 * GIB, 132), lesser)
    with pytest.warns(UserWarning, match=rf"{KIND}:1 has less than 75% of the {what} of {KIND}:0"):
        DataParallel(mlp().to(HOME), devices)
    DataParallel(mlp().to(HOME), two_gpus(Traits(80 * GIB, 132), Traits(79 * GIB, 114)))  # no warning


# -- several are needed


def test_replicas_are_refreshed_when_the_model_changed(several):
    """A second call copies no parameter, and a call after an optimizer step copies each once."""
    model = mlp().to(HOME)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = rows(4 * len(several) + 1)
    with parallel(model, several) as p:
        model(x).sum().backward()
        with torch.no_grad():
            for expected in (0, 1, 0):
                before = p.stats().refreshes
                model(x)
                assert p.stats().refreshes - before == expected
                if expected == 0:
                    optimizer.step()


@pytest.mark.parametrize("grad", [True, False])
def test_input_and_output_may_be_on_any_gpu(grad, several):
    """The batch may be on any GPU, and the output is joined on any GPU."""
    model = mlp().to(HOME)
    plain = copy.deepcopy(model)
    last = several[-1]
    for lanes in (several, several[::-1], [last], [HOME, last, last]):
        model.zero_grad()
        plain.zero_grad()
        with torch.set_grad_enabled(grad), parallel(model, lanes, output_device=last):
            x = rows(13)
            output, expected = model(x.to(last)), plain(x.to(HOME))
            assert output.device == torch.device(last)
            torch.testing.assert_close(output, expected.to(last))
            if grad:
                output.square().sum().backward()
                expected.square().sum().backward()
                assert_same_gradients(model, plain)
