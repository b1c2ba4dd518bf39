"""Calls in a block have the plain outputs and gradients, in row order, for any number of rows and lanes."""

from __future__ import annotations

import threading
import warnings
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations
from torch.testing import assert_close

from parawrap import parallel
from parawrap.tree import flatten
from tests.helpers.same import assert_same

pytestmark = [
    pytest.mark.filterwarnings("ignore:a call of .* rows on .* lanes:UserWarning"),  # of small batches
    pytest.mark.filterwarnings("ignore:a model in eval mode is called with gradients:UserWarning"),
]
THREE = ["cpu"] * 3
Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Output:
    logits: torch.Tensor
    hidden: list[torch.Tensor]
    name: str


class First(nn.Module):
    """Returns the first output of a module."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x, x, x)[0] if isinstance(self.module, nn.MultiheadAttention) else self.module(x)[0]


class Held(nn.Module):
    """Holds tied weights, parameters in containers, a lock, which cannot be copied, and tensors that are no buffers."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()
        self.encode, self.decode = nn.Linear(4, 4), nn.Linear(4, 4)
        self.decode.weight = self.encode.weight
        self.layers = nn.ModuleDict({"again": self.encode})
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(4)) for _ in range(3)])
        self.table = nn.ParameterDict({"a": nn.Parameter(torch.randn(4))})
        self.several = {"a": [torch.randn(4), 3]}
        self.register_buffer("hidden", torch.randn(4), persistent=False)
        self.register_buffer("none", None)

    def forward(self, x):
        with self.lock:
            x = self.layers["again"](self.decode(torch.tanh(self.encode(x))))
        for weight in self.weights:
            x = x * weight
        return x * self.several["a"][0] * self.several["a"][1] + self.table["a"] * self.hidden


class Structured(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return {"y": y, "nested": {"x": [x, (y, None)]}, "pair": Pair(y, (x, "text")), "output": Output(y, [x, y], "a")}


def old_norm():
    """A layer whose forward pre-hook computes the weight. Random vectors may give a norm near 0, hence 15 iterations."""
    with warnings.catch_warnings(action="ignore"):
        model = nn.utils.spectral_norm(nn.Linear(4, 4), n_power_iterations=15)
    model(torch.zeros(1, 4))
    return model.eval()


FLAT = {
    "mlp": lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3)),
    "weight_norm": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), nn.ReLU(inplace=True)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(4, 4)).eval(),
    "old norm": old_norm,
    "batch norm": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval(),
    "held": Held,
    "structured": lambda: Structured(4, 3),
}
SEQUENCES = {
    "lstm": lambda: First(nn.LSTM(4, 3, 2, batch_first=True, bidirectional=True)),
    "attention": lambda: First(nn.MultiheadAttention(4, 2, batch_first=True)).eval(),
    "encoder in training": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
}
MODELS = {**FLAT, **SEQUENCES}


def outcome_of(model, x, *, grad):
    """Return the output of a call, and the gradients of two backward passes of such calls."""
    model.zero_grad()
    x = x.clone().requires_grad_(grad)
    for _ in range(2):
        output = model(x)
        losses = [
            leaf.square().sum() for leaf in flatten(output)[0] if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        if losses:
            sum(losses).backward()
    return output, [parameter.grad for parameter in model.parameters()], x.grad


def assert_plain_outcome(model, x, lanes, *, grad):
    """Compare a block with plain calls. Rows are in shards of different sizes; batches that allow none run plainly."""
    rows = len(x)
    with torch.set_grad_enabled(grad):
        plain = outcome_of(model, x, grad=grad)
        with parallel(model, ["cpu"] * lanes) as p:
            assert_same(outcome_of(model, x, grad=grad), plain)
    shards = p.stats().shards
    assert sum(shards) == (0 if lanes == 1 or rows <= 2 or (rows, lanes) == (4, 2) else rows)


@pytest.mark.parametrize("name", MODELS)
def test_models_of_every_kind(name):
    model = MODELS[name]().double()
    for rows, lanes, grad in ((7, 3, True), (9, 2, False)):
        x = torch.randn((rows, 5, 4) if name in SEQUENCES else (rows, 4), dtype=torch.float64)
        assert_plain_outcome(model, x, lanes, grad=grad)


@given(rows=st.integers(0, 40), lanes=st.integers(1, 6), grad=st.booleans())
@settings(max_examples=40, deadline=None)
def test_any_number_of_rows_and_lanes(rows, lanes, grad):
    assert_plain_outcome(nn.Linear(4, 2).double(), torch.randn(rows, 4, dtype=torch.float64), lanes, grad=grad)


@pytest.mark.parametrize("dim", [1, -1])
def test_rows_may_lie_on_any_dim(dim):
    shape = [2, 3, 4]
    shape[dim] = 7
    x = torch.randn(shape)
    with parallel(torch.tanh, THREE, dim=dim) as p:
        assert_close(p(x), torch.tanh(x))


def test_lazy_modules_run_plainly_first():
    model, x = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d(), nn.ReLU()).eval(), torch.randn(7, 5)
    with torch.no_grad(), parallel(model, THREE) as p:
        first = model(x)
        assert p.stats().plain == 1
        assert_close(model(x), first)
        assert p.stats().shards == (3, 2, 2)
    assert type(model[0]) is nn.Linear


def test_spectral_norm_in_training():
    """Each lane starts its power iteration from the same vectors, so outputs equal the plain ones over several steps."""
    model, plain = (parametrizations.spectral_norm(nn.Linear(4, 4)) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    with parallel(model, THREE):
        for _ in range(4):
            x = torch.randn(7, 4)
            assert_close(model(x), plain(x))
    assert_close(dict(model.state_dict()), dict(plain.state_dict()))


@pytest.mark.parametrize("args", [(torch.zeros(0, 2),), (torch.ones(1, 2),), (torch.ones(2, 2),), (1, "a", None), ()])
def test_calls_that_run_plainly(args):
    """A call of few rows or without tensors runs once in the caller, and returns what cannot be joined."""
    seen = []

    def target(*args):
        seen.append(threading.get_ident())
        return args, len(args)

    with parallel(target, ["cpu"] * 4) as p:
        assert_same(p(*args), (args, len(args)))
        assert (p.stats().calls, p.stats().plain, p.stats().shards) == (1, 1, ())
    assert seen == [threading.get_ident()]


class AddsInPlace(nn.Module):
    """Adds a parameter to its input in place, as is common for position embeddings."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x):
        x += self.bias
        return x * 2


def test_a_target_may_write_its_rows():
    """The caller's tensor changes as in a plain call, and gradients are the plain ones."""
    model, x = AddsInPlace(), torch.randn(7, 4)
    with parallel(model, THREE):
        written = x.clone()
        y = model(written)
        assert_close((written, y), (x + model.bias, 2 * (x + model.bias)))
        y.sum().backward()
        assert_close(model.bias.grad, torch.full((4,), 14.0))


def test_one_tensor_in_two_arguments():
    """In each lane it is one object, so a target that compares its arguments by identity has the plain output."""
    x = torch.ones(9, 2)
    with parallel(lambda x, memory: x * 2 if memory is x else x * 3, THREE) as p:
        assert_close(p(x, x), x * 2)
        assert_close(p(x, x.clone()), x * 3)
