"""The visible GPUs, their traits, and copies between them."""

from __future__ import annotations

import copy

import pytest
import torch

from parawrap import DataParallel, DeviceUnavailableError, parallel
from tests.cuda.gpus import HOME, KIND, every
from tests.helpers.device_models import assert_same_gradients, mlp, rows


@pytest.mark.parametrize("make", [parallel, DataParallel])
@pytest.mark.parametrize("devices", [[f"{KIND}:99"], [HOME, f"{KIND}:99"]], ids=str)
def test_a_missing_gpu_is_refused(make, devices):
    """The error names the requested GPU and the visible ones."""
    with pytest.raises(DeviceUnavailableError, match=rf"'{KIND}:99' is not available.*{HOME}"):
        make(mlp().to(HOME), devices)


def test_all_gpus_are_the_default():
    """A block without devices, or with the kind alone, has one lane per GPU."""
    for devices in (None, "auto", KIND):
        assert [str(device) for device in parallel(mlp(), devices).devices] == every()


@pytest.mark.parametrize("grad", [True, False])
def test_batches_on_any_gpu(grad, several):
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
