"""DataParallel and ParallelWrapper look up missing attributes on the module that they wrap."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import DataParallel, ParallelWrapper, TupleParallel, parallel

TWO = ["cpu"] * 2


class Model(nn.Module):
    """A model with attributes of every kind."""

    kind = "classifier"

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("steps", torch.zeros(1))
        self.threshold = 0.5

    def forward(self, x):
        return self.linear(x) * self.scale

    def predict(self, x):
        return self(x) > self.threshold

    @property
    def doubled(self):
        return self.threshold * 2

    @property
    def broken(self):
        return self.no_such_layer

    @staticmethod
    def describe():
        return "a model"


def on_two(model):
    return DataParallel(model, TWO)


def on_parts(model):
    return TupleParallel(model, TWO)


def on_cpu(model):
    return ParallelWrapper(model, device="cpu")


WRAPPERS = pytest.mark.parametrize("wrap", [on_two, on_parts, DataParallel, on_cpu], ids=lambda wrap: wrap.__name__)


@WRAPPERS
def test_attributes_of_every_kind_are_found(wrap):
    """Submodules, parameters, buffers, values, methods, properties, and class attributes of the module are readable."""
    model = Model()
    net = wrap(model)
    for name in ("linear", "scale", "steps"):
        assert getattr(net, name) is getattr(model, name)
    assert (net.threshold, net.doubled, net.kind, net.describe()) == (0.5, 1.0, "classifier", "a model")
    assert net.predict(torch.zeros(3, 4)).shape == (3, 2)


@WRAPPERS
def test_a_name_that_neither_has_is_an_attribute_error(wrap):
    """The error names the module's class. `hasattr` is False, and `getattr` with a default returns the default."""
    net = wrap(Model())
    with pytest.raises(AttributeError, match="'Model' object has no attribute 'nothing'"):
        _ = net.nothing
    assert not hasattr(net, "nothing")
    assert getattr(net, "nothing", 3) == 3


@WRAPPERS
def test_the_error_inside_a_property_of_the_module_is_raised(wrap):
    """An AttributeError inside a property names the attribute that is missing there, not the property."""
    net = wrap(Model())
    with pytest.raises(AttributeError, match="'Model' object has no attribute 'no_such_layer'"):
        _ = net.broken
    assert not hasattr(net, "broken")


@pytest.mark.parametrize("base", [DataParallel, TupleParallel])
def test_the_error_inside_a_property_of_a_subclass_is_raised(base):
    """A subclass's property that fails raises its own error, even if the module has an attribute of that name."""

    class Mine(base):
        @property
        def threshold(self):
            return self.module.no_such_layer

    net = Mine(Model(), TWO)
    with pytest.raises(AttributeError, match="no attribute 'no_such_layer'"):
        _ = net.threshold


def test_the_error_inside_a_property_of_a_nested_module_is_raised():
    """A DataParallel around a DataParallel raises the innermost error too."""
    net = on_two(on_two(Model()))
    assert net.threshold == 0.5
    with pytest.raises(AttributeError, match="no_such_layer"):
        _ = net.broken


def test_a_module_may_answer_for_missing_names_itself():
    """The module's own `__getattr__` is used, also for a property that falls back to it."""

    class Lenient(nn.Module):
        @property
        def size(self):
            raise AttributeError("not yet known")

        def __getattr__(self, name):
            return f"no {name}"

    net = DataParallel(Lenient())
    assert (net.size, net.colour) == ("no size", "no colour")


def test_setting_an_attribute_stays_on_the_wrapper():
    """As in torch, `net.x = value` sets it on the DataParallel. `net.module.x = value` sets it on the module."""
    model = Model()
    net = on_two(model)
    net.threshold = 0.9
    assert (net.threshold, model.threshold) == (0.9, 0.5)
    del net.threshold
    assert net.threshold == 0.5
    with pytest.raises(AttributeError):
        del net.threshold
    assert model.threshold == 0.5


def test_the_wrappers_own_names_come_first():
    """Names that both have are the wrapper's, such as `state_dict`, `dim`, `forward`, and hooks."""

    class Clash(Model):
        dim = 7
        device_ids = "mine"

        def close(self):
            raise AssertionError

    net = on_two(Clash())
    assert net.dim == 0
    assert net.device_ids == [torch.device("cpu")] * 2
    assert all(name.startswith("module.") for name in net.state_dict())
    net.close()


@WRAPPERS
def test_an_instance_without_init_has_no_attributes(wrap):
    """Before __init__, as during unpickling, a missing name is an AttributeError, not a recursion."""
    made = type(wrap(Model()))
    empty = made.__new__(made)
    for name in ("module", "model", "anything", "_modules"):
        assert not hasattr(empty, name)


def test_a_subclass_may_read_attributes_before_init():
    """A subclass that reads a missing name before `super().__init__()` gets an AttributeError."""

    class Early(DataParallel):
        def __init__(self, module):
            self.early = getattr(self, "threshold", None)
            super().__init__(module, TWO)

    with pytest.raises(AttributeError):  # torch refuses the assignment too
        _ = DataParallel.__new__(DataParallel).threshold
    assert Early(Model()).threshold == 0.5


class Copied(nn.Linear):
    """A module that says how it is copied and pickled."""

    def __deepcopy__(self, memo):
        twin = Copied(self.in_features, self.out_features)
        twin.load_state_dict(self.state_dict())
        return twin

    def __getnewargs_ex__(self):
        return (), {}


@WRAPPERS
@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, copy.copy, lambda net: pickle.loads(pickle.dumps(net))], ids=["deepcopy", "copy", "pickle"]
)
def test_copies_of_the_wrapper_are_wrappers(wrap, duplicate):
    """The module's `__deepcopy__` copies the module, not the wrapper around it."""
    net = wrap(Copied(4, 2))
    for _ in range(2):
        twin = duplicate(net)
        assert type(twin) is type(net)
        assert twin.in_features == 4
        assert_close(twin.weight, net.weight)


def test_special_methods_are_not_looked_up():
    """`len`, iteration, and names with double underscores are not those of the module."""
    net = on_two(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    for name in ("__len__", "__iter__", "__getitem__"):
        assert not hasattr(net, name)
    with pytest.raises(TypeError):
        len(net)
    assert net


def test_other_packages_own_lookups_still_work():
    """A subclass with the usual `__getattr__`, which reads `self.module`, behaves as before."""

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


def test_a_method_of_the_module_runs_undivided():
    """A method that is found on the module runs on the whole batch."""
    seen = []

    class Encoder(nn.Linear):
        def encode(self, x):
            seen.append(len(x))
            return self(x)

    net = on_two(Encoder(4, 2))
    x = torch.randn(6, 4)
    assert_close(net.encode(x), net(x))
    assert seen == [6]


def test_a_block_may_make_a_method_of_the_module_parallel():
    """`parallel(net.module, methods=...)` cuts the calls of a method that is found through the wrapper."""
    seen = []

    class Encoder(nn.Linear):
        def encode(self, x):
            seen.append(len(x))
            return self.forward(x)

    net = on_two(Encoder(4, 2))
    with parallel(net.module, TWO, methods=("encode",), out_dims=0):
        net.encode(torch.randn(6, 4))
    assert seen == [3, 3]


def test_replicas_find_attributes_through_an_inner_wrapper():
    """A model that reads an attribute of an inner DataParallel's module can be replicated."""

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = on_two(Model())

        def forward(self, x):
            return self.inner(x) * self.inner.threshold

    model = Outer()
    x = torch.randn(6, 4)
    expected = model(x)
    for wrapper in (DataParallel(model, TWO), DataParallel(model, TWO)):
        assert_close(wrapper(x), expected)


@WRAPPERS
def test_compiled_functions_find_attributes(wrap):
    """`torch.compile` of a function that reads attributes of the module through the wrapper runs."""
    net = wrap(Model())

    def call(x):
        return x * net.threshold + net.scale + net.doubled

    x = torch.randn(3, 4)
    assert_close(torch.compile(call, backend="eager", fullgraph=True)(x), call(x))
