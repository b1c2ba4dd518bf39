"""ParallelWrapper: a model that knows its device."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import DataParallel, DeviceUnavailableError, ParallelWrapper


class Model(nn.Module):
    """A model with state, a method, a property and items."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.threshold = 0.5

    def forward(self, x, *, scale=1.0):
        return self.linear(x) * scale

    def predict(self, x):
        return self(x) > self.threshold

    @property
    def doubled(self):
        return self.threshold * 2

    def __len__(self):
        return 3

    def __iter__(self):
        return iter("abc")

    def __getitem__(self, key):
        return "abc"[key]


def test_it_calls_the_model():
    """Call and forward hand on positional and keyword arguments."""
    model = Model()
    net = ParallelWrapper(model, device="cpu")
    x = torch.randn(3, 4)
    assert_close(net(x, scale=2.0), model(x) * 2)
    assert_close(net.forward(x), model(x))
    assert net.model is model
    assert isinstance(net, nn.Module)


def test_without_several_gpus_the_model_is_not_wrapped():
    """On the CPU the model stays as it is, whatever use_data_parallel says."""
    for use in (True, False):
        net = ParallelWrapper(Model(), device="cpu", use_data_parallel=use)
        assert not isinstance(net.model, DataParallel)


def test_to_moves_updates_the_device_and_returns_itself():
    """to(device), to(dtype), both, and to(device=...)."""
    net = ParallelWrapper(Model(), device="cpu")
    assert net.to("cpu") is net
    assert str(net.device) == "cpu"
    assert net.to(torch.float64) is net
    assert net.linear.weight.dtype == torch.float64
    assert net.to("cpu", torch.float32) is net
    assert net.linear.weight.dtype == torch.float32
    assert net.to(device=torch.device("cpu"), dtype=torch.float16) is net
    assert net.linear.weight.dtype == torch.float16
    assert net.to(torch.zeros(1, dtype=torch.float64)) is net
    assert net.linear.weight.dtype == torch.float64
    assert str(net.device) == "cpu"


def test_auto_picks_what_is_there():
    """device="auto" is the best device of this machine, and to("auto") too."""
    best = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
    net = ParallelWrapper(Model(), device="auto")
    assert torch.device(net.device).type == best
    assert next(net.parameters()).device.type == best
    assert net.to("auto") is net
    assert torch.device(net.device).type == best


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_a_device_that_is_not_there_is_refused_with_the_cure():
    """The default device is "cuda"; without one the message names what is there and device="auto"."""
    with pytest.raises(DeviceUnavailableError, match="cuda") as caught:
        ParallelWrapper(Model())
    assert "auto" in str(caught.value)
    assert "cpu" in str(caught.value)
    net = ParallelWrapper(Model(), device="cpu")
    with pytest.raises(DeviceUnavailableError, match="cuda"):
        net.to("cuda:1")
    assert str(net.device) == "cpu"
    assert net(torch.zeros(1, 4)).shape == (1, 2)


def test_attributes_are_the_models():
    """Reading, methods and properties reach the model; unknown names are AttributeErrors."""
    net = ParallelWrapper(Model(), device="cpu")
    assert net.threshold == 0.5
    assert net.doubled == 1.0
    assert net.linear is net.model.linear
    assert net.predict(torch.zeros(2, 4)).shape == (2, 2)
    with pytest.raises(AttributeError, match="nothing"):
        _ = net.nothing
    assert not hasattr(net, "nothing")


def test_attributes_are_set_on_the_model():
    """Setting reaches the model, for values, parameters and submodules."""
    net = ParallelWrapper(Model(), device="cpu")
    net.threshold = 0.9
    net.new = 7
    net.linear = nn.Linear(4, 3)
    assert net.model.threshold == 0.9
    assert net.model.new == 7
    assert net(torch.zeros(1, 4)).shape == (1, 3)
    assert "linear" not in net._modules


def test_attributes_are_deleted_on_the_model():
    """Del reaches the model as setting does."""
    net = ParallelWrapper(Model(), device="cpu")
    net.new = 7
    del net.new
    assert not hasattr(net.model, "new")


def test_len_iter_and_items_are_the_models():
    """Where the model has them."""
    net = ParallelWrapper(Model(), device="cpu")
    assert (len(net), list(net), net[1]) == (3, ["a", "b", "c"], "b")
    layers = ParallelWrapper(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), device="cpu")
    assert (len(layers), type(layers[1])) == (2, nn.ReLU)


def test_len_and_items_of_a_model_without_them():
    """TypeError as on the model, and the wrapper is true."""
    net = ParallelWrapper(nn.Linear(4, 2), device="cpu")
    assert net
    for use in (lambda: len(net), lambda: iter(net), lambda: net[0]):
        with pytest.raises(TypeError):
            use()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net)), copy.copy])
def test_copies_work(duplicate):
    """pickle, deepcopy and copy do not recurse, and the copy works."""
    net = ParallelWrapper(Model(), device="cpu")
    x = torch.randn(2, 4)
    clone = duplicate(net)
    assert_close(clone(x), net(x))
    assert str(clone.device) == "cpu"
    assert clone.threshold == 0.5
    assert clone.to("cpu") is clone


def test_an_object_without_state_does_not_recurse():
    """A blank instance, as unpickling makes it, raises AttributeError rather than recursing."""
    with pytest.raises(AttributeError):
        _ = ParallelWrapper.__new__(ParallelWrapper).anything


def test_train_eval_and_training():
    """Train and eval reach the model and the wrapper."""
    net = ParallelWrapper(Model(), device="cpu")
    assert net.eval() is net
    assert (net.training, net.model.training, net.linear.training) == (False, False, False)
    net.train()
    assert (net.training, net.linear.training) == (True, True)


def test_it_trains():
    """Parameters are the model's, and an optimizer over them trains it."""
    net = ParallelWrapper(Model(), device="cpu")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    before = net.linear.weight.detach().clone()
    net(torch.randn(5, 4)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(before, net.linear.weight)


def test_its_state_can_be_saved_and_loaded():
    """state_dict and load_state_dict go round."""
    one, two = (ParallelWrapper(Model(), device="cpu") for _ in range(2))
    two.load_state_dict(one.state_dict())
    x = torch.randn(2, 4)
    assert_close(two(x), one(x))
