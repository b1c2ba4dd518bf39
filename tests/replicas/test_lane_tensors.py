"""The tensors of a lane: a forward that writes parameters is refused, because every lane would write the model once."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import DataParallel, ReplicaError, parallel

TWO = ["cpu"] * 2
X = torch.randn(5, 4)


class Changing(nn.Linear):
    """A layer that changes itself in each call, with a frozen parameter, and a tensor that learns without being one."""

    def __init__(self, change):
        super().__init__(4, 4)
        self.change = change
        self.calls = nn.Parameter(torch.zeros(()), requires_grad=False)
        self.layer = nn.Linear(4, 4)
        self.scale = torch.ones(4, requires_grad=True)
        self.embed = nn.Embedding(9, 4, max_norm=0.1)

    def forward(self, x):
        self.change(self)
        return super().forward(x)


def momentum(model):
    """Move the layer towards the model, as momentum encoders do."""
    with torch.no_grad():
        model.layer.weight.mul_(0.9).add_(model.weight, alpha=0.1)


def counts(model):
    model.calls += 1


def with_data(change):
    """Return a change of the memory of the weight."""
    return lambda model: setattr(model.weight, "data", change(model.weight.detach()))


WRITERS = {
    "momentum": (momentum, "layer.weight"),
    "learned": (lambda model: model.scale.data.mul_(2), "scale"),
    "rescaled": (lambda model: model.embed(torch.arange(9)), "embed.weight"),
    "counter": (counts, "calls"),
    "thawed": (lambda model: model.calls.requires_grad_(), "calls"),
    "transposed": (with_data(torch.Tensor.t), "weight"),
    "fewer rows": (with_data(lambda weight: weight[:3]), "weight"),
    "other memory": (with_data(torch.Tensor.clone), "weight"),
}


@pytest.mark.parametrize(("change", "name"), WRITERS.values(), ids=WRITERS)
def test_writes_of_parameters_are_refused(change, name):
    """At each call, of blocks and of `DataParallel`."""
    refused, net = f"the parameter '{name}' was written during a call", DataParallel(Changing(change), TWO)
    with torch.no_grad(), parallel(Changing(change), TWO) as p:
        for call in (p, p, lambda x: p.submit(x).result(), lambda x: list(p.map([x])), net):
            with pytest.raises(ReplicaError, match=refused):
                call(X)
    net.close()


def test_workers_refuse_writes():
    """A worker would write its own copy."""
    with torch.no_grad(), parallel(Changing(counts), TWO, workers="process") as p:
        for call in (lambda: p(X), lambda: p.submit(X).result(), lambda: list(p.map([X]))):
            with pytest.raises(ReplicaError, match="the parameter 'calls' was written during a call"):
                call()


@pytest.mark.parametrize("name", ["weight", "layer"])
def test_replaced_parameters_are_refused(name):
    """The model would not train them."""
    made = {"weight": lambda: nn.Parameter(torch.ones(4, 4)), "layer": lambda: nn.Linear(4, 4)}[name]
    with parallel(Changing(lambda model: setattr(model, name, made())), TWO) as p, pytest.raises(ReplicaError, match=name):
        p(X)


def test_one_row_may_write():
    """A call that is not cut writes once. As a buffer, which the error names as the cure, a counter is written once."""
    model = Changing(counts)
    with torch.no_grad(), parallel(model, TWO):
        model(X[:1])
    assert model.calls == 1
    del model.calls
    model.register_buffer("calls", torch.zeros(()))
    with torch.no_grad(), parallel(model, TWO):
        for _ in range(3):
            model(X)
    assert model.calls == 3


@pytest.mark.parametrize("fails", [False, True])
def test_calls_after_a_refused_one_are_right(fails):
    """Also after a call that moved a parameter and then failed."""
    moves = [True]

    def change(model):
        if moves:
            model.weight.data = model.weight.data * 2
            model.bias.requires_grad_(False)
            if fails:
                raise KeyError("mine")

    model = Changing(change)
    with torch.no_grad(), parallel(model, TWO) as p:
        with pytest.raises(ReplicaError):
            p(X)
        moves.clear()
        for output in (p(X), p.submit(X).result()):
            assert_close(output, nn.functional.linear(X, model.weight, model.bias))
        assert model.bias.requires_grad


class Scaled(nn.Parameter):
    """A parameter with a method and an attribute."""

    def scaled(self):
        return self * self.factor


class Looking(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.plain = Scaled(torch.rand(4)), nn.Parameter(torch.rand(4))
        self.weight.factor = 3.0
        self.register_buffer("shift", torch.rand(4))
        self.shift.factor = 2.0

    def forward(self, x):
        for each in (self.weight, self.plain):
            twins = [copy.deepcopy(each), copy.deepcopy(self).plain]
            assert isinstance(each, nn.Parameter)
            assert all(isinstance(twin, nn.Parameter) and twin.is_leaf and twin.requires_grad for twin in twins)
        assert type(pickle.loads(pickle.dumps(self.plain))) is nn.Parameter
        assert type(self.plain.data) is torch.Tensor
        return x * self.weight.scaled() + self.shift * self.shift.factor + self.plain


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_views_are_parameters():
    """In lanes, parameters keep their subclass and attributes; their deep copies and pickles are parameters."""
    model = Looking()
    with parallel(model, TWO):
        output = model(X)
        output.sum().backward()
    assert_close(output, X * model.weight * 3 + model.shift * 2 + model.plain)
    assert_close(model.weight.grad, X.sum(0) * 3)
