"""A forward that writes parameters is refused, because every lane would write the model's memory once."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import DataParallel, ReplicaError, parallel

TWO = ["cpu"] * 2


class Momentum(nn.Module):
    """A momentum encoder: each call moves the keys towards the queries."""

    def __init__(self):
        super().__init__()
        self.queries, self.keys = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)

    @torch.no_grad()
    def move_keys(self):
        for query, key in zip(self.queries.parameters(), self.keys.parameters(), strict=True):
            key.mul_(0.9).add_(query, alpha=0.1)

    def forward(self, x):
        self.move_keys()
        return self.queries(x) + self.keys(x)


class MomentumOfData(Momentum):
    def move_keys(self):
        for query, key in zip(self.queries.parameters(), self.keys.parameters(), strict=True):
            key.data = key.data * 0.9 + query.data * 0.1


class ActNorm(nn.Module):
    """An activation norm: the first call sets scale and bias from its batch."""

    def __init__(self):
        super().__init__()
        self.scale, self.bias = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))
        self.is_set = False

    def forward(self, x):
        if not self.is_set:
            self.bias.data.copy_(-x.detach().mean(0))
            self.scale.data.copy_(1 / x.detach().std(0))
            self.is_set = True
        return (x + self.bias) * self.scale


class Masked(nn.Linear):
    """A masked layer of an autoregressive model: each call masks the weight in place."""

    def __init__(self):
        super().__init__(4, 4)

    def forward(self, x):
        self.weight.data *= torch.ones(4, 4).tril()
        return super().forward(x)


class Counter(nn.Linear):
    """A layer that counts its calls in a frozen parameter."""

    def __init__(self):
        super().__init__(4, 4)
        self.calls = nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class Thawed(Counter):
    def forward(self, x):
        self.calls.requires_grad_()
        return nn.Linear.forward(self, x)


class Learned(nn.Module):
    """A tensor that learns without being a parameter."""

    def __init__(self):
        super().__init__()
        self.scale = torch.ones(4, requires_grad=True)

    def forward(self, x):
        self.scale.data.mul_(2)
        return x * self.scale


class Rescaled(nn.Module):
    """An embedding that rescales the rows of its weight in place."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 4, max_norm=0.1)

    def forward(self, x):
        return self.embed(x.argmax(1))


class Swapped(nn.Linear):
    """A layer with binary weights: it swaps the memory of its weight, and puts it back."""

    def __init__(self):
        super().__init__(4, 4)

    def forward(self, x):
        kept = self.weight.data
        self.weight.data = kept.sign()
        y = super().forward(x)
        self.weight.data = kept
        return y


WRITERS = pytest.mark.parametrize(
    ("make", "name"),
    [
        (Momentum, "keys.weight"),
        (MomentumOfData, "keys.weight"),
        (ActNorm, "scale"),
        (Masked, "weight"),
        (Counter, "calls"),
        (Thawed, "calls"),
        (Learned, "scale"),
        (Rescaled, "embed.weight"),
    ],
)
CALLS = pytest.mark.parametrize(
    "call",
    [
        lambda p, x: p(x),
        lambda p, x: p.submit(x).result(),
        lambda p, x: list(p.map([x])),
    ],
    ids=["call", "submit", "map"],
)


@WRITERS
@CALLS
def test_blocks_refuse_writes(make, name, call):
    """The first call and the second one are refused."""
    with torch.no_grad(), parallel(make(), TWO) as p:
        for _ in range(2):
            with pytest.raises(ReplicaError, match=f"the parameter '{name}' was written during a call"):
                call(p, torch.randn(5, 4))


@WRITERS
def test_data_parallel_refuses_writes(make, name):
    """`DataParallel` has the same rule, with gradients too."""
    net = DataParallel(make(), TWO)
    with pytest.raises(ReplicaError, match=f"the parameter '{name}' was written during a call"):
        net(torch.randn(5, 4))
    net.close()


@CALLS
def test_workers_refuse_writes(call):
    """A worker would write its own copy."""
    refused = pytest.raises(ReplicaError, match="the parameter 'weight' was written during a call")
    with torch.no_grad(), parallel(Masked(), TWO, workers="process") as p, refused:
        call(p, torch.randn(5, 4))


def test_one_row_may_write():
    """A call that is not cut runs as plainly, and writes once."""
    model = Counter()
    with torch.no_grad(), parallel(model, TWO):
        model(torch.randn(1, 4))
    assert model.calls == 1


def test_buffers_may_be_written():
    """The cure that the message names: as a buffer, the counter is written once."""
    model = Counter()
    del model.calls
    model.register_buffer("calls", torch.zeros(()))
    with torch.no_grad(), parallel(model, TWO):
        for _ in range(3):
            model(torch.randn(5, 4))
    assert model.calls == 3


def test_swapped_memory_is_right():
    """A forward that puts back the memory of a parameter leaves it unwritten."""
    model, x = Swapped(), torch.randn(5, 4)
    want = model(x)
    with parallel(model, TWO):
        assert_close(model(x), want)
        model(x).sum().backward()
    assert model.weight.grad is not None


def test_views_are_parameters():
    """In a lane, a parameter is an nn.Parameter; its deep copy and its pickle are parameters of their own."""
    seen = []

    class Looking(nn.Linear):
        def forward(self, x):
            weight = self.weight
            copied, pickled = copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))
            seen.append((isinstance(weight, nn.Parameter), type(weight.data), type(copied), type(pickled)))
            return super().forward(x)

    with torch.no_grad(), parallel(Looking(4, 4), TWO) as p:
        p(torch.randn(5, 4))
    assert seen == [(True, torch.Tensor, nn.Parameter, nn.Parameter)] * 2


class Moved(nn.Linear):
    """A layer that may give its weight other memory, and then fail."""

    moves, fails = True, False

    def __init__(self):
        super().__init__(4, 4)

    def forward(self, x):
        if Moved.moves:
            self.weight.data = self.weight.data * 2
        if Moved.fails:
            raise KeyError("mine")
        return super().forward(x)


@pytest.mark.parametrize("fails", [False, True])
def test_later_calls_are_right(fails, monkeypatch):
    """After a call that moved a parameter, the next call has the model's parameter."""
    model, x = Moved(), torch.randn(5, 4)
    monkeypatch.setattr(Moved, "fails", fails)
    with torch.no_grad(), parallel(model, TWO) as p:
        with pytest.raises((ReplicaError, KeyError)):
            model(x)
        monkeypatch.setattr(Moved, "moves", False)
        monkeypatch.setattr(Moved, "fails", False)
        for output in (model(x), p.submit(x).result()):
            assert_close(output, nn.functional.linear(x, model.weight, model.bias))


@pytest.mark.parametrize("view", [lambda weight: weight.t(), lambda weight: weight[:3], lambda weight: weight.clone()])
def test_other_shapes_of_memory_are_refused(view):
    """Another address, shape, or stride counts as a write."""

    class Native(nn.Linear):
        def forward(self, x):
            self.weight.data = view(self.weight.detach())
            return x

    refused = pytest.raises(ReplicaError, match="the parameter 'weight' was written during a call")
    with torch.no_grad(), parallel(Native(4, 4), TWO) as p, refused:
        p(torch.randn(5, 4))
