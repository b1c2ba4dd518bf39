"""Calls in a block have the plain outputs and gradients, in row order, for any number of rows and
lanes.
"""

from __future__ import annotations

import copy
import threading
from collections import namedtuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations
from torch.testing import assert_close

from parawrap import parallel
from parawrap.backends import ignore_speed_warnings
from parawrap.tree import flatten
from tests.helpers.calling import mlp
from tests.helpers.same import assert_same

pytestmark = [
    # Of small batches
    pytest.mark.filterwarnings("ignore:a call of .* rows on .* lanes:UserWarning"),
    pytest.mark.filterwarnings("ignore:a model in eval mode is called with gradients:UserWarning"),
]
THREE = ["cpu"] * 3
Pair = namedtuple("Pair", ["left", "right"])


class Held(nn.Module):
    """Holds tied weights, parameters in containers, a lock, which cannot be copied, and a tensor
    that is not a buffer.
    """

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()
        self.encode, self.decode = nn.Linear(4, 4), nn.Linear(4, 4)
        self.decode.weight = self.encode.weight
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(4)) for _ in range(3)])
        self.several = {"a": [torch.randn(4), 3]}
        self.register_buffer("hidden", torch.randn(4), persistent=False)

    def forward(self, x):
        with self.lock:
            x = self.decode(torch.tanh(self.encode(x)))
        for weight in self.weights:
            x = x * weight
        return x * self.several["a"][0] * self.several["a"][1] + self.hidden


class Structured(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return {"y": y, "nested": {"x": [x, (y, None)]}, "pair": Pair(y, (x, "text"))}


MODELS = {
    "mlp": mlp,
    "weight_norm": lambda: nn.Sequential(
        parametrizations.weight_norm(nn.Linear(4, 4)), nn.ReLU(inplace=True)
    ),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(4, 4)).eval(),
    "batch norm": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval(),
    "held": Held,
    "structured": lambda: Structured(4, 3),
    "encoder": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
}


def outcome_of(model, x, *, grad):
    """Return the output of a call, and the gradients of two backward passes of such calls."""
    model.zero_grad()
    x = x.clone().requires_grad_(grad)
    for _ in range(2):
        output = model(x)
        losses = [
            leaf.square().sum()
            for leaf in flatten(output)[0]
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        if losses:
            sum(losses).backward()
    return output, [parameter.grad for parameter in model.parameters()], x.grad


def assert_plain_outcome(model, x, lanes, *, grad):
    """Compare a block with plain calls.

    Rows are in shards of different sizes; batches that allow none run plainly.
    """
    rows = len(x)
    with torch.set_grad_enabled(grad):
        plain = outcome_of(model, x, grad=grad)
        with ignore_speed_warnings(), parallel(model, ["cpu"] * lanes) as p:
            assert_same(outcome_of(model, x, grad=grad), plain)
    shards = p.stats().shards
    runs_whole = lanes == 1 or rows <= 4  # no sizes differ without one row beside two
    assert sum(shards) == (0 if runs_whole else rows)


@pytest.mark.parametrize("name", MODELS)
def test_models_of_every_kind(name):
    model = MODELS[name]().double()
    for rows, lanes, grad in ((7, 3, True), (9, 2, False)):
        x = torch.randn((rows, 5, 4) if name == "encoder" else (rows, 4), dtype=torch.float64)
        assert_plain_outcome(model, x, lanes, grad=grad)


@given(rows=st.integers(0, 40), lanes=st.integers(1, 6), grad=st.booleans())
@settings(max_examples=40, deadline=None)
def test_any_number_of_rows_and_lanes(rows, lanes, grad):
    assert_plain_outcome(
        nn.Linear(4, 2).double(), torch.randn(rows, 4, dtype=torch.float64), lanes, grad=grad
    )


def test_lazy_modules_run_plainly_first():
    model, x = (
        nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d(), nn.ReLU()).eval(),
        torch.randn(7, 5),
    )
    with torch.no_grad(), parallel(model, THREE) as p:
        first = model(x)
        assert p.stats().plain == 1
        assert_close(model(x), first)
        assert p.stats().shards == (3, 2, 2)
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize(
    "args", [(torch.zeros(0, 2),), (torch.ones(1, 2),), (torch.ones(2, 2),), (1, "a", None), ()]
)
def test_calls_that_run_plainly(args):
    """A call of few rows or without tensors runs once in the caller, and returns what cannot be
    joined.
    """
    seen = []

    def target(*args):
        seen.append(threading.get_ident())
        return args, len(args)

    with parallel(target, ["cpu"] * 4) as p:
        assert_same(p(*args), (args, len(args)))
        assert (p.stats().calls, p.stats().plain, p.stats().shards) == (1, 1, ())
    assert seen == [threading.get_ident()]


def test_double_backward():
    """A gradient penalty runs backward through a gradient."""
    model, x = mlp().double(), torch.randn(7, 4, dtype=torch.float64, requires_grad=True)

    def gradients():
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(
            (grad.norm(dim=1) - 1).square().mean(), [model[0].weight, model[2].weight]
        )

    plain = gradients()
    with parallel(model, THREE):
        assert_close(gradients(), plain)


def test_training_equals_plain_training():
    """A hook on a parameter runs once per step and gets the sum of the lanes' gradients."""
    plain, seen = mlp(), []
    model = copy.deepcopy(plain)
    batches = [(torch.randn(11, 4), torch.randn(11, 3)) for _ in range(20)]

    def train(net):
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        for x, y in batches:
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()

    train(plain)
    model[0].weight.register_hook(lambda grad: seen.append(grad.clone()))
    with parallel(model, THREE):
        train(model)
    assert len(seen) == 20
    assert_close(model[0].weight.grad, seen[-1])
    assert_close(dict(model.state_dict()), dict(plain.state_dict()), atol=1e-5, rtol=1e-4)
