"""Training over four devices gives the weights and gradients of plain training."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils import weight_norm as old_weight_norm

from parawrap import DataParallel, parallel
from tests.helpers.device_models import (
    SIMS,
    Holder,
    Recurrent,
    Tied,
    assert_same_gradients,
    assert_same_training_step,
    mlp,
    rows,
)

HOMES = pytest.mark.parametrize("home", ["sim:0", "cpu", "sim:3"])


def linear() -> nn.Module:
    return nn.Linear(5, 3, dtype=torch.float64)


class Listed(nn.Module):
    """Parameters in a list and in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ParameterList([nn.Parameter(torch.randn(5, 5, dtype=torch.float64)) for _ in range(2)])
        self.named = nn.ParameterDict({"shift": nn.Parameter(torch.randn(5, dtype=torch.float64))})

    def forward(self, x):
        for step in self.steps:
            x = (x @ step).tanh()
        return x + self.named["shift"]


MODELS = {
    "mlp": mlp,
    "tied": Tied,
    "listed": Listed,
    "recurrent": Recurrent,
    "transformer": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 5)),
        nn.TransformerEncoderLayer(5, 1, 8, 0.0, batch_first=True, dtype=torch.float64),
        nn.Flatten(),
    ),
    "conv": lambda: nn.Sequential(nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten()).double(),
    "old weight norm": lambda: nn.Sequential(old_weight_norm(linear())),
    "weight norm": lambda: parametrizations.weight_norm(linear()),
    "old spectral norm": lambda: old_spectral_norm(linear()).eval(),
    "spectral norm": lambda: nn.Sequential(parametrizations.spectral_norm(linear())).eval(),
    "orthogonal": lambda: parametrizations.orthogonal(linear()),
    "scripted": lambda: torch.jit.script(mlp()),
    "traced": lambda: torch.jit.trace(mlp(), rows(2)),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("home", ["sim:0", "cpu"])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_training_equals_plain_training(make, home):
    """After steps on uneven batches, calls without gradients included, all weights equal those of plain training."""
    model, plain = make().to(home), make()
    plain.load_state_dict(model.state_dict())
    train(model, plain, lambda: parallel(model, SIMS, out_dims=0), steps=8)


def test_training_of_data_parallel():
    """Steps of `DataParallel` also lead to the weights of plain training."""
    plain = mlp()
    model = copy.deepcopy(plain).to("sim:0")
    train(model, plain, lambda: DataParallel(model), steps=24)


def train(model, plain, opened, steps):
    """Train both models on shuffled, uneven batches, down to one row, and assert that they stay equal."""
    data = rows(200)
    mine, theirs = (torch.optim.Adam(each.parameters(), lr=0.01) for each in (model, plain))
    call = opened()
    if not isinstance(call, nn.Module):
        call.__enter__()
    for step in range(steps):
        x = data[torch.randperm(200)[: 1 + (7 * step) % 23]]
        for each, optimizer in ((call, mine), (plain, theirs)):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            output = each(x)
            (output - x.to(output.device).sin().sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
        with torch.no_grad():
            torch.testing.assert_close(call(x).cpu(), plain(x), rtol=1e-6, atol=1e-8)
    call.close()
    ours = {name: value.cpu() for name, value in model.state_dict().items()}
    torch.testing.assert_close(ours, dict(plain.state_dict()), rtol=1e-6, atol=1e-8)


def two_calls(call, home):
    """One backward for two calls, one of them with few rows."""
    x, y = rows(9).to(home), rows(2).to(home)
    (call(x).square().sum() * call(y).sin().sum()).backward()


def own_output(call, home):
    """A call on the model's own output."""
    call(call(rows(9).to(home))).square().sum().backward()


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


def some_parameters(call, home):
    """torch.autograd.grad of one parameter sets no `.grad`; the result goes to another parameter for comparison."""
    weight = call[0].weight
    (found,) = torch.autograd.grad(call(rows(9).to(home)).square().sum(), [weight])
    assert all(parameter.grad is None for parameter in call.parameters())
    weight.grad = found


def hooked(call, home):
    """A hook on a parameter runs once, gets the whole gradient, and changes it."""
    seen = []
    call[0].weight.register_hook(lambda gradient: (seen.append(1), gradient * 2)[1])
    call(rows(9).to(home)).sum().backward()
    assert seen == [1]


@pytest.mark.parametrize("use", [two_calls, own_output, accumulated, double_backward, some_parameters, hooked])
@HOMES
def test_uses_of_gradients(use, home):
    """Each use of gradients has the result that it has with the plain model."""
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh()).double().to(home)
    plain = copy.deepcopy(model)
    torch.manual_seed(1)
    with parallel(model, SIMS, out_dims=0):
        use(model, home)
    torch.manual_seed(1)
    use(plain, home)
    assert_same_gradients(model, plain)


@HOMES
def test_mean_loss_inside_the_model(home):
    """A mean loss that the lanes compute over uneven shards has the plain value and gradients."""

    class Loss(nn.Linear):
        def forward(self, x):
            return super().forward(x).square().mean()

    model = Loss(5, 3, dtype=torch.float64).to(home)
    assert_same_training_step(model, rows(), SIMS, loss=lambda loss: loss, reduce="mean")


@pytest.mark.parametrize("frozen", [["0"], ["0", "2"], []], ids=["first", "all", "none"])
@HOMES
def test_frozen_and_unused_parameters(frozen, home):
    """They get no gradient, as in a plain call. The input gets its gradient, also if all are frozen."""

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


@pytest.mark.parametrize("name", ["factor", "scale"])
def test_gradients_of_other_tensors(name):
    """If a buffer or plain attribute starts to require grad, later calls give it the gradients of every lane."""
    model = Holder()
    x = rows()
    with parallel(model, SIMS):
        model(x).sum().backward()
        tensor = getattr(model, name).requires_grad_()
        model(x).sum().backward()
    gradient, tensor.grad = tensor.grad, None
    model(x.to("sim:0")).sum().backward()
    torch.testing.assert_close(gradient, tensor.grad)


def test_parameter_written_before_backward():
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


def test_part_of_a_larger_model():
    """A parallel submodule of a plain model trains with the rest of the model, also after the block."""
    model = nn.Sequential(mlp(), nn.Linear(3, 2, dtype=torch.float64)).to("sim:0")
    plain = copy.deepcopy(model)
    x = rows(9)
    with parallel(model[0], SIMS) as p:
        loss = model(x).square().sum()
        assert p.stats().shards == (3, 2, 2, 2)
    loss.backward()
    plain(x.to("sim:0")).square().sum().backward()
    assert_same_gradients(model, plain)


def test_gradients_have_separate_versions():
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
