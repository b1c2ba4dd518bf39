"""ParallelWrapper: calls, moves between devices, and attributes in both directions, as in zeta."""

from __future__ import annotations

import threading
from collections import OrderedDict

import pytest
import torch
from torch import nn

from parawrap import DeviceUnavailableError, ParallelWrapper
from tests.helpers.calling import Calls


def on_cpu():
    return ParallelWrapper(nn.Sequential(OrderedDict(linear=nn.Linear(4, 2))), device="cpu")


def test_calls_the_model():
    model = Calls(lambda x, *, scale=1: x * scale)
    net = ParallelWrapper(model, device="cpu", use_data_parallel=True)
    x = torch.randn(3, 4)
    assert torch.equal(net(x, scale=2.0), x * 2)
    assert torch.equal(net.forward(x), x)
    assert net.model is model
    assert isinstance(net, nn.Module)


def test_to_takes_a_tensor():
    """to() accepts a tensor, and returns the wrapper.

    Other forms have tests on simulated devices.
    """
    net = on_cpu()
    assert net.to(torch.zeros(1, dtype=torch.float64)) is net
    assert (net.linear.weight.dtype, str(net.device)) == (torch.float64, "cpu")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_auto_may_be_plain():
    """The model itself gets the whole batch, in the caller's thread, however many cores the CPU
    has.
    """
    seen = []
    model = Calls(lambda x: seen.append((len(x), threading.get_ident())) or x)
    net = ParallelWrapper(model, "auto")
    assert net.to("auto") is net
    assert (net.model, net.device) == (model, "cpu")
    net(torch.zeros(8))
    assert seen == [(8, threading.get_ident())]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_absent_device_is_refused():
    """The default device is CUDA. The error names "auto" as the cure."""
    with pytest.raises(
        DeviceUnavailableError, match=r"'cuda' is not available.*device=\"auto\" selects"
    ):
        ParallelWrapper(nn.Linear(4, 2))
    net = ParallelWrapper(nn.Linear(4, 2), device="CPU")
    with pytest.raises(DeviceUnavailableError, match="cuda"):
        net.to("cuda:1")
    assert net.device == "cpu"  # a name that torch knows
    assert net(torch.zeros(1, 4).to(net.device)).shape == (1, 2)


def test_setting_reaches_the_model():
    """Attributes, submodules, and deletions reach the model."""
    net = on_cpu()
    net.threshold = 0.9
    net.new = 7
    net.linear = nn.Linear(4, 3)
    assert (net.model.threshold, net.model.new) == (0.9, 7)
    assert net(torch.zeros(1, 4)).shape == (1, 3)
    assert "linear" not in net._modules
    del net.new
    assert not hasattr(net.model, "new")


def test_trains_like_the_model():
    """Modes, parameters, and the state_dict are the model's."""
    one, two = on_cpu(), on_cpu()
    assert one.eval() is one
    assert (one.training, one.linear.training, one.train().linear.training) == (False, False, True)
    before = one.linear.weight.detach().clone()
    one(torch.randn(5, 4)).square().sum().backward()
    torch.optim.SGD(one.parameters(), lr=0.1).step()
    assert not torch.equal(before, one.linear.weight)
    two.load_state_dict(one.state_dict())
    assert torch.equal(two.linear.weight, one.linear.weight)
