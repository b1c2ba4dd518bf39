"""Lanes on other devices have linked copies of the parameters, which follow the model whatever wrote it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils import weight_norm as old_weight_norm
from torch.utils.checkpoint import checkpoint

from parawrap import ReplicaError, parallel
from tests.helpers.device_models import SIMS, Recurrent, Tied, assert_same_gradients, mlp, rows

HOMES = pytest.mark.parametrize("home", ["sim:0", "cpu"])


class Net(nn.Sequential):
    """Notes the flags and the kind of the parameters that each lane has."""

    def __init__(self):
        super().__init__(nn.Linear(5, 7), nn.Tanh(), nn.Dropout(0.0), nn.Linear(7, 3))
        self.register_parameter("unused", nn.Parameter(torch.ones(2)))
        self.double()
        type(self).seen = set()  # on the class, because a replica has its own attributes

    def forward(self, x):
        flags = tuple(each.requires_grad for each in self.parameters())
        kinds = all(isinstance(each, nn.Parameter) for each in self.parameters())
        self.seen.add((str(x.device), flags, kinds))
        return super().forward(x)


@pytest.mark.parametrize("between", ["no grad", "map", "nothing"])
def test_every_step_is_seen(between):
    """Also by the calls without gradients that follow it, and if one step has several calls before it.

    Fused optimizers leave the versions of the parameters alone.
    """
    model = Net()
    plain = copy.deepcopy(model)
    pairs = [(each, torch.optim.SGD(each.parameters(), 0.1, fused=True)) for each in (model, plain)]
    with parallel(model, SIMS, out_dims=0) as p:
        for _ in range(4):
            x = rows(8)
            for each, stepper in pairs:
                each.zero_grad()
                each(x).square().sum().backward()
                each(x * 2).sin().sum().backward()
                stepper.step()
            with torch.no_grad():
                outputs = {"no grad": lambda x: [model(x)], "map": lambda x: list(p.map([x] * 5)), "nothing": lambda x: []}
                for output in outputs[between](x):
                    torch.testing.assert_close(output, plain(x))
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))


CHANGES = {
    "one frozen": lambda model: model[0].requires_grad_(requires_grad=False),
    "unfrozen": lambda model: model.requires_grad_(),
    "new data": lambda model: setattr(model[3].weight, "data", model[3].weight.data * 2),
    "all frozen": lambda model: model.requires_grad_(requires_grad=False),
    "filled data": lambda model: setattr(model[3].bias, "data", torch.ones_like(model[3].bias)),
    "unfrozen again": lambda model: model.requires_grad_(),
}


@HOMES
@pytest.mark.parametrize("first", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_flags_and_data_of_copies(first, home):
    """A copy that is made without gradients, or frozen, is linked later. Lanes see the flags of the model.

    Without gradients, new ``.data`` on other devices needs `refresh`.
    """
    model, x = Net().to(home), rows(8)
    with parallel(model, SIMS, out_dims=0) as p:
        for name, change in CHANGES.items():
            change(model)
            if "data" in name and first is not torch.enable_grad:
                p.refresh()
            flags = tuple(each.requires_grad for each in model.parameters())
            for mode in (first, torch.enable_grad):
                plain = copy.deepcopy(model)
                model.seen.clear()
                with mode():
                    output, expected = model(x), Net.forward(plain, x.to(home))
                    torch.testing.assert_close(output, expected)
                    assert output.requires_grad == expected.requires_grad
                    if output.requires_grad:
                        model.zero_grad()
                        plain.zero_grad()
                        output.square().sum().backward()
                        expected.square().sum().backward()
                        assert_same_gradients(model, plain)
                assert {kinds for _, _, kinds in model.seen} == {True}
                if mode is torch.enable_grad:
                    assert {each for _, each, _ in model.seen} == {flags}


def penalty(model, x):
    """Double backward, through the gradients of the input and of a weight."""
    gradient, of_weight = torch.autograd.grad(model(x).sin().sum(), (x, model[3].weight), create_graph=True)
    ((gradient.norm(dim=1) - 1).square().sum() + of_weight.square().sum()).backward()


def two_and_two(model, x):
    first, second = model(x).square().sum(), model(x * 2).sin().sum()
    with torch.no_grad():
        model(x)
    first.backward()
    second.backward()


WAYS = {
    "penalty": penalty,
    "two and two": two_and_two,
    "retained": lambda model, x: [(loss := model(x).square().sum()).backward(retain_graph=True), loss.backward()],
    "checkpoint": lambda model, x: checkpoint(model, x, use_reentrant=False).square().sum().backward(),
    "reentrant": lambda model, x: checkpoint(model, x, use_reentrant=True).square().sum().backward(),
    "segments": lambda model, x: checkpoint(model, x, use_reentrant=True).sub(model(x * 2)).square().sum().backward(),
}


@HOMES
@pytest.mark.parametrize("way", WAYS)
def test_ways_to_run_backward(way, home):
    """They give the plain gradients, and a hook on a parameter runs as often, with the whole gradient."""
    model, leaf = Net().to(home), rows(8).to(home)
    model[0].bias.requires_grad_(requires_grad=False)

    def outcome(each):
        seen, x = [], leaf.clone().requires_grad_()
        handle = each[3].weight.register_hook(lambda gradient: seen.append(gradient.cpu().clone()))
        WAYS[way](each, x)
        handle.remove()
        return x.grad, len(seen), sum(seen)

    expected = outcome(plain := copy.deepcopy(model))
    with parallel(model, SIMS, out_dims=0):
        for _ in range(2):
            model.zero_grad()
            torch.testing.assert_close(outcome(model), expected)
            assert_same_gradients(model, plain)


@HOMES
def test_inputs_of_frozen_models(home):
    """They get their gradient through the lanes' copies."""
    model, leaf = Net().to(home).requires_grad_(requires_grad=False), rows(8)
    x, plain_x = leaf.clone().requires_grad_(), leaf.to(home).requires_grad_()
    with parallel(model, SIMS, out_dims=0):
        model(x).square().sum().backward()
    model(plain_x).square().sum().backward()
    torch.testing.assert_close(x.grad, plain_x.grad.cpu())


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
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@HOMES
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_training(make, home):
    """It gives the weights of plain training."""
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


@pytest.mark.parametrize("form", [torch.jit.script, lambda model: torch.jit.trace(model, rows(2))], ids=["script", "trace"])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_torchscript(form):
    """Lanes on its device share a TorchScript module. Lanes elsewhere have copies, without gradients."""
    model, x = form(mlp()).to("sim:0"), rows(9).to("sim:0")
    with torch.no_grad():
        plain = model(x)
        with parallel(model, ["sim:0", "sim:0"], out_dims=0):
            torch.testing.assert_close(model(x), plain)
        with parallel(model, SIMS, out_dims=0):
            torch.testing.assert_close(model(x), plain)
            next(model.parameters()).mul_(2)
            changed = model(x)
            assert not torch.equal(changed, plain)
        torch.testing.assert_close(model(x), changed)
    with parallel(model, SIMS, out_dims=0), pytest.raises(ReplicaError, match="gradients do not flow"):
        model(x)
