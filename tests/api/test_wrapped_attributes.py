"""DataParallel, TupleParallel, and ParallelWrapper look up missing attributes on the module that they wrap."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import DataParallel, ParallelWrapper, TupleParallel, parallel

TWO = ["cpu"] * 2


class Model(nn.Linear):
    """A model with attributes of every kind."""

    kind = "classifier"
    dim = 7  # a name of DataParallel

    def __init__(self, in_features=4, out_features=2):
        super().__init__(in_features, out_features)
        self.linear = nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("steps", torch.zeros(1))
        self.threshold = 0.5

    def encode(self, x):
        return self.forward(x)

    @property
    def doubled(self):
        return self.threshold * 2

    @property
    def broken(self):
        return self.no_such_layer

    @staticmethod
    def describe():
        return "a model"

    def __len__(self):
        return 3


def on_two(model):
    return DataParallel(model, TWO)


def on_parts(model):
    return TupleParallel(model, TWO)


def on_cpu(model):
    return ParallelWrapper(model, device="cpu")


WRAPPERS = pytest.mark.parametrize("wrap", [on_two, on_parts, DataParallel, on_cpu], ids=lambda wrap: wrap.__name__)


@WRAPPERS
def test_every_kind_is_found(wrap):
    model = Model()
    net = wrap(model)
    for name in ("linear", "scale", "steps"):
        assert getattr(net, name) is getattr(model, name)
    assert (net.threshold, net.doubled, net.kind, net.describe()) == (0.5, 1.0, "classifier", "a model")


@WRAPPERS
def test_missing_names(wrap):
    """The error names the module's class and the name that is missing, also if a property of the module needs it."""
    net = wrap(Model())
    for name, missing in (("nothing", "nothing"), ("broken", "no_such_layer")):
        with pytest.raises(AttributeError, match=f"'Model' object has no attribute '{missing}'"):
            getattr(net, name)
        assert not hasattr(net, name)
        assert getattr(net, name, 3) == 3


@pytest.mark.parametrize("base", [DataParallel, TupleParallel])
def test_failing_property_of_a_subclass(base):
    """It raises its own error, even if the module has an attribute of that name."""

    class Mine(base):
        @property
        def threshold(self):
            return self.module.no_such_layer

    with pytest.raises(AttributeError, match="no attribute 'no_such_layer'"):
        _ = Mine(Model(), TWO).threshold


def test_setting_stays_on_data_parallel():
    """As in torch, `net.x = value` sets it on the DataParallel."""
    model = Model()
    net = on_two(model)
    net.threshold = 0.9
    assert (net.threshold, model.threshold) == (0.9, 0.5)
    del net.threshold
    assert net.threshold == 0.5
    with pytest.raises(AttributeError):
        del net.threshold
    assert model.threshold == 0.5


def test_own_names_come_first():
    """So do special methods, which are not looked up."""
    net = on_two(Model())
    assert net.dim == 0
    assert all(name.startswith("module.") for name in net.state_dict())
    with pytest.raises(TypeError):
        len(net)
    assert net


@WRAPPERS
def test_instance_without_init(wrap):
    """Before __init__, as during unpickling, a missing name is an AttributeError, not a recursion."""
    made = type(wrap(Model()))
    empty = made.__new__(made)
    for name in ("module", "model", "anything", "_modules"):
        assert not hasattr(empty, name)


class Copied(Model):
    """A model that says how it is copied and pickled."""

    def __deepcopy__(self, memo):
        twin = memo[id(self)] = Copied.__new__(Copied)
        twin.__dict__.update(copy.deepcopy(vars(self), memo))
        return twin

    def __getnewargs_ex__(self):
        return (), {}


@WRAPPERS
@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, copy.copy, lambda net: pickle.loads(pickle.dumps(net))], ids=["deepcopy", "copy", "pickle"]
)
def test_copies_are_wrappers(wrap, duplicate):
    """Before and after a call. The module's `__deepcopy__` copies the module, not the wrapper around it."""
    net = wrap(Copied())
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
    x = torch.randn(5, 4)
    assert_close(net(x), net.module(x))
    assert net.threshold == 0.5
    assert not hasattr(net, "nothing")
    assert copy.deepcopy(net).threshold == 0.5


def test_methods_run_undivided():
    """A method that is found on the module gets the whole batch. A block on the module can make it parallel."""
    seen = []

    class Encoder(Model):
        def encode(self, x):
            seen.append(len(x))
            return self.forward(x)

    net = on_two(Encoder())
    x = torch.randn(6, 4)
    assert_close(net.encode(x), net(x))
    with parallel(net.module, TWO, methods=("encode",), out_dims=0):
        net.encode(x)
    assert seen == [6, 3, 3]


@pytest.mark.parametrize("wrap", [on_two, on_cpu], ids=["DataParallel", "ParallelWrapper"])
def test_compiled_code_finds_attributes(wrap):
    net = wrap(Model())

    def call(x):
        return x * net.threshold + net.scale + net.doubled

    x = torch.randn(3, 4)
    assert_close(torch.compile(call, backend="eager", fullgraph=True)(x), call(x))
