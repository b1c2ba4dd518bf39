"""DataParallel, TupleParallel, and ParallelWrapper look up missing attributes on the module that
they wrap.
"""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import DataParallel, ParallelWrapper, TupleParallel

TWO = ["cpu"] * 2


class Model(nn.Linear):
    kind = "classifier"
    dim = 7  # a name of DataParallel

    def __init__(self):
        super().__init__(4, 2)
        self.linear = nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("steps", torch.zeros(1))
        self.threshold = 0.5

    @property
    def doubled(self):
        return self.threshold * 2

    @staticmethod
    def describe():
        return "a model"

    def __len__(self):
        return 3

    def __deepcopy__(self, memo):
        twin = memo[id(self)] = Model.__new__(Model)
        twin.__dict__.update(copy.deepcopy(vars(self), memo))
        return twin


on_two, on_parts = (partial(each, device_ids=TWO) for each in (DataParallel, TupleParallel))
WRAPPERS = pytest.mark.parametrize(
    "wrap",
    [on_two, on_parts, DataParallel, partial(ParallelWrapper, device="cpu")],
    ids=["on two", "on parts", "plain", "on the CPU"],
)


@WRAPPERS
def test_every_kind_is_found(wrap):
    model = Model()
    net = wrap(model)
    for name in ("linear", "scale", "steps"):
        assert getattr(net, name) is getattr(model, name)
    assert (net.threshold, net.doubled, net.kind, net.describe()) == (
        0.5,
        1.0,
        "classifier",
        "a model",
    )


@WRAPPERS
def test_missing_names_raise_an_error(wrap):
    """The error names the module's class."""
    net = wrap(Model())
    with pytest.raises(AttributeError, match="'Model' object has no attribute 'nothing'"):
        _ = net.nothing
    assert getattr(net, "nothing", 3) == 3
    with pytest.raises(AttributeError, match="'nothing'"):
        _ = type(net).__new__(type(net)).nothing  # before __init__


def test_failing_property_of_a_subclass():
    """A property of a subclass that fails raises its own error, even if the module has an attribute
    of that name.
    """

    class Mine(DataParallel):
        @property
        def threshold(self):
            return self.module.no_such_layer

    with pytest.raises(AttributeError, match="no attribute 'no_such_layer'"):
        _ = Mine(Model(), TWO).threshold


def test_own_names_come_first():
    """As in torch, setting stays on the DataParallel. Special methods are not looked up."""
    model = Model()
    net = on_two(model)
    assert net.dim == 0
    with pytest.raises(TypeError):
        len(net)
    net.threshold = 0.9
    assert (net.threshold, model.threshold) == (0.9, 0.5)
    del net.threshold
    assert net.threshold == 0.5


@WRAPPERS
@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, copy.copy, lambda net: pickle.loads(pickle.dumps(net))],
    ids=["deepcopy", "copy", "pickle"],
)
def test_copies_are_wrappers(wrap, duplicate):
    """Copies of a DataParallel are wrappers, before and after a call.

    The module's `__deepcopy__` copies the module, not the wrapper around it.
    """
    net = wrap(Model())
    x = torch.randn(5, 4)
    inputs = x.chunk(2) if wrap is on_parts else x
    for _ in range(2):
        twin = duplicate(net)
        assert type(twin) is type(net)
        assert twin.threshold == 0.5
        assert_close(twin(inputs), net(inputs))
        if duplicate is not copy.copy:
            with torch.no_grad():
                twin.weight.zero_()
            assert net.weight.any()


def test_subclass_with_its_own_lookup():
    """The usual `__getattr__` of other packages, which reads `self.module`, works as before."""

    class Passthrough(DataParallel):
        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.module, name)

    net = Passthrough(Model(), TWO)
    assert net.threshold == 0.5
    assert not hasattr(net, "nothing")
    assert copy.deepcopy(net).threshold == 0.5


@WRAPPERS
def test_compiled_code_finds_attributes(wrap):
    net = wrap(Model())

    def call(x):
        return x * net.threshold + net.scale + net.doubled

    x = torch.randn(3, 4)
    assert_close(torch.compile(call, backend="eager", fullgraph=True)(x), call(x))
