"""Writes of forward in lanes on several devices: statistics, other buffers, parameters, and odd places."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn

from parawrap import ReplicaError, parallel
from tests.helpers.device_models import SIMS, Average, rows
from tests.helpers.odd_models import CASES, MODELS, check, quiet

HOMES = pytest.mark.parametrize("home", ["sim:0", "cpu"])


@pytest.mark.parametrize("devices", [SIMS, ["sim:1", "sim:1"]], ids=str)
@HOMES
def test_batch_norm_statistics(home, devices):
    """Each lane normalizes its own rows, the model keeps lane 0's statistics, and eval mode uses them in all lanes."""
    plain = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 2)).double()
    model = copy.deepcopy(plain).to(home)
    with parallel(model, devices) as p:
        for count in (13, 13, 11):
            x = rows(count) * 3 + 1
            output = model.train()(x)
            parts = x.split(p.stats().shards)
            expected = torch.cat([copy.deepcopy(plain).train()(part) for part in parts])
            torch.testing.assert_close(output.cpu(), expected)
            plain.train()(parts[0])
            ours = {name: value.cpu() for name, value in model.state_dict().items()}
            torch.testing.assert_close(ours, dict(plain.state_dict()))
            with torch.no_grad():
                torch.testing.assert_close(model.eval()(x).cpu(), plain.eval()(x))


def test_later_calls_keep_graphs_usable():
    """Between forward and backward there may be other calls, in any mode, and steps of other models' optimizers."""
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)).double().to("sim:0")
    plain, other = copy.deepcopy(model), nn.Linear(2, 2)
    x = rows(9)
    with parallel(model, SIMS) as p:
        loss = model(x).square().sum() + model(x).square().sum()
        with torch.no_grad():
            model.eval()(x)
        other(torch.ones(1, 2)).sum().backward()
        torch.optim.SGD(other.parameters(), lr=0.1, fused=True).step()
        model.train()(x)
        loss.backward()
        shards = p.stats().shards
    expected = [copy.deepcopy(plain) for _ in shards]
    for each, part in zip(expected, x.split(shards), strict=True):
        (2 * each(part.to("sim:0")).square().sum()).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, sum(each.get_parameter(name).grad for each in expected), msg=name)


@HOMES
def test_buffers_that_forward_writes(home):
    """In training, every lane starts a call with the buffers that lane 0 wrote in place in the call before."""
    model = Average(in_place=True).to(home)
    plain = copy.deepcopy(model).cpu()
    with torch.no_grad(), parallel(model, SIMS) as p:
        for _ in range(4):
            x = rows(9)
            expected = plain.linear(x) - plain.mean
            torch.testing.assert_close(model(x).cpu(), expected)
            plain(x[: p.stats().shards[0]])
            torch.testing.assert_close(model.mean.cpu(), plain.mean)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:the model wrote '1.mean':UserWarning")
@pytest.mark.parametrize("devices", [["sim:2", "sim:2"], ["sim:2", "sim:1"]], ids=str)
def test_whole_calls_keep_buffers(devices):
    """Lanes that run whole calls start from the model's statistics, and give nothing back."""
    model = nn.Sequential(nn.Linear(5, 5), Average(in_place=True), nn.BatchNorm1d(5)).double().to("sim:2")
    before = copy.deepcopy(model.state_dict())
    with parallel(model, devices) as p:
        for future in [p.submit(rows(7)) for _ in range(12)]:
            assert future.result().isfinite().all()
    torch.testing.assert_close(model.state_dict(), before)


@HOMES
@pytest.mark.parametrize("write", [lambda calls: calls.data.add_(1), lambda calls: setattr(calls, "data", calls + 1)])
def test_writes_of_parameters(write, home):
    """They are refused, also in lanes that would write their own copy."""

    class Counter(nn.Linear):
        def forward(self, x):
            write(self.calls)
            return super().forward(x)

    model = Counter(5, 5, dtype=torch.float64)
    model.calls = nn.Parameter(torch.zeros(()), requires_grad=False)
    model.to(home)
    with parallel(model, SIMS):
        for _ in range(2):
            with pytest.raises(ReplicaError, match="the parameter 'calls' was written during a call"):
                model(rows())


CHANGES = ("memory replaced", "frozen and unfrozen", "dicts replaced, no grad")


@quiet
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_odd_models_equal_a_plain_copy(make):
    """Outputs and gradients are the plain ones, whatever changes between calls."""

    def made():
        with torch.device("sim:0"):  # `Module.to` would leave tensors in dicts behind
            return make()

    opened = functools.partial(parallel, devices=["sim:2", "sim:0", "sim:3", "sim:3"], output_device="sim:0")
    for event, grad in (case.values for case in CASES if case.id in CHANGES):
        check(made, event, opened, 9, grad=grad)
