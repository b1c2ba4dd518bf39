"""Replicas last as long as the block and follow every change of the model without being rebuilt."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import parallel
from parawrap.backends import backend_of
from tests.helpers.waiting import PATIENCE_S

TWO = ["cpu"] * 2
THREE = ["cpu"] * 3


class Net(nn.Module):
    """Records the modules that run, and has one of each thing that tests change."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.dropout = nn.Dropout(1.0)
        self.tail = nn.Sequential(nn.Tanh())
        self.register_buffer("shift", torch.arange(4.0))
        self.register_buffer("matrix", torch.eye(4))
        self.scale = 2.0
        self.table = torch.ones(4)
        self.options = {"factor": 1.0, "steps": [1.0]}
        type(self).ran = []  # on the class, because a replica has its own attributes

    def forward(self, x):
        self.ran.append(self)
        y = self.dropout(self.linear(x)) @ self.matrix * self.scale + self.shift
        return self.tail(y * self.options["factor"] + self.options["steps"][-1]) * self.table


class Double(nn.Module):
    def forward(self, weight):
        return weight * 2


@torch.no_grad()
def edit_weight(model):
    model.linear.weight.mul_(3)


def random_state(model):
    return {name: torch.rand_like(value) for name, value in model.state_dict().items()}


def more_layers(model):
    model.tail.append(nn.Linear(4, 2))
    model.table = torch.ones(1)


CHANGES = {
    "new weight": lambda model: setattr(model.linear, "weight", nn.Parameter(torch.ones(4, 4))),
    "edited weight": edit_weight,
    "new data": lambda model: setattr(model.linear.weight, "data", torch.ones(4, 4)),
    "edited data": lambda model: model.linear.weight.data.mul_(3),
    "load": lambda model: model.load_state_dict(random_state(model)),
    "load assigned": lambda model: model.load_state_dict(random_state(model), assign=True),
    "edited buffer": lambda model: model.shift.add_(1),
    "edited item": lambda model: model.matrix[0].fill_(5),
    "new buffer": lambda model: setattr(model, "shift", torch.full((4,), 7.0)),
    "resized buffer": lambda model: setattr(model, "shift", torch.ones(1)),
    "no bias": lambda model: setattr(model.linear, "bias", None),
    "attribute": lambda model: setattr(model, "scale", -1.0),
    "item of a dict": lambda model: model.options.update(factor=3.0),
    "item of a list": lambda model: model.options["steps"].append(4.0),
    "new tensor": lambda model: setattr(model, "table", torch.full((4,), 2.0)),
    "edited tensor": lambda model: model.table.mul_(3),
    "submodule": lambda model: setattr(model, "linear", nn.Linear(4, 4, bias=False)),
    "more layers": more_layers,
    "fewer layers": lambda model: model.tail.pop(0),
    "patch": lambda model: setattr(model.linear, "forward", lambda x: x * model.linear.weight.sum()),
    "hook": lambda model: model.linear.register_forward_hook(lambda module, args, out: out + 100),
    "parametrization": lambda model: nn.utils.parametrize.register_parametrization(model.linear, "weight", Double()),
    "class": lambda model: setattr(model.tail[0], "__class__", nn.Sigmoid),
    "float64": lambda model: model.double(),
    "frozen": lambda model: model.linear.requires_grad_(requires_grad=False),
    "mode": lambda model: model.train(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.filterwarnings("ignore:a model in eval mode is called with gradients:UserWarning")
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
        assert p.stats().shards == (3, 2, 2)
        whole = [p.submit(x).result(PATIENCE_S), *p.map([x] * 3)]
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    plain = model(x)
    if plain.requires_grad:
        plain.sum().backward()
    assert_close([inside, *whole], [plain] * 5)
    assert_close(gradients, [parameter.grad for parameter in model.parameters()])


def test_training_copies_nothing():
    """Lanes on the model's device share its parameters."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with parallel(model, THREE) as p:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(7, 4)).square().mean().backward()
            optimizer.step()
        assert (p.stats().refreshes, p.stats().copied_bytes) == (0, 0)


def test_changed_buffers_are_copied_once():
    model, x = nn.BatchNorm1d(4).eval(), torch.randn(7, 4)
    with torch.no_grad(), parallel(model, THREE) as p:
        for refreshes in (0, 1, 2):
            for _ in range(3):
                model(x)
            assert p.stats().refreshes == refreshes
            model.running_mean.add_(1)


def test_replicas_are_made_once():
    """Every lane runs the same object in every call, also if the model changes. It is never the model."""
    model, x = Net().eval(), torch.randn(7, 4)
    with torch.no_grad(), parallel(model, THREE):
        for change in ("edited weight", "edited buffer", "attribute", "item of a dict"):
            model(x)
            CHANGES[change](model)
        model(x)
    assert len({id(module) for module in model.ran}) == 3
    assert all(module is not model for module in model.ran)


@pytest.mark.filterwarnings("ignore:a model in eval mode is called with gradients:UserWarning")
def test_refresh_copies_again():
    """It is for changes that cannot be seen, and may be called at any time."""
    model, x = nn.BatchNorm1d(4).eval(), torch.randn(7, 4)
    with parallel(model, THREE) as p:
        model(x)
        model.running_mean.data.add_(1)
        p.refresh()
        assert_close(model(x), nn.functional.batch_norm(x, model.running_mean, model.running_var, model.weight, model.bias))


def test_attributes_of_scripted_modules():
    """Lanes follow attributes and parameters that are replaced or written in place."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = 2.0
            self.weight = nn.Parameter(torch.ones(2, 2))

        def forward(self, x):
            return x @ self.weight * self.scale

    model, x = torch.jit.script(Scaled()), torch.ones(7, 2)
    with parallel(model, THREE):
        model(x)
        model.scale = 5.0
        assert model(x).unique().tolist() == [10.0]
        model.weight = nn.Parameter(torch.zeros(2, 2))
        assert model(x).unique().tolist() == [0.0]
        with torch.no_grad():
            model.weight.fill_(1)
        assert model(x).unique().tolist() == [10.0]


@pytest.mark.parametrize(("rows", "sizes"), [(8, (4, 4)), (5, (3, 2)), (4, (2, 2)), (2, (1, 1))])
def test_equal_shards_where_sizes_compile(rows, sizes, monkeypatch):
    """If each shard size costs a compilation, all shards but the last are equal, and outputs have their rows on `dim`."""
    monkeypatch.setattr(type(backend_of("cpu")), "compiles_each_shape", True)
    model, x = nn.Linear(3, 2), torch.randn(rows, 3)
    with parallel(model, TWO) as p:
        assert_close(model(x), nn.functional.linear(x, model.weight, model.bias))
        assert p.stats().shards == sizes
