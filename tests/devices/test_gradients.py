"""Training over four devices gives the weights and gradients of plain training."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils import weight_norm as old_weight_norm

from parawrap import parallel
from tests.helpers.device_models import SIMS, Recurrent, Tied, assert_same_gradients, mlp, rows

HOMES = pytest.mark.parametrize("home", ["sim:0", "cpu", "sim:3"])


def linear() -> nn.Module:
    return nn.Linear(5, 3, dtype=torch.float64)


MODELS = {
    "mlp": mlp,
    "tied": Tied,
    "recurrent": Recurrent,
    "conv": lambda: nn.Sequential(nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten()).double(),
    "old weight norm": lambda: nn.Sequential(old_weight_norm(linear())),
    "spectral norm": lambda: nn.Sequential(parametrizations.spectral_norm(linear())).eval(),
    "orthogonal": lambda: parametrizations.orthogonal(linear()),
    "scripted": lambda: torch.jit.script(mlp()),
    "traced": lambda: torch.jit.trace(mlp(), rows(2)),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("home", ["sim:0", "cpu"])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_training(make, home):
    model, plain = make().to(home), make()
    plain.load_state_dict(model.state_dict())
    data = rows(200)
    pairs = [(each, torch.optim.Adam(each.parameters(), lr=0.01)) for each in (model, plain)]
    with parallel(model, SIMS, out_dims=0):
        for step in range(6):
            x = data[torch.randperm(200)[: 1 + (7 * step) % 23]]
            for each, optimizer in pairs:
                optimizer.zero_grad(set_to_none=step % 2 == 0)
                output = each(x)
                (output - x.to(output.device).sin().sum(1, keepdim=True)).square().mean().backward()
                optimizer.step()
            with torch.no_grad():
                torch.testing.assert_close(model(x).cpu(), plain(x), rtol=1e-6, atol=1e-8)
    ours = {name: value.cpu() for name, value in model.state_dict().items()}
    torch.testing.assert_close(ours, dict(plain.state_dict()), rtol=1e-6, atol=1e-8)


def two_calls(call, home):
    """One backward for two calls, one of them with few rows."""
    x, y = rows(9).to(home), rows(2).to(home)
    (call(x).square().sum() * call(y).sin().sum()).backward()


def accumulated(call, home):
    """Several backward passes, two of them over one graph."""
    for count in (9, 4, 1):
        call(rows(count).to(home)).square().sum().backward()
    loss = call(rows(9).to(home)).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def double_backward(call, home):
    """A gradient penalty, which needs a backward through a gradient."""
    x = rows(9).to(home).requires_grad_()
    output = call(x).sin().sum()
    (gradient,) = torch.autograd.grad(output, x, create_graph=True)
    weights = torch.autograd.grad(output, list(call.parameters()), create_graph=True)
    (gradient.square().sum() + sum(weight.square().sum() for weight in weights)).backward()


def hooked(call, home):
    """A hook on a parameter runs once, with the whole gradient."""
    seen = []
    call[0].weight.register_hook(lambda gradient: (seen.append(1), gradient * 2)[1])
    call(rows(9).to(home)).sum().backward()
    assert seen == [1]


@pytest.mark.parametrize("use", [two_calls, accumulated, double_backward, hooked])
@HOMES
def test_uses_of_gradients(use, home):
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh()).double().to(home)
    plain = copy.deepcopy(model)
    torch.manual_seed(1)
    with parallel(model, SIMS, out_dims=0):
        use(model, home)
    torch.manual_seed(1)
    use(plain, home)
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("frozen", [["0"], ["0", "2"]], ids=["first", "all"])
@HOMES
def test_frozen_and_unused_parameters(frozen, home):
    class Headed(nn.Sequential):
        def forward(self, x):
            return self[2](self[1](self[0](x)))

    model = Headed(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3), nn.Linear(3, 2)).double().to(home)
    for name in frozen:
        model.get_submodule(name).requires_grad_(requires_grad=False)
    plain = copy.deepcopy(model)
    x = rows().requires_grad_()
    with parallel(model, SIMS):
        model(x).square().sum().backward()
    gradient, x.grad = x.grad, None
    plain(x.to(home)).square().sum().backward()
    torch.testing.assert_close(gradient, x.grad)
    assert_same_gradients(model, plain)


def test_writes_before_backward():
    """Backward raises torch's error instead of computing a wrong gradient, as in a plain call."""
    model = mlp().to("sim:0")
    x = rows(9)
    with parallel(model, SIMS):
        loss = model(x).square().sum()
        with torch.no_grad():
            model[2].weight.add_(1)
        model(x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_versions_of_gradients():
    """An in-place write to one gradient does not invalidate a graph that saved another one."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).to("sim:0")
    with parallel(model, ["sim:1"]):
        model(torch.randn(7, 4)).sum().backward()
    first, second, *_ = [parameter.grad for parameter in model.parameters()]
    weight = torch.ones(4, 4, device="sim:0", requires_grad=True)
    loss = (first * weight).sum()
    second.zero_()
    loss.backward()
    torch.testing.assert_close(weight.grad, first)
