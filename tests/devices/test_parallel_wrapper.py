"""ParallelWrapper and recursive_to on four simulated devices."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from parawrap import DataParallel, ParallelWrapper
from tests.helpers.device_models import SIMS, mlp, rows


def lanes_of(net):
    """Return the devices that calls of a ParallelWrapper use."""
    return net.model.device_ids if isinstance(net.model, DataParallel) else [next(net.parameters()).device]


def test_auto_uses_every_device():
    """With "auto", calls are cut over all four devices, and outputs and gradients are the plain ones."""
    seen = []

    class Model(nn.Linear):
        def forward(self, x):
            seen.append(str(x.device))
            return super().forward(x)

    model = Model(5, 3, dtype=torch.float64)
    plain = copy.deepcopy(model)
    net = ParallelWrapper(model, "auto")
    assert (net.device, lanes_of(net)) == ("sim:0", [0, 1, 2, 3])
    x = rows(9)
    output = net(x)
    assert sorted(seen) == SIMS
    torch.testing.assert_close(output.cpu(), plain(x))
    output.square().sum().backward()
    plain(x).square().sum().backward()
    torch.testing.assert_close([p.grad.cpu() for p in model.parameters()], [p.grad for p in plain.parameters()])


def test_auto_starts_at_the_current():
    with torch.sim.device(2):
        net = ParallelWrapper(mlp(), "auto")
    assert (net.device, lanes_of(net)) == ("sim:2", [2, 0, 1, 3])
    assert str(net(rows()).device) == "sim:2"


@pytest.mark.parametrize("device", ["auto", "sim:1"])
def test_without_data_parallel(device):
    """With `use_data_parallel=False`, every `device` gives one device, also in `to("auto")`."""
    net = ParallelWrapper(mlp(), device, use_data_parallel=False)
    assert not isinstance(net.model, DataParallel)
    assert not isinstance(net.to("auto").model, DataParallel)
    assert net.device == "sim:0"


def test_moves_between_auto_and_one():
    """`to("auto")` spreads the calls, `to` with a device gathers them there, and `to` with a dtype changes neither."""
    net = ParallelWrapper(mlp(), "cpu")
    x = rows()
    expected = net(x).detach()
    for device, lanes in (("auto", [0, 1, 2, 3]), ("sim:1", [torch.device("sim:1")]), ("auto", [0, 1, 2, 3])):
        assert net.to(device) is net
        assert lanes_of(net) == lanes
        torch.testing.assert_close(net(x.to(net.device)).detach().cpu(), expected)
    net.to(torch.float32)
    assert (net.device, lanes_of(net)) == ("sim:0", [0, 1, 2, 3])
    assert net(x.float()).dtype == torch.float32
    net.to("cpu", torch.float64)
    torch.testing.assert_close(net(x).detach(), expected)
    net.to(device="auto", dtype=torch.float32)
    assert lanes_of(net) == [0, 1, 2, 3]
    assert net[0].weight.dtype == torch.float32


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))], ids=["deepcopy", "pickle"]
)
def test_copies_of_auto(duplicate):
    net = ParallelWrapper(mlp(), "auto")
    x = rows()
    expected = net(x).detach()
    twin = duplicate(net)
    assert (twin.device, lanes_of(twin)) == ("sim:0", [0, 1, 2, 3])
    with torch.no_grad():
        torch.testing.assert_close(twin(x), expected)
        twin[2].bias.add_(1)
        torch.testing.assert_close(twin(x), expected + 1)
        torch.testing.assert_close(net(x), expected)
