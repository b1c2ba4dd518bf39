"""torch.compile on, in, and around a parallel model; TorchScript modules."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import parallel

THREE = ["cpu"] * 3
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # which the compiler reads after a break


@pytest.fixture(scope="module", autouse=True)
def _compiler_reset():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled():
    return torch.compile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), backend="eager")


def self_compiled():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model.compile(backend="eager")
    return model


def frozen():
    with warnings.catch_warnings(action="ignore"):
        script = torch.jit.script(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).eval())
        return torch.jit.optimize_for_inference(torch.jit.freeze(script))


MAKERS = {
    "compiled": compiled,
    "compile()": self_compiled,
    "compiled inside": lambda: nn.Sequential(nn.Linear(4, 4), compiled()),
    "scripted inside": lambda: nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 3))),
    "frozen": frozen,  # without a train mode and without parameters
}


@pytest.mark.parametrize("name", MAKERS)
def test_compiled_models_are_parallel(name):
    """Outputs and gradients are the plain ones, and the `vars` hold the same objects after the block."""
    model, x = MAKERS[name](), torch.randn(7, 4, requires_grad=True)

    def outcome():
        y = model(x)
        gradients = torch.autograd.grad(y.sum(), [x, *model.parameters()]) if name != "frozen" else ()
        return y, gradients

    keys = set(vars(model))
    with parallel(model, THREE):
        pass
    assert set(vars(model)) == keys or name == "frozen"  # torch keeps its `forward`, once it was read
    plain = outcome()
    before = {key: id(value) for key, value in vars(model).items()}
    with torch.set_grad_enabled(name != "frozen"), parallel(model, THREE) as p:
        for _ in range(2):
            assert_close(outcome(), plain)
        assert p.stats().shards == (3, 2, 2)
        assert_close(list(p.map([x, x])), [plain[0]] * 2)
    assert {key: id(value) for key, value in vars(model).items()} == before
    assert_close(model(x), plain[0])


def test_changes_in_a_compiled_module():
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


@pytest.mark.parametrize("first", ["outside", "inside"])
def test_a_compiled_function_around(first):
    """It has the plain output before, inside, and after the block. Inside, the call breaks the graph."""
    model, x = nn.Linear(4, 3), torch.randn(7, 4)
    plain = model(x) + 1
    function = torch.compile(lambda x: model(x) + 1, backend="eager")
    full = torch.compile(lambda x: model(x) + 2, backend="eager", fullgraph=True)
    if first == "outside":
        assert_close(function(x), plain)
    with parallel(model, THREE) as p:
        for calls in (1, 2):
            assert_close(function(x), plain)
            assert (p.stats().calls, p.stats().plain) == (calls, 0)
        function(x).sum().backward()
        with pytest.raises(torch._dynamo.exc.Unsupported):
            full(x)
    assert_close(model.weight.grad, x.sum(0).expand(3, 4))
    assert_close((function(x), full(x)), (plain, plain + 1))
