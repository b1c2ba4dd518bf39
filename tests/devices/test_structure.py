"""Awkward models have the plain answer and gradients on several devices."""

from __future__ import annotations

import functools

import pytest
import torch

from parawrap import parallel
from tests.awkward import EVENTS, MODELS, check
from tests.devices.zoo import SIMS
from tests.replicas.test_structure import BEHIND, quiet


def made_on(device, make):
    """Make a model on a device. `to` would not move tensors in dicts."""
    with torch.device(device):
        return make()


@quiet
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
@pytest.mark.parametrize("event", EVENTS.values(), ids=EVENTS)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_awkward_models_have_the_plain_answer(make, event, grad):
    """Values and gradients equal those of a plain copy on the same device, call after call."""
    for devices, rows in ((SIMS, 9), (["sim:1", "sim:0"], 5), (["sim:2", "sim:3", "sim:3"], 17)):
        check(
            functools.partial(made_on, "sim:0", make),
            event,
            functools.partial(parallel, devices=devices, output_device="sim:0"),
            rows,
            grad=grad,
        )


@pytest.mark.parametrize("behind", BEHIND)
def test_a_model_behind_a_callable_is_replicated(behind):
    """Each device has its own copy of the model behind a method, a closure, a partial, or an object."""
    model = MODELS["extractor"]().to("sim:0")
    x = torch.randn(9, 4, dtype=torch.float64)
    expected = model(x.to("sim:0"))
    with parallel(behind(model), SIMS) as p:
        for _ in range(3):
            output = p(x)
            torch.testing.assert_close(output, expected)
            model.zero_grad()
            output["2"].sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    expected["2"].sum().backward()
    torch.testing.assert_close(gradients, [parameter.grad for parameter in model.parameters()])
