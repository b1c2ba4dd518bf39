"""Training over four devices gives the same weights and gradients as plain training."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from parawrap import DataParallel, parallel
from tests.devices.zoo import SIMS, Recurrent, Tied, assert_same_gradients, mlp, rows

HOMES = pytest.mark.parametrize("home", ["sim:0", "cpu", "sim:3"])


def batches(steps: int) -> list[torch.Tensor]:
    """Shuffled rows in batches of uneven sizes, down to one row."""
    data = rows(200)
    return [data[torch.randperm(200)[: 1 + (7 * step) % 23]] for step in range(steps)]


@pytest.mark.parametrize("make", [mlp, Tied, Recurrent])
@pytest.mark.parametrize(
    ("kind", "home", "count"),
    [("block", "sim:0", 200), ("block", "cpu", 60), ("block", "sim:3", 60), ("DataParallel", "sim:0", 60)],
)
def test_many_steps_equal_plain_training(kind, make, home, count):
    """After many steps on shuffled, uneven batches, all weights equal those of plain training."""
    plain = make()
    model = copy.deepcopy(plain).to(home)
    mine = torch.optim.Adam(model.parameters(), lr=0.01)
    theirs = torch.optim.Adam(plain.parameters(), lr=0.01)

    def steps(call: nn.Module) -> None:
        for step, x in enumerate(batches(count)):
            for each, optimizer in ((call, mine), (plain, theirs)):
                optimizer.zero_grad(set_to_none=step % 2 == 0)
                output = each(x)
                (output - x.to(output.device)[:, : output.shape[1]].sin().sum(1, keepdim=True)).square().mean().backward()
                optimizer.step()

    if kind == "block":
        with parallel(model, SIMS, out_dims=0):
            steps(model)
    else:
        wrapped = DataParallel(model)
        steps(wrapped)
        wrapped.close()
    ours = {name: value.cpu() for name, value in model.state_dict().items()}
    torch.testing.assert_close(ours, plain.state_dict(), rtol=1e-6, atol=1e-8)


@HOMES
def test_mean_loss_inside_the_model(home):
    """A mean loss that the lanes compute over uneven shards has the plain value and gradients."""

    class Loss(nn.Linear):
        def forward(self, x):
            return super().forward(x).square().mean()

    model = Loss(5, 3, dtype=torch.float64).to(home)
    plain = copy.deepcopy(model)
    x = rows(10)
    expected = plain(x.to(home))
    expected.backward()
    with parallel(model, SIMS, reduce="mean"):
        for _ in range(2):
            model.zero_grad()
            loss = model(x)
            loss.backward()
            torch.testing.assert_close(loss, expected)
            assert_same_gradients(model, plain)


@HOMES
def test_gradients_accumulate(home):
    """Several backward passes add up their gradients."""
    model = mlp().to(home)
    plain = copy.deepcopy(model)
    with parallel(model, SIMS, out_dims=0):
        for x in batches(4):
            model(x).square().sum().backward()
            plain(x.to(home)).square().sum().backward()
    assert_same_gradients(model, plain)


@HOMES
def test_two_calls_share_one_backward(home):
    """Two calls, one of them with few rows, can share one backward."""
    model = mlp().to(home)
    plain = copy.deepcopy(model)
    x, y = rows(9), rows(2)
    with parallel(model, SIMS, out_dims=0):
        (model(x).square().sum() * model(y).sin().sum()).backward()
    (plain(x.to(home)).square().sum() * plain(y.to(home)).sin().sum()).backward()
    assert_same_gradients(model, plain)


@HOMES
def test_a_model_called_on_its_own_output(home):
    """Gradients flow through both calls."""
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh()).double().to(home)
    plain = copy.deepcopy(model)
    x = rows(9)
    with parallel(model, SIMS):
        model(model(x)).square().sum().backward()
    plain(plain(x.to(home))).square().sum().backward()
    assert_same_gradients(model, plain)


def test_a_retained_graph_runs_backward_twice():
    """The second backward adds the same gradients again."""
    model = mlp().to("sim:0")
    plain = copy.deepcopy(model)
    x = rows(9)
    with parallel(model, SIMS):
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    for _ in range(2):
        plain(x.to("sim:0")).square().sum().backward()
    assert_same_gradients(model, plain)


@HOMES
def test_double_backward(home):
    """A gradient penalty, which needs a backward through a gradient, gives the plain gradients."""
    model = mlp().to(home)
    plain = copy.deepcopy(model)
    data = rows(9)

    def penalty(call: nn.Module, x: torch.Tensor) -> None:
        x = x.clone().requires_grad_()
        output = call(x).sin().sum()
        (gradient,) = torch.autograd.grad(output, x, create_graph=True)
        weights = torch.autograd.grad(output, list(call.parameters()), create_graph=True)
        (gradient.square().sum() + sum(weight.square().sum() for weight in weights)).backward()

    with parallel(model, SIMS):
        penalty(model, data)
    penalty(plain, data.to(home))
    assert_same_gradients(model, plain)


def test_autograd_grad_of_some_parameters():
    """torch.autograd.grad returns the gradients of the given parameters and sets no `.grad`."""
    model = mlp().to("sim:0")
    x = rows(9)
    with parallel(model, SIMS):
        (found,) = torch.autograd.grad(model(x).square().sum(), [model[0].weight])
    (expected,) = torch.autograd.grad(model(x.to("sim:0")).square().sum(), [model[0].weight])
    torch.testing.assert_close(found, expected)
    assert all(parameter.grad is None for parameter in model.parameters())


@HOMES
def test_unused_parameters_get_no_gradient(home):
    """The gradient of a parameter that forward does not use stays None, as in a plain call."""

    class Half(nn.Sequential):
        def forward(self, x):
            return self[0](x)

    model = Half(nn.Linear(5, 3), nn.Linear(3, 2)).double().to(home)
    with parallel(model, SIMS):
        model(rows()).sum().backward()
    assert model[1].weight.grad is None
    assert model[0].weight.grad is not None


def test_a_parameter_write_between_forward_and_backward_raises():
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


def test_backward_after_the_block():
    """A loss computed in the block can run backward after the block."""
    model = mlp().to("sim:0")
    plain = copy.deepcopy(model)
    x = rows(9)
    with parallel(model, SIMS):
        loss = model(x).square().sum()
    loss.backward()
    plain(x.to("sim:0")).square().sum().backward()
    assert_same_gradients(model, plain)


def test_part_of_a_larger_model():
    """A parallel submodule of a plain model trains with the rest of the model."""

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.head = mlp(), nn.Linear(3, 2, dtype=torch.float64)

        def forward(self, x):
            return self.head(self.encoder(x))

    model = Whole().to("sim:0")
    plain = copy.deepcopy(model)
    x = rows(9)
    with parallel(model.encoder, SIMS) as p:
        model(x).square().sum().backward()
        assert p.stats().shards == (3, 2, 2, 2)
    plain(x.to("sim:0")).square().sum().backward()
    assert_same_gradients(model, plain)
