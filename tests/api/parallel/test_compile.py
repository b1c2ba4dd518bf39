"""torch.compile on, in, and around a parallel model; TorchScript modules."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import parallel

THREE = ["cpu"] * 3


@pytest.fixture(scope="module", autouse=True)
def _compiler_reset():
    """Reset the compiler, and ignore a warning: after a graph break, the compiler reads `.grad` of a non-leaf tensor."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")


def gradients(model, x):
    model.zero_grad()
    model(x).sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def compiled():
    return torch.compile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), backend="eager")


def self_compiled():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model.compile(backend="eager")
    return model


MAKERS = {
    "compiled": compiled,
    "compile()": self_compiled,
    "compiled inside": lambda: nn.Sequential(nn.Linear(4, 4), compiled()),
    "scripted": lambda: torch.jit.script(nn.Linear(4, 3)),
    "traced": lambda: torch.jit.trace(nn.Linear(4, 3), torch.zeros(2, 4)),
    "scripted inside": lambda: nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 3))),
}


@pytest.mark.parametrize("name", MAKERS)
def test_compiled_models_are_parallel(name):
    """Outputs and gradients are the plain ones, and the `vars` hold the same objects after the block."""
    model, x = MAKERS[name](), torch.randn(7, 4)
    before = set(vars(model))
    with parallel(model, THREE):
        pass
    assert set(vars(model)) == before
    plain, plain_gradients = model(x), gradients(model, x)
    before = {key: id(value) for key, value in vars(model).items()}
    with parallel(model, THREE) as p:
        assert_close(model(x), plain)
        assert p.stats().shards == (3, 2, 2)
        assert_close(gradients(model, x), plain_gradients)
    assert {key: id(value) for key, value in vars(model).items()} == before
    assert_close(model(x), plain)


def test_changes_inside_a_compiled_module():
    inner = nn.Sequential(nn.Linear(4, 4), nn.Identity())
    model, x = torch.compile(inner, backend="eager"), torch.randn(7, 4)
    with parallel(model, THREE):
        model(x)
        with torch.no_grad():
            inner[0].weight.zero_()
            inner[0].bias.fill_(3)
        assert_close(model(x), torch.full((7, 4), 3.0))
        inner[1] = nn.Threshold(10, 8)
        assert_close(model(x), torch.full((7, 4), 8.0))


@pytest.mark.parametrize("freeze", [torch.jit.freeze, torch.jit.optimize_for_inference], ids=["freeze", "optimize"])
def test_frozen_scripts(freeze):
    """They have no train mode and no parameters."""
    with warnings.catch_warnings(action="ignore"):
        model = freeze(torch.jit.script(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))).eval())
    x = torch.randn(7, 4)
    with torch.no_grad():
        plain = model(x)
        with parallel(model, THREE) as p:
            for _ in range(3):
                assert_close(model(x), plain)
            assert p.stats().shards == (3, 2, 2)
            assert all(torch.equal(output, plain) for output in p.map([x, x]))


def test_a_compiled_function_around_the_model():
    """It has the plain output before, inside, and after the block; inside, the call breaks the graph."""
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), torch.randn(7, 4)
    plain = torch.tanh(model(x)) * 2
    function = torch.compile(lambda x: torch.tanh(model(x)) * 2, backend="eager")
    assert_close(function(x), plain)
    with parallel(model, THREE) as p:
        for calls in (1, 2):
            assert_close(function(x), plain)
            assert (p.stats().calls, p.stats().plain) == (calls, 0)
        model.zero_grad()
        function(x).sum().backward()
    inside = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    function(x).sum().backward()
    assert_close(inside, [parameter.grad for parameter in model.parameters()])
    assert_close(function(x), plain)


def test_a_function_compiled_inside_the_block():
    model, x = nn.Linear(4, 3), torch.randn(7, 4)
    function = torch.compile(lambda x: model(x) + 1, backend="eager")
    full = torch.compile(lambda x: model(x) + 2, backend="eager", fullgraph=True)
    with parallel(model, THREE) as p:
        assert_close(function(x), nn.functional.linear(x, model.weight, model.bias) + 1)
        assert (p.stats().calls, p.stats().plain) == (1, 0)
        with pytest.raises(torch._dynamo.exc.Unsupported):
            full(x)
    assert_close(function(x), model(x) + 1)
    assert_close(full(x), model(x) + 2)
