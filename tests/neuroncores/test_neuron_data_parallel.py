"""`neuron.DataParallel` has the vendor's API. These tests run on emulated cores."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

from parawrap import ShapeError, ShardError, neuron
from parawrap.neuroncores import NeuronCore
from tests.helpers.neuron_doubles import assert_equal, counts

FREE = [0] * 4


class Head(nn.Module):
    def __init__(self, compiled):
        super().__init__()
        self.compiled, self.head, self.drop = compiled, nn.Linear(2, 2), nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.head(self.compiled(x)))


def net_of(batch=1, device_ids=None, **options):
    """Return a linear model that is compiled for `batch` rows, and its DataParallel."""
    torch.manual_seed(0)
    plain = nn.Linear(3, 2).eval()
    compiled = neuron.trace(plain, torch.zeros(batch, 3))
    return plain, compiled, neuron.DataParallel(compiled, device_ids, **options)


@pytest.mark.parametrize(
    ("device_ids", "indices"),
    [
        (None, [0, 1, 2, 3]),
        ("NC", [0, 1, 2, 3]),
        ("neuron:2", [2]),
        (3, [3]),
        (["nc:3", 0, "neuron:1", NeuronCore(2)], [3, 0, 1, 2]),
        (range(1, 3), [1, 2]),
    ],
    ids=str,
)
def test_device_ids_select_the_cores(host, device_ids, indices):
    """Indices and "nc:#" mean the same.

    A single entry is a list of one, and None means all cores of the process.
    """
    plain, _, net = net_of(device_ids=device_ids)
    x = torch.randn(8, 3)
    torch.testing.assert_close(net(input=x), plain(x))
    assert net.device_ids == indices
    assert {core for core, count in enumerate(counts(host, "inferences")) if count} == set(indices)


def test_closing_frees_the_cores(host):
    """Closing frees the cores, and so does the end of the last reference, at once. A call after
    `close` loads again. A deep copy has its own replicas.
    """
    plain, compiled, net = net_of(batch=2)
    x = torch.randn(8, 3)
    for _ in range(2):
        torch.testing.assert_close(net(x), plain(x))
        assert all(counts(host, "models"))
        net.close()
        assert counts(host, "models") == FREE
    assert net.module is compiled
    other = copy.deepcopy(net)
    torch.testing.assert_close(other(x), plain(x))
    other.close()
    with pytest.raises(torch.jit.Error, match="compiled for"):
        compiled(torch.randn(3, 3))
    net(x)
    gc.disable()
    try:
        del net
        assert counts(host, "models") == FREE
    finally:
        gc.enable()


@pytest.mark.parametrize(("workers", "split_size"), [(1, 3), (3, 1), (8, 100)])
def test_workers_and_chunks(host, split_size, workers):
    plain, _, net = net_of(batch=2)
    assert (net.num_workers, net.split_size, net.dim) == (8, None, 0)
    net.num_workers, net.split_size = workers, split_size
    x = torch.randn(13, 3)
    torch.testing.assert_close(net(x), plain(x))
    for value in (0, 1.5, "2", True):
        with pytest.raises(ShardError, match=f"num_workers={value!r}"):
            net.num_workers = value
        with pytest.raises(ShardError, match=f"split_size={value!r}"):
            net.split_size = value
    assert (net.num_workers, net.split_size) == (workers, split_size)


def test_without_dynamic_batching(host):
    """Each core, and each chunk, gets the compiled size. The error for other numbers shows both."""
    plain, _, net = net_of(batch=2)
    net.disable_dynamic_batching()
    net.disable_dynamic_batching()
    x = torch.randn(8, 3)
    torch.testing.assert_close(net(x), plain(x))
    assert counts(host, "inferences") == [1] * 4
    for rows, each in ((12, "3 per core"), (9, "2.25 per core"), (0, "0 per core")):
        with pytest.raises(
            ShapeError,
            match=f"{rows} rows on dim 0 over 4 NeuronCores are {each}.* inference "
            "takes 2 rows. Pass 8",
        ):
            net(torch.randn(rows, 3))
    net.split_size, x = 2, torch.randn(12, 3)
    torch.testing.assert_close(net(x), plain(x))
    net.split_size = 3
    with pytest.raises(ShapeError, match="set split_size to 2"):
        net(x)


def test_another_dim_needs_exact_rows(host):
    """Another dim warns that calls need exact rows. The example `neuron_dim` shows the error for
    other rows.
    """
    compiled = neuron.trace(lambda x: x * 2, torch.zeros(1, 4, 4))
    with pytest.warns(UserWarning, match="dynamic batching is off because dim=2"):
        net = neuron.DataParallel(compiled, device_ids=[0, 1], dim=2)
    x = torch.randn(1, 4, 8)
    assert torch.equal(net(x), x * 2)
    for dim in (3, -4, "0", None):
        with pytest.raises(ShardError, match="out of range"):
            neuron.DataParallel(compiled, dim=dim)


def test_outputs_without_rows(host):
    """Outputs without rows turn dynamic batching off, with a warning. 0-d outputs are one vector,
    with one value per chunk in row order.
    """
    compiled = neuron.trace(lambda x: (x * 2, x.mean()), torch.zeros(2, 3))
    with pytest.warns(
        UserWarning, match=r"output 1 has no batch dimension.*set_dynamic_batching=False"
    ):
        net = neuron.DataParallel(compiled)
    for rows, workers, split_size in ((8, 8, None), (10, 4, 2)):
        x = torch.randn(rows, 3)
        net.num_workers, net.split_size = workers, split_size
        with pytest.warns(UserWarning, match="one value per shard"):
            y, means = net(x)
        assert torch.equal(y, x * 2)
        torch.testing.assert_close(means, x.view(rows // 2, 2, 3).mean((1, 2)))
    with pytest.raises(ShapeError, match="no batch dimension"):
        neuron.dynamic_batch(compiled)


def test_rows_that_disagree_are_refused(host):
    """A core does not broadcast a single row next to more."""
    net = neuron.DataParallel(
        neuron.trace(lambda x, y: x * y, (torch.zeros(1, 3), torch.zeros(1, 3)))
    )
    row, x = torch.randn(1, 3), torch.randn(16, 3)
    assert_equal(net(row.expand(16, 3), x), row * x)
    with pytest.raises(
        ShapeError,
        match=r"input 1 is \[1, 3\], .* dim 0 may differ, if it is the same in all inputs",
    ):
        net(x, row)
    with pytest.raises(ShardError, match=r"args\[1\] has 4 on dim 0, args\[0\] has 16"):
        net(x, x[:4])
    with pytest.raises(
        ShapeError, match=r"input 0 is .* a CPU tensor of torch.float32. Convert it"
    ):
        net(x.double(), x)


@pytest.mark.parametrize("device_ids", [[0, 1], [0, 2]], ids=str)
def test_layers_around_a_compiled_model(host, device_ids):
    """Replicas follow their parameters, modes, and submodules, also compiled ones, and give the
    plain gradients.
    """
    plain, compiled, _ = net_of(batch=2)
    model, x = Head(compiled).eval(), torch.randn(8, 3)
    net = neuron.DataParallel(model, device_ids)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(net(x), model.head(plain(x)))
            model.head.weight.mul_(3)
            model.head.bias = nn.Parameter(torch.ones(2))
        model.head = nn.Linear(2, 2)
        torch.testing.assert_close(net(x), model.head(plain(x)))
    net.train()
    assert (net(x) == 0).any()
    model.drop.p = 0.0
    net(x).square().sum().backward()
    found, model.head.weight.grad = model.head.weight.grad, None
    model.head(plain(x)).square().sum().backward()
    torch.testing.assert_close(found, model.head.weight.grad)
    loads = sum(counts(host, "loads"))
    plain = nn.Linear(3, 2).eval()
    model.compiled = neuron.trace(plain, torch.zeros(2, 3))
    with torch.no_grad():
        torch.testing.assert_close(net(x), model.head(plain(x)))
    assert sum(counts(host, "loads")) == loads + len(device_ids)
    net.close()
    assert counts(host, "models") == FREE


@torch.no_grad()
def test_a_lazy_layer_gets_its_shape_in_the_first_call(host):
    """This call runs on no core, so it has the compiled number of rows."""
    plain, compiled, _ = net_of(batch=2)
    model = Head(compiled).eval()
    model.head = nn.LazyLinear(2)
    net = neuron.DataParallel(model)
    for x in torch.randn(2, 3), torch.randn(8, 3):
        torch.testing.assert_close(net(x), model.head(plain(x)))
    assert sum(counts(host, "inferences")) == 4
