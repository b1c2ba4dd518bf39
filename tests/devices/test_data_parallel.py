"""DataParallel and its functions on four simulated devices."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from parawrap import (
    DataParallel,
    data_parallel,
    gather,
    parallel_apply,
    replicate,
    scatter,
)
from tests import simdevice
from tests.helpers.device_models import assert_same_gradients, devices_of, mlp, rows


@pytest.mark.parametrize(
    ("device_ids", "ids"),
    [
        (None, [0, 1, 2, 3]),
        (["sim:2", "sim:1"], [2, 1]),
        ([torch.device("sim", 0), "sim:0"], [0, 0]),
    ],
    ids=str,
)
def test_training_step(device_ids, ids, closing):
    """The output lies on the first device; outputs and gradients are the plain ones; attributes are torch's."""
    first = torch.device("sim", ids[0])
    model = mlp().to(first)
    plain = copy.deepcopy(model)
    wrapped = closing(DataParallel(model, device_ids))
    assert (wrapped.device_ids, wrapped.output_device, wrapped.src_device_obj) == (ids, ids[0], first)
    x = rows()
    for _ in range(2):
        model.zero_grad()
        plain.zero_grad()
        output, expected = wrapped(x), plain(x.to(first))
        torch.testing.assert_close(output, expected)
        output.square().sum().backward()
        expected.square().sum().backward()
        assert_same_gradients(model, plain)


@pytest.mark.parametrize("output_device", [None, -1, 3, "cpu"], ids=str)
def test_function_frees_its_replicas(output_device):
    """data_parallel joins the output on `output_device` (-1 is the CPU) and frees its replicas."""
    model = mlp().to("sim:0")
    x = rows()
    expected = model(x.to("sim:0")).detach()
    before = simdevice.stats().live_bytes
    with torch.no_grad():
        output = data_parallel(model, x, [0, 1, 2, 3], output_device)
    place = {None: "sim:0", -1: "cpu", 3: "sim:3", "cpu": "cpu"}[output_device]
    torch.testing.assert_close(output, expected.to(place))
    held = output.nbytes if place != "cpu" else 0
    assert simdevice.stats().live_bytes <= before + max(held, 512)


def test_module_on_another_device(closing):
    """The error has torch's message. After moving the module, the call works."""
    wrapped = closing(DataParallel(mlp()))
    with pytest.raises(RuntimeError, match="module must have its parameters and buffers on device sim:0") as caught:
        wrapped(rows())
    assert "found one of them on device: cpu" in str(caught.value)
    wrapped.to("sim:0")
    assert str(wrapped(rows()).device) == "sim:0"


def test_one_device_moves_the_module(closing):
    wrapped = closing(DataParallel(mlp(), ["sim:1"]))
    assert next(wrapped.parameters()).device == torch.device("sim:1")
    assert str(wrapped(rows()).device) == "sim:1"


@pytest.mark.parametrize("verb", ["replicate", "parallel_apply"])
def test_overridden_verbs_train(verb, closing):
    """Replicas that are made for each call follow the optimizer, update statistics, and free their memory."""
    mine = type("Mine", (DataParallel,), {verb: lambda self, *args: getattr(DataParallel, verb)(self, *args)})
    model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)).double().to("sim:0")
    plain = copy.deepcopy(model)
    first, second = closing(mine(model)), closing(DataParallel(plain))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    before = None
    for _ in range(3):
        x = rows(16)
        for net, optimizer in zip((first, second), optimizers, strict=True):
            optimizer.zero_grad(set_to_none=False)
            net(x).square().sum().backward()
            optimizer.step()
        before = before or simdevice.stats().live_bytes
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))
    assert simdevice.stats().live_bytes <= before


def test_functions_on_four_devices():
    """Parts, replicas, and outputs lie on the devices that the functions are given; gradients are the plain ones."""
    model = mlp().to("sim:1")
    x = rows(9).requires_grad_()
    devices = [1, "sim:0", torch.device("sim", 3), 2]
    parts = scatter(x, devices)
    assert devices_of(parts) == ["sim:1", "sim:0", "sim:3", "sim:2"]
    replicas = replicate(model, devices)
    assert devices_of([next(replica.parameters()) for replica in replicas]) == devices_of(parts)
    outputs = parallel_apply(replicas, parts, None, devices)
    assert devices_of(outputs) == devices_of(parts)
    assert devices_of(parallel_apply(replicas, parts)) == devices_of(parts)
    for target, place in ((2, "sim:2"), (-1, "cpu"), ("sim", "sim:0")):
        torch.testing.assert_close(gather(outputs, target), model(x.to("sim:1")).to(place))
    gather(outputs, -1).square().sum().backward()
    plain = copy.deepcopy(model)
    plain.zero_grad()
    plain(x.detach().to("sim:1")).square().sum().backward()
    assert_same_gradients(model, plain)


def test_close_frees_memory(closing):
    """close() frees the replicas, and the next call makes new ones."""
    model = mlp().to("sim:0").requires_grad_(False)
    wrapped = closing(DataParallel(model))
    before = simdevice.stats().live_bytes
    for _ in range(2):
        wrapped(rows())
        assert simdevice.stats().live_bytes > before
        wrapped.close()
        assert simdevice.stats().live_bytes == before
