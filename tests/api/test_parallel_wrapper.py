"""ParallelWrapper: calls, moves between devices, and attribute access."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import DataParallel, DeviceUnavailableError, ParallelWrapper


class Model(nn.Module):
    """A model with an attribute, a method, a property, and items."""

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
    """Calls and `forward` pass positional and keyword arguments to the model."""
    model = Model()
    net = ParallelWrapper(model, device="cpu")
    x = torch.randn(3, 4)
    assert_close(net(x, scale=2.0), model(x) * 2)
    assert_close(net.forward(x), model(x))
    assert net.model is model
    assert isinstance(net, nn.Module)


def test_on_the_cpu_the_model_is_not_wrapped():
    """On the CPU, the model is not wrapped in DataParallel, whatever `use_data_parallel` is."""
    for use in (True, False):
        net = ParallelWrapper(Model(), device="cpu", use_data_parallel=use)
        assert not isinstance(net.model, DataParallel)


def test_to_moves_the_model_and_returns_the_wrapper():
    """to() accepts a device, a dtype, both, keyword arguments, and a tensor."""
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


def test_auto_uses_the_best_device():
    """`device="auto"` and `to("auto")` choose an accelerator if there is one, otherwise the CPU."""
    best = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
    net = ParallelWrapper(Model(), device="auto")
    assert torch.device(net.device).type == best
    assert next(net.parameters()).device.type == best
    assert net.to("auto") is net
    assert torch.device(net.device).type == best


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_auto_without_an_accelerator_is_one_plain_lane():
    """The model itself gets the whole batch, in the caller's thread, however many cores the CPU has."""
    seen = []

    class Where(nn.Module):
        def forward(self, x):
            seen.append((len(x), threading.get_ident()))
            return x

    model = Where()
    net = ParallelWrapper(model, "auto")
    assert (net.model, net.device) == (model, "cpu")
    net(torch.zeros(8))
    assert seen == [(8, threading.get_ident())]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_an_absent_device_is_refused():
    """Without CUDA, the default device raises. The error names the present devices and "auto"."""
    with pytest.raises(DeviceUnavailableError, match="cuda") as caught:
        ParallelWrapper(Model())
    assert "auto" in str(caught.value)
    assert "cpu" in str(caught.value)
    net = ParallelWrapper(Model(), device="cpu")
    with pytest.raises(DeviceUnavailableError, match="cuda"):
        net.to("cuda:1")
    assert str(net.device) == "cpu"
    assert net(torch.zeros(1, 4)).shape == (1, 2)


def test_attributes_are_read_from_the_model():
    """Attributes, methods, and properties of the model are readable. Unknown names raise AttributeError."""
    net = ParallelWrapper(Model(), device="cpu")
    assert net.threshold == 0.5
    assert net.doubled == 1.0
    assert net.linear is net.model.linear
    assert net.predict(torch.zeros(2, 4)).shape == (2, 2)
    with pytest.raises(AttributeError, match="nothing"):
        _ = net.nothing
    assert not hasattr(net, "nothing")


def test_attributes_are_set_on_the_model():
    """Setting a value or a submodule on the wrapper sets it on the model."""
    net = ParallelWrapper(Model(), device="cpu")
    net.threshold = 0.9
    net.new = 7
    net.linear = nn.Linear(4, 3)
    assert net.model.threshold == 0.9
    assert net.model.new == 7
    assert net(torch.zeros(1, 4)).shape == (1, 3)
    assert "linear" not in net._modules


def test_attributes_are_deleted_on_the_model():
    """`del` on the wrapper deletes the model's attribute."""
    net = ParallelWrapper(Model(), device="cpu")
    net.new = 7
    del net.new
    assert not hasattr(net.model, "new")


def test_len_iter_and_items_use_the_model():
    """`len`, iteration, and indexing use the model's methods."""
    net = ParallelWrapper(Model(), device="cpu")
    assert (len(net), list(net), net[1]) == (3, ["a", "b", "c"], "b")
    layers = ParallelWrapper(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), device="cpu")
    assert (len(layers), type(layers[1])) == (2, nn.ReLU)


def test_len_and_items_of_a_model_without_them():
    """`len`, iteration, and indexing raise TypeError, and the wrapper is truthy."""
    net = ParallelWrapper(nn.Linear(4, 2), device="cpu")
    assert net
    for use in (lambda: len(net), lambda: iter(net), lambda: net[0]):
        with pytest.raises(TypeError):
            use()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net)), copy.copy])
def test_copies_work(duplicate):
    """Wrappers can be pickled, deep-copied, and copied."""
    net = ParallelWrapper(Model(), device="cpu")
    x = torch.randn(2, 4)
    clone = duplicate(net)
    assert_close(clone(x), net(x))
    assert str(clone.device) == "cpu"
    assert clone.threshold == 0.5
    assert clone.to("cpu") is clone


def test_an_object_without_state_does_not_recurse():
    """An instance without attributes, as unpickling creates it, raises AttributeError instead of recursing."""
    with pytest.raises(AttributeError):
        _ = ParallelWrapper.__new__(ParallelWrapper).anything


def test_train_eval_and_training():
    """train() and eval() set the flag of the wrapper, the model, and the submodules."""
    net = ParallelWrapper(Model(), device="cpu")
    assert net.eval() is net
    assert (net.training, net.model.training, net.linear.training) == (False, False, False)
    net.train()
    assert (net.training, net.linear.training) == (True, True)


def test_it_trains():
    """An optimizer over the wrapper's parameters trains the model."""
    net = ParallelWrapper(Model(), device="cpu")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    before = net.linear.weight.detach().clone()
    net(torch.randn(5, 4)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(before, net.linear.weight)


def test_its_state_can_be_saved_and_loaded():
    """A state_dict loads into another wrapper."""
    one, two = (ParallelWrapper(Model(), device="cpu") for _ in range(2))
    two.load_state_dict(one.state_dict())
    x = torch.randn(2, 4)
    assert_close(two(x), one(x))


def test_the_device_attribute_is_a_name_that_torch_knows():
    """A device in other letters is kept as torch's name, so that ``x.to(net.device)`` works."""
    net = ParallelWrapper(Model(), device="CPU")
    assert net.device == "cpu"
    assert net(torch.ones(3, 4).to(net.device)).shape == (3, 2)
