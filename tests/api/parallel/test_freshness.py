"""Replicas last as long as the block and follow every change of the model."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import parallel
from tests.helpers.waiting import PATIENCE_S

pytestmark = pytest.mark.filterwarnings("ignore:a model in eval mode is called with gradients:UserWarning")
THREE = ["cpu"] * 3


class Net(nn.Module):
    """Records the modules that run, and has one of each thing that tests change."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.dropout = nn.Dropout(1.0)
        self.tail = nn.Sequential(nn.Tanh())
        self.register_buffer("shift", torch.arange(4.0))
        self.table = torch.ones(4)
        self.options = {"factor": 1.0, "steps": [1.0]}
        type(self).ran = []  # on the class, because a replica has its own attributes

    def forward(self, x):
        self.ran.append(self)
        y = self.dropout(self.linear(x)) * self.options["factor"] + self.shift
        return self.tail(y + self.options["steps"][-1]) * self.table


class Double(nn.Module):
    def forward(self, weight):
        return weight * 2


def random_state(model):
    return {name: torch.rand_like(value) for name, value in model.state_dict().items()}


CHANGES = {
    "new weight": lambda model: setattr(model.linear, "weight", nn.Parameter(torch.ones(4, 4))),
    "edited weight": lambda model: torch.no_grad()(model.linear.weight.mul_)(3),
    "new data": lambda model: setattr(model.linear.weight, "data", torch.ones(4, 4)),
    "load": lambda model: model.load_state_dict(random_state(model)),
    "load assigned": lambda model: model.load_state_dict(random_state(model), assign=True),
    "edited buffer": lambda model: model.shift.add_(1),
    "resized buffer": lambda model: setattr(model, "shift", torch.ones(1)),
    "no bias": lambda model: setattr(model.linear, "bias", None),
    "item of a dict": lambda model: model.options.update(factor=3.0),
    "item of a list": lambda model: model.options["steps"].append(4.0),
    "edited tensor": lambda model: model.table.mul_(3),
    "submodule": lambda model: setattr(model, "linear", nn.Linear(4, 4, bias=False)),
    "more layers": lambda model: model.tail.append(nn.Linear(4, 4)),
    "patch": lambda model: setattr(model.linear, "forward", lambda x: x * model.linear.weight.sum()),
    "hook": lambda model: model.linear.register_forward_hook(lambda module, args, out: out + 100),
    "parametrization": lambda model: nn.utils.parametrize.register_parametrization(model.linear, "weight", Double()),
    "class": lambda model: setattr(model.tail[0], "__class__", nn.Sigmoid),
    "float64": lambda model: model.double(),
    "frozen": lambda model: model.linear.requires_grad_(requires_grad=False),
    "mode": lambda model: model.train(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_lane_follows_a_change(change):
    """Calls, gradients, `submit`, and `map` are those of the changed model."""
    model, x = Net().eval(), torch.randn(7, 4)
    with parallel(model, THREE) as p:
        model(x)
        p.submit(x).result(PATIENCE_S)
        CHANGES[change](model)
        x = x.double() if change == "float64" else x
        inside = model(x)
        if inside.requires_grad:
            inside.sum().backward()
        whole = [p.submit(x).result(PATIENCE_S), *p.map([x] * 3)]
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    plain = model(x)
    if plain.requires_grad:
        plain.sum().backward()
    assert_close([inside, *whole], [plain] * 5)
    assert_close(gradients, [parameter.grad for parameter in model.parameters()])


def test_replicas_are_made_once():
    """Every lane runs the same object in every call, never the model. Lanes on the model's device copy no parameter."""
    model, x = Net().eval(), torch.randn(7, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with parallel(model, THREE) as p:
        for _ in range(3):
            model(x).sum().backward()
            optimizer.step()
        assert (p.stats().refreshes, p.stats().copied_bytes) == (0, 0)
        CHANGES["edited buffer"](model)
        CHANGES["item of a dict"](model)
        model(x)
    assert len({id(module) for module in model.ran}) == 3
    assert all(module is not model for module in model.ran)


def test_refresh_copies_again():
    """It is for changes that cannot be seen."""
    model, x = nn.BatchNorm1d(4).eval(), torch.randn(7, 4)
    with parallel(model, THREE) as p:
        model(x)
        model.running_mean.data.add_(1)
        p.refresh()
        assert_close(model(x), nn.functional.batch_norm(x, model.running_mean, model.running_var, model.weight, model.bias))
