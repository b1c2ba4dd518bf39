"""A parallel block over four XLA devices gives the outputs and gradients of the plain model, with few compilations."""

from __future__ import annotations

import copy
import functools
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from parawrap import DataParallel, DeviceUnavailableError, parallel
from tests.helpers import device_models

XLAS = ["xla:0", "xla:1", "xla:2", "xla:3"]

mlp = functools.partial(device_models.mlp, torch.float32)
rows = functools.partial(device_models.rows, dtype=torch.float32)
assert_near_gradients = functools.partial(device_models.assert_same_gradients, rtol=1e-4, atol=1e-5)


def beside(model):
    """Return a copy of the model on the CPU, to compare with."""
    return copy.deepcopy(model).cpu()


def assert_near(actual, expected):
    torch.testing.assert_close(actual.detach().cpu(), expected.detach().cpu(), rtol=1e-4, atol=1e-5)


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
    plain = device_models.Tied().float()
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
    assert [len(shard[0]) for shard in net.scatter((x,), {}, net.device_ids)[0]] == [4, 3]
    net.close()


@contextmanager
def compilations():
    """Count the graphs that torch_xla compiles inside the block."""
    import torch_xla.debug.metrics as metrics  # of the child alone

    def compiled():
        data = metrics.metric_data("CompileTime")
        return 0 if data is None else int(data[0])

    before = compiled()
    yield lambda: compiled() - before


@pytest.mark.parametrize("home", ["cpu", "xla:0"])
def test_known_shapes_compile_nothing(home):
    """The first call compiles one graph for all shards and one for the join. The second call compiles none."""
    model = mlp().to(home)
    with torch.no_grad(), parallel(model, XLAS):
        model(rows(4))  # makes the replicas
        with compilations() as first:
            model(rows(64)).cpu()
        with compilations() as second:
            model(rows(64)).cpu()
    assert first() == (1 if home == "cpu" else 2)
    assert second() == 0


@pytest.mark.parametrize("count", [63, 61, 33, 20, 5])
def test_each_size_is_compiled_once(count):
    """A call has two sizes at most. Known sizes, and calls of a known row count, compile nothing."""
    model = mlp()
    with torch.no_grad(), parallel(model, XLAS) as p:
        model(rows(64))
        with compilations() as compiled:
            model(rows(count))
        assert compiled() == len({*p.stats().shards} - {16}) <= 2
        with compilations() as compiled:
            model(rows(count))
            model(rows(64))
        assert compiled() == 0


def test_later_steps_compile_nothing():
    """Forward, backward, and the refresh of replicas reuse their graphs, starting with the second step."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        model(rows(64)).square().mean().backward()
        optimizer.step()

    with parallel(model, XLAS) as p:
        step()
        model(rows(64))  # the replicas are refreshed for the first time
        with compilations() as compiled:
            for _ in range(3):
                step()
    assert compiled() == 0
    assert p.stats().refreshes == 3
