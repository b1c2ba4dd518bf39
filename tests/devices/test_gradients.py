"""Training over four devices gives the weights and gradients of plain training."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils import weight_norm as old_weight_norm

from parawrap import parallel
from tests.helpers.device_models import SIMS, Recurrent, Tied, mlp, rows


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
