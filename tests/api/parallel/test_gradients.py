"""Parameters and inputs get the plain gradients, and batch norm behaves as in torch.nn.DataParallel."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.autograd.forward_ad as fw
from torch import nn
from torch.nn.utils import parametrizations
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from parawrap import parallel

THREE = ["cpu"] * 3


def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


class Scaled(nn.Linear):
    """A model with a buffer that backward needs."""

    def __init__(self):
        super().__init__(4, 4)
        self.register_buffer("scale", torch.rand(4) + 1)

    def forward(self, x):
        return super().forward(x) * self.scale


class Normed(nn.Module):
    """A linear layer followed by a norm."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.linear(x))


# -- gradients


def penalty(model, x):
    """Run backward through a gradient: double backward."""
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    (grad.norm(dim=1) - 1).square().mean().backward()


def two_calls(model, x):
    """Run one backward pass over two calls."""
    (model(x).square().sum() + model(-x).sum()).backward()


def checkpointed(model, x, *, reentrant):
    checkpoint(model, x.clone().requires_grad_(), use_reentrant=reentrant).square().sum().backward()


WAYS = {
    "penalty": penalty,
    "two calls": two_calls,
    "checkpoint": lambda model, x: checkpointed(model, x, reentrant=False),
    "reentrant": lambda model, x: checkpointed(model, x, reentrant=True),
}


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_run_backward(way):
    model, x = nn.Sequential(Scaled(), nn.Tanh(), nn.Linear(4, 3)).double(), torch.randn(7, 4, dtype=torch.float64)

    def gradients():
        model.zero_grad()
        WAYS[way](model, x)
        return [None if each.grad is None else each.grad.clone() for each in model.parameters()]

    plain = gradients()
    with parallel(model, THREE):
        for _ in range(2):
            assert_close(gradients(), plain)


@pytest.mark.parametrize("make", [Normed, lambda: parametrizations.spectral_norm(nn.Linear(4, 4))])
def test_statistics_break_no_graph(make):
    """Two calls with one backward, as in training a GAN, work although each call updates the statistics."""
    model, x = make(), torch.randn(10, 4)
    with parallel(model, THREE):
        two_calls(model, x)
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


def test_frozen_parameters():
    """Also if they are frozen or unfrozen inside the block. A frozen model has outputs without a graph."""
    model, x = mlp(), torch.randn(7, 4)
    model[0].requires_grad_(requires_grad=False)
    with parallel(model, THREE):
        model(x).sum().backward()
        assert [model[0].weight.grad is None, model[2].weight.grad is None] == [True, False]
        model[0].requires_grad_()
        model[2].requires_grad_(requires_grad=False)
        model.zero_grad()
        model(x).sum().backward()
        assert [model[0].weight.grad is None, model[2].weight.grad is None] == [False, True]
        model.requires_grad_(requires_grad=False)
        assert not model(x).requires_grad


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


def test_functional_calls_train():
    """torch.func.functional_call swaps the parameters for one call."""
    model, x = nn.Linear(4, 2), torch.randn(7, 4)
    with parallel(model, THREE) as p:
        model(x)
        replaced = {"weight": torch.randn(2, 4, requires_grad=True), "bias": torch.zeros(2)}
        y = torch.func.functional_call(model, replaced, (x,))
        assert_close(y, x @ replaced["weight"].T)
        y.sum().backward()
        assert p.stats().shards == (3, 2, 2)
        assert replaced["weight"].grad is not None
        assert model.weight.grad is None
        assert_close(model(x), nn.functional.linear(x, model.weight, model.bias))


def test_function_transforms():
    """`torch.func.grad`, `vmap`, and `jvp` are the plain ones, and so is a tangent of forward mode."""
    model, x = mlp(), torch.randn(7, 4)

    def transforms():
        with fw.dual_level():
            tangent = fw.unpack_dual(model(fw.make_dual(x, torch.ones_like(x)))).tangent
        gradient = torch.func.grad(lambda x: model(x).sum())(x)
        return tangent, gradient, torch.func.vmap(model)(x), torch.func.jvp(model, (x,), (x,))

    plain = transforms()
    with parallel(model, THREE):
        assert_close(transforms(), plain)


# -- batch norm and other buffers


def test_batch_norm_in_training():
    """As in torch.nn.DataParallel: each shard is normalized by itself, and the first one updates the statistics."""
    model = Normed()
    first = copy.deepcopy(model)
    with parallel(model, THREE):
        for mode in (torch.no_grad, torch.inference_mode, torch.no_grad):
            x = torch.randn(8, 4)
            parts = x.split([3, 3, 2])
            expected = torch.cat([copy.deepcopy(first)(part) for part in parts])
            output = model(x)
            assert_close(output, expected)
            output.sum().backward()
            first(parts[0])
            model.eval()
            with mode():
                assert_close(model(x), first.eval()(x))  # every lane has the new statistics
            model.train()
            first.train()
    assert_close(dict(model.state_dict()), dict(first.state_dict()))
    assert model.norm.num_batches_tracked.item() == 3
