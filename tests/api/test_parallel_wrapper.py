"""ParallelWrapper: calls, moves between devices, and attributes in both directions, as in zeta."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import DeviceUnavailableError, ParallelWrapper
from tests.helpers.calling import Calls

no_accelerator = pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.threshold = 0.5

    def forward(self, x, *, scale=1.0):
        return self.linear(x) * scale

    def __len__(self):
        return 3

    def __iter__(self):
        return iter("abc")

    def __getitem__(self, key):
        return "abc"[key]


def test_calls_the_model():
    """On the CPU, the model is not wrapped in DataParallel."""
    model = Model()
    net = ParallelWrapper(model, device="cpu", use_data_parallel=True)
    x = torch.randn(3, 4)
    assert_close(net(x, scale=2.0), model(x) * 2)
    assert_close(net.forward(x), model(x))
    assert net.model is model
    assert isinstance(net, nn.Module)


def test_to_takes_the_forms_of_torch():
    """to() accepts a device, a dtype, both, keyword arguments, and a tensor, and returns the wrapper."""
    net = ParallelWrapper(Model(), device="cpu")
    for args, kwargs, dtype in (
        (("cpu",), {}, torch.float32),
        ((torch.float64,), {}, torch.float64),
        ((), {"device": torch.device("cpu"), "dtype": torch.float16}, torch.float16),
        ((torch.zeros(1, dtype=torch.float64),), {}, torch.float64),
    ):
        assert net.to(*args, **kwargs) is net
        assert (net.linear.weight.dtype, str(net.device)) == (dtype, "cpu")


@no_accelerator
def test_auto_may_be_plain():
    """The model itself gets the whole batch, in the caller's thread, however many cores the CPU has."""
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
    with pytest.raises(DeviceUnavailableError, match=r"'cuda' is not available.*device=\"auto\" selects"):
        ParallelWrapper(Model())
    net = ParallelWrapper(Model(), device="CPU")
    with pytest.raises(DeviceUnavailableError, match="cuda"):
        net.to("cuda:1")
    assert net.device == "cpu"  # a name that torch knows
    assert net(torch.zeros(1, 4).to(net.device)).shape == (1, 2)


def test_setting_reaches_the_model():
    """Also submodules and deletions."""
    net = ParallelWrapper(Model(), device="cpu")
    net.threshold = 0.9
    net.new = 7
    net.linear = nn.Linear(4, 3)
    assert (net.model.threshold, net.model.new) == (0.9, 7)
    assert net(torch.zeros(1, 4)).shape == (1, 3)
    assert "linear" not in net._modules
    del net.new
    assert not hasattr(net.model, "new")


def test_items_are_those_of_the_model():
    """A model without them raises TypeError, and its wrapper is truthy."""
    net = ParallelWrapper(Model(), device="cpu")
    assert (len(net), list(net), net[1]) == (3, ["a", "b", "c"], "b")
    net = ParallelWrapper(nn.Linear(4, 2), device="cpu")
    assert net
    for use in (lambda: len(net), lambda: iter(net), lambda: net[0]):
        with pytest.raises(TypeError):
            use()


def test_trains_like_the_model():
    """Modes, parameters, and the state_dict are the model's."""
    one, two = (ParallelWrapper(Model(), device="cpu") for _ in range(2))
    assert one.eval() is one
    assert (one.training, one.linear.training, one.train().linear.training) == (False, False, True)
    before = one.linear.weight.detach().clone()
    one(torch.randn(5, 4)).square().sum().backward()
    torch.optim.SGD(one.parameters(), lr=0.1).step()
    assert not torch.equal(before, one.linear.weight)
    two.load_state_dict(one.state_dict())
    assert torch.equal(two.linear.weight, one.linear.weight)
