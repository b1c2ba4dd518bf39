"""Models with an unusual structure have the plain outputs and gradients on several devices."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from parawrap import ReplicaError, parallel
from tests.devices.zoo import SIMS
from tests.helpers.odd_models import BEHIND, CASES, MODELS, check, quiet


def made_on(device, make):
    """Make a model on a device. `Module.to` would leave tensors in dicts behind."""
    with torch.device(device):
        return make()


@quiet
@pytest.mark.parametrize("devices", [SIMS, ["sim:2", "sim:0", "sim:3", "sim:3"]], ids=str)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_awkward_models_equal_a_plain_copy(make, devices):
    """Outputs and gradients equal those of a plain copy, whatever changes in the model between calls."""
    opened = functools.partial(parallel, devices=devices, output_device="sim:0")
    for case in CASES:
        event, grad = case.values
        check(functools.partial(made_on, "sim:0", make), event, opened, 9, grad=grad)


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


class WithBias(nn.Linear):
    """Returns its output and its bias."""

    def forward(self, x):
        return super().forward(x), self.bias


@pytest.mark.parametrize("count", [1, 2, 9])
def test_a_returned_parameter_is_the_models_own(count):
    """This also holds for a call of one row that one lane on another device runs whole."""
    model = WithBias(3, 3).to("sim:0")
    with torch.no_grad(), parallel(model, ["sim:2", "sim:0"], out_dims=(0, None)):
        assert model(torch.randn(count, 3, device="sim:0"))[1] is model.bias


def test_a_tensor_that_only_a_function_holds_is_refused():
    """In a lane on another device the tensor would lie on the wrong device. The error names its path in the model."""
    model, scale = nn.Linear(3, 3, device="sim:0"), torch.ones(3, device="sim:0")
    model.scaled = lambda x: x * scale
    with (
        parallel(model, ["sim:0", "sim:1"]),
        pytest.raises(ReplicaError, match=r"scaled.* is a tensor that only a function"),
    ):
        model(torch.randn(7, 3))


def test_a_tensor_that_a_partial_holds_is_copied():
    """The arguments of a partial belong to the model, as in `copy.deepcopy`."""

    class Scaled(nn.Linear):
        def forward(self, x):
            return self.scaled(super().forward(x))

    model = Scaled(3, 3, device="sim:0")
    model.scaled = functools.partial(torch.mul, torch.full((3,), 2.0, device="sim:0"))
    x = torch.randn(7, 3, device="sim:0")
    with torch.no_grad(), parallel(model, ["sim:0", "sim:1"]):
        torch.testing.assert_close(model(x), nn.Linear.forward(model, x) * 2)


class Counts(nn.Linear):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__(3, 3, device="sim:2")
        self.register_buffer("seen", torch.zeros(3, device="sim:2"))

    def forward(self, x):
        self.seen.add_(1)
        return super().forward(x)


def test_whole_calls_that_write_buffers_do_not_race():
    """Two lanes on one device run whole calls that write a buffer, and the device reports no race."""
    model, x = Counts(), torch.randn(7, 3, device="sim:2")
    with torch.no_grad(), parallel(model, ["sim:2", "sim:2"]) as p:
        for future in [p.submit(x) for _ in range(6)]:
            future.result()
    assert model.seen[0] > 0
