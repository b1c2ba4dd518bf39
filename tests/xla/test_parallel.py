"""A parallel block over four XLA devices gives the outputs and gradients of the plain model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from parawrap import DataParallel, DeviceUnavailableError, parallel
from tests.helpers.device_models import Tied
from tests.xla.zoo import XLAS, assert_near, assert_near_gradients, beside, mlp, rows


@pytest.mark.parametrize("home", ["xla:0", "cpu", "xla:2"])
def test_outputs_and_gradients(home):
    model = mlp().to(home)
    plain = beside(model)
    with parallel(model, XLAS) as p:
        for count in (12, 12, 11, 4, 3, 1, 17):
            model.zero_grad()
            plain.zero_grad()
            x = rows(count)
            output, expected = model(x), plain(x)
            output.square().sum().backward()
            expected.square().sum().backward()
            assert output.device == torch.device(home)
            assert_near(output, expected)
            assert_near_gradients(model, plain)
            assert count == 1 or sum(p.stats().shards) == count


@pytest.mark.parametrize("given", ["xla:0", "xla:3"])
def test_inputs_on_a_device(given):
    """An input on any device is cut there, even before it is computed, and receives its gradient."""
    model = mlp().to("xla:0")
    plain = beside(model)
    x = rows(12).to(given).requires_grad_()
    plain_x = x.detach().cpu().requires_grad_()
    with parallel(model, XLAS):
        for _ in range(3):
            model(x * 2).square().sum().backward()
            plain(plain_x * 2).square().sum().backward()
    assert_near(x.grad, plain_x.grad)
    assert_near_gradients(model, plain)


def test_tied_weights_stay_tied():
    """A weight with two names gets the sum of both gradients."""
    plain = Tied().float()
    model = copy.deepcopy(plain).to("xla:0")
    model.down.weight = model.up.weight  # `Module.to` copies it twice on XLA
    x = rows(12)
    with parallel(model, XLAS):
        model(x).square().sum().backward()
    plain(x).square().sum().backward()
    assert model.down.weight is model.up.weight
    assert_near_gradients(model, plain)


@pytest.mark.parametrize("home", ["xla:0", "cpu"])
def test_training_refreshes_replicas(home):
    model = mlp().to(home)
    plain = beside(model)
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.05) for each in (model, plain)]
    with parallel(model, XLAS) as p:
        for _ in range(5):
            x = rows(12)
            losses = [each(x).square().mean() for each in (model, plain)]
            for loss, optimizer in zip(losses, optimizers, strict=True):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            assert_near(*losses)
    assert p.stats().refreshes >= 4


def test_new_data_of_a_parameter():
    """After ``parameter.data = ...``, which changes no version counter, the lanes have the new data."""
    model = nn.Linear(5, 3).to("xla:0")
    x = rows(12)
    with torch.no_grad(), parallel(model, XLAS):
        model(x)
        model.weight.data = torch.zeros(3, 5, device="xla:0")
        model.bias.data = torch.ones(3, device="xla:0")
        assert_near(model(x), torch.ones(12, 3))


def test_map_and_submit():
    """The lanes run whole batches while the caller reads outputs, which arrive in order."""
    model = mlp().to("xla:0")
    plain = beside(model)
    batches = [rows(count) for count in (12, 8, 12, 3) * 15]
    with torch.no_grad(), parallel(model, XLAS) as p:
        for output, batch in zip(p.map(batches), batches, strict=True):
            assert_near(output, plain(batch))
        futures = [p.submit(batch) for batch in batches[:8]]
        for future, batch in zip(futures, batches, strict=False):
            assert_near(future.result(), plain(batch))
        assert all(lane.tasks > 0 for lane in p.stats().lanes)


def test_tensors_made_in_a_lane():
    """In a lane, ``device="xla"`` means the lane's device."""

    class Shifted(nn.Module):
        def forward(self, x):
            return x + torch.arange(2, device="xla")

    with parallel(Shifted(), XLAS) as p:
        assert_near(p.target(torch.zeros(8, 2)), torch.tensor([0.0, 1.0]).expand(8, 2))


@pytest.mark.parametrize(("count", "sizes"), [(8, (2, 2, 2, 2)), (7, (2, 2, 2, 1)), (5, (2, 2, 1)), (64, (16,) * 4)])
def test_shards_are_equal(count, sizes):
    """Each new shape needs a compilation, so all shards but the last have one size, whatever calls came before."""
    model = mlp().to("xla:0")
    with torch.no_grad(), parallel(model, XLAS) as p:
        for _ in range(2):
            model(rows(count))
            assert p.stats().shards == sizes
            model(rows(32))


def test_devices():
    """The kind "xla" means all XLA devices, and a missing index raises with the available ones."""
    assert [str(device) for device in parallel(mlp(), "xla").devices] == XLAS
    with pytest.raises(DeviceUnavailableError, match="xla:0 to xla:3"):
        parallel(mlp(), ["xla:0", "xla:4"])
    assert {device.type for device in parallel(mlp()).devices} == {"cpu"}


def test_data_parallel_on_two_devices():
    model = mlp().to("xla:0")
    plain = beside(model)
    net = DataParallel(model, device_ids=["xla:0", "xla:1"])
    x = rows(7)
    output, expected = net(x), plain(x)
    output.square().sum().backward()
    expected.square().sum().backward()
    assert [str(device) for device in net.device_ids] == ["xla:0", "xla:1"]
    assert output.device == torch.device("xla:0")
    assert_near(output, expected)
    assert_near_gradients(model, plain)
    assert list(net.state_dict()) == [f"module.{name}" for name in plain.state_dict()]
    assert [len(shard[0]) for shard in net.scatter((x,), {}, net.device_ids)[0]] == [4, 3]
    net.close()
