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
    return lambda model: setattr(model.weight, "data", change(model.weight.detach()))


WRITERS = {
    "momentum": (momentum, "layer.weight"),
    "learned": (lambda model: model.scale.data.mul_(2), "scale"),
    "rescaled": (lambda model: model.embed(torch.arange(9)), "embed.weight"),
    "counter": (counts, "calls"),
    "thawed": (lambda model: model.calls.requires_grad_(), "calls"),
    "transposed": (with_data(torch.Tensor.t), "weight"),
    "other memory": (with_data(torch.Tensor.clone), "weight"),
}


@pytest.mark.parametrize(("change", "name"), WRITERS.values(), ids=WRITERS)
def test_writes_of_parameters(change, name):
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


def test_one_row_may_write():
    """A call that is not cut writes once. As a buffer, which the error names as the cure, a counter is written once."""
    model = Changing(counts)
    with torch.no_grad(), parallel(model, TWO):
        model(X[:1])
        assert model.calls == 1
    del model.calls
    model.register_buffer("calls", torch.zeros(()))
    with torch.no_grad(), parallel(model, TWO):
        for _ in range(2):
            model(X)
    assert model.calls == 2


@pytest.mark.parametrize("fails", [False, True])
def test_calls_after_a_refused_one(fails):
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


class Image(torch.Tensor):
    """A subclass that a parameter may have."""


class Scaled(nn.Parameter):
    """A parameter with a method and an attribute."""

    def scaled(self):
        return self * self.factor


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_views_are_parameters():
    """In lanes, parameters keep their subclass and attributes; their deep copies and pickles are parameters."""
    factors = []

    def look(lane):
        twins = [*map(copy.deepcopy, (lane.weight, lane.bias, lane.layer.bias)), copy.deepcopy(lane).bias]
        assert all(isinstance(each, nn.Parameter) for each in (lane.weight, lane.bias, lane.layer.bias, *twins))
        assert all(twin.is_leaf and twin.requires_grad for twin in twins)
        assert type(twins[2]) is Image
        assert type(pickle.loads(pickle.dumps(lane.bias))) is nn.Parameter
        assert type(lane.bias.data) is torch.Tensor
        factors.append((lane.weight.scaled() / lane.weight).mean().item() + lane.shift.factor)

    model = Changing(look)
    del model.scale
    model.weight, model.layer.bias = Scaled(torch.rand(4, 4) + 1), nn.Parameter(torch.rand(4).as_subclass(Image))
    model.register_buffer("shift", torch.rand(4))
    model.weight.factor, model.shift.factor = 3.0, 2.0
    with parallel(model, TWO):
        model(X).sum().backward()
    assert factors == pytest.approx([5.0, 5.0])
    assert_close(model.weight.grad, X.sum(0).expand(4, 4))


class Flat(nn.Module):
    """Buffers that lie in one memory, which forward reads through the first."""

    def __init__(self):
        super().__init__()
        scale, shift = torch.rand(8).split(4)
        self.register_buffer("scale", scale)
        self.register_buffer("shift", shift)

    def forward(self, x):
        return x * self.scale.as_strided((8,), (1,)).sum() + self.shift


def test_shared_memory_stays_shared():
    model = Flat()
    want = model(X)
    with torch.no_grad(), parallel(model, TWO):
        assert_close(model(X), want)
