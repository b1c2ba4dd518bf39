"""Models that once had a wrong output in lanes. They now have the plain output, or raise an error."""

from __future__ import annotations

import copy
import enum
import functools
import gc
import operator
import types
import weakref
from collections import OrderedDict, namedtuple

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import ReplicaError, parallel

TWO = ["cpu", "cpu"]
X = torch.randn(9, 4)
quiet = pytest.mark.filterwarnings("ignore:the model wrote:UserWarning", "ignore:The .grad attribute:UserWarning")


class Sentinel:
    """A named singleton."""

    def __init__(self, name):
        self.name = name


MISSING, NOTHING = Sentinel("missing"), object()


class Choice:
    """A class that holds its only instance as an attribute."""


Choice.first = Choice()


class Mode(enum.Enum):
    """An enum."""

    FAST = 1


@pytest.mark.parametrize("held", [MISSING, NOTHING, Choice.first, Mode.FAST, ...], ids=str)
def test_singletons_stay_the_same_object(held):
    """In every lane, sentinels, class attributes, and enum members are the caller's objects."""

    class Compares(nn.Linear):
        def forward(self, x):
            return super().forward(x) if self.held is held else x * 0

    model = Compares(4, 4)
    model.held = held
    expected = model(X)
    with torch.no_grad(), parallel(model, TWO):
        assert_close(model(X), expected)


class Steps(nn.Module):
    """Replaces its buffer in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("step", torch.zeros(1))

    def forward(self, x):
        self.step = self.step + 1
        return x * 0 + self.step


def test_lanes_start_from_the_buffers_that_lane_0_replaced():
    """Each call starts, in every lane, with the buffer that lane 0 set in the call before."""
    model = Steps()
    with torch.no_grad(), parallel(model, TWO):
        for step in (1.0, 2.0):
            assert_close(model(X), torch.full((9, 4), step))


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_lanes_follow_another_order_of_children(kind):
    """A Sequential runs its children in the order of the dict."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model._modules = kind(model._modules)
    with torch.no_grad(), parallel(model, TWO):
        model(X)
        model._modules["0"] = model._modules.pop("0")
        assert_close(model(X), model[1](torch.tanh(X)))


class CacheInABuffer(nn.Module):
    """Fills a buffer that is None at first."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4))
        self.register_buffer("cache", None, persistent=False)

    def forward(self, x):
        if self.cache is None:
            self.cache = self.scale.detach().exp()
        return x * self.cache


def test_a_buffer_that_is_none_can_be_filled_and_reset():
    """The model gets the buffer that lane 0 filled. If the caller sets it to None, it is None in every lane."""
    model = CacheInABuffer()
    with torch.no_grad(), parallel(model, TWO):
        for _ in range(3):
            assert_close(model(X), X * model.scale.exp())
            assert model.cache is not None
            model.scale.mul_(1.5)
            model.cache = None


class Scaled(nn.Parameter):
    """A parameter with a method and an attribute."""

    def scaled(self):
        return self * self.factor


def test_parameters_and_buffers_keep_classes_and_attributes():
    """In lanes, parameters keep their subclass, and parameters and buffers keep their attributes."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = Scaled(torch.rand(4))
            self.weight.factor = 3.0
            self.register_buffer("shift", torch.rand(4))
            self.shift.factor = 2.0

        def forward(self, x):
            assert isinstance(self.weight, Scaled)
            return x * self.weight.scaled() + self.shift * self.shift.factor

    model = Model()
    with parallel(model, TWO):
        output = model(X)
        output.sum().backward()
    assert_close(output, X * model.weight * 3 + model.shift * 2)
    assert_close(model.weight.grad, X.sum(0) * 3)


def assigns_data(self, x):
    self.weight.data = self.weight.data.clamp(-1, 1)


def unfreezes(self, x):
    self.bias.requires_grad_(True)


def replaces_a_parameter(self, x):
    self.weight = nn.Parameter(self.weight.detach() * 2)


def replaces_a_layer(self, x):
    self.layer = nn.Linear(4, 4)


@pytest.mark.parametrize("change", [assigns_data, unfreezes, replaces_a_parameter, replaces_a_layer])
def test_parameters_that_forward_replaces_are_refused(change):
    """If forward replaces a parameter, its data, its requires_grad, or a layer, the model would not train."""

    class Model(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.layer = nn.Linear(4, 4)
            self.bias.requires_grad_(False)

        def forward(self, x):
            change(self, x)
            return super().forward(x)

    model = Model()
    with parallel(model, TWO), pytest.raises(ReplicaError, match=r"'(weight|bias|layer)'"):
        model(X)


def test_a_buffer_written_through_data_goes_back_to_the_model():
    """In train mode, the model gets lane 0's buffers of any shape, also if forward writes them through `.data`."""

    class Codebook(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("codes", torch.zeros(2, 4))

        def forward(self, x):
            self.codes.data.add_(1)
            return x + 0

    model = Codebook()
    with torch.no_grad(), parallel(model, TWO):
        model(X)
    assert_close(model.codes, torch.ones(2, 4))


@pytest.mark.parametrize(
    "refer", [weakref.proxy, lambda parent: weakref.WeakMethod(parent.scaled)], ids=["proxy", "method"]
)
def test_weak_references_refer_to_the_lanes_own_modules(refer):
    """In a lane, a weak proxy or a weak method refers to the lane's own module."""

    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.child = nn.Linear(4, 4)
            self.child.parent = refer(self)
            self.now = None

        def scaled(self):
            return self.now

        def forward(self, x):
            self.now = x.sum(1, keepdim=True)
            parent = self.child.parent
            return self.child(x) * (parent.scaled() if isinstance(parent, weakref.ProxyTypes) else parent()())

    model = Parent()
    expected = model.child(X) * X.sum(1, keepdim=True)
    with torch.no_grad(), pytest.warns(UserWarning, match="wrote 'now'"), parallel(model, TWO):
        assert_close(model(X), expected)


class AttrDict(dict):
    """A dict with its items as attributes."""

    def __init__(self, **items):
        super().__init__(items)
        self.__dict__ = self


Pair = namedtuple("Pair", "a b")


class Tagged(tuple):
    """A tuple subclass with its own constructor."""

    __slots__ = ()

    def __new__(cls, first, second):
        return super().__new__(cls, (first, second))


def test_containers_of_unusual_classes_are_copied():
    """Attribute dicts, tuple subclasses with a constructor, named tuples, and namespaces lead to the lane's own modules."""

    class Model(nn.Linear):
        def forward(self, x):
            first, second = self.tagged
            y = self.pair.b(first(x)) * self.config.scale + self.space.shift
            return y * self.config["scale"] + second

    model = Model(4, 4)
    model.config = AttrDict(scale=2.0)
    model.tagged, model.pair = Tagged(nn.Linear(4, 4), 1.0), Pair(1, nn.Linear(4, 4))
    model.space = types.SimpleNamespace(shift=3.0)
    with torch.no_grad(), parallel(model, TWO):
        for scale in (2.0, 5.0):
            model.config.scale = scale
            expected = (model.pair.b(model.tagged[0](X)) * scale + 3.0) * scale + 1.0
            assert_close(model(X), expected)


def test_lanes_follow_changes_of_hook_functions():
    """Lanes follow a changed attribute of a hook function that refers to the model."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def hook(module, args, output):
        assert model is not None
        return output * hook.scale

    model[0].register_forward_hook(hook)
    model.run = functools.partial(operator.call, model[1])
    plain = copy.deepcopy(model)
    plain[0]._forward_hooks.clear()
    with torch.no_grad(), parallel(model, TWO):
        for scale in (1.0, 2.0):
            hook.scale = scale
            assert_close(model(X), plain[1](plain[0](X) * scale))


def test_a_generator_anywhere_in_the_model_makes_lanes_run_in_turns():
    """With a seed, outputs are the same in every call, also if the generator is in a dict."""

    class Noise(nn.Module):
        def __init__(self):
            super().__init__()
            self.held = {"generator": torch.Generator()}

        def forward(self, x):
            return x + torch.randn(x.shape, generator=self.held["generator"])

    model = Noise()
    with torch.no_grad(), parallel(model, TWO):
        found = []
        for _ in range(20):
            model.held["generator"].manual_seed(1)
            found.append(model(X))
    assert all(torch.equal(output, found[0]) for output in found)


@quiet
def test_a_submodule_can_be_copied_in_forward():
    """`copy.deepcopy` of a layer gives leaf parameters, as in a plain call."""

    class Teacher(nn.Linear):
        def forward(self, x):
            twin = copy.deepcopy(self.layer)
            assert all(parameter.is_leaf for parameter in twin.parameters())
            return self.layer(x) + twin(x).detach()

    model = Teacher(4, 4)
    model.layer = nn.Linear(4, 4)
    expected = model.layer(X) * 2
    with parallel(model, TWO):
        assert_close(model(X), expected)


def test_empty_containers_in_outputs_stay_empty():
    """In every call, empty tuples, lists, and dicts in outputs are joined to empty ones."""

    class Empty(nn.Linear):
        def forward(self, x):
            return {"y": super().forward(x), "attentions": (), "listed": [], "named": {}}

    model = Empty(4, 4)
    with torch.no_grad(), parallel(model, TWO):
        for _ in range(4):
            output = model(X)
            assert (output["attentions"], output["listed"], output["named"]) == ((), [], {})


def test_a_cached_method_is_copied():
    """`functools.lru_cache` of a bound method works in lanes."""

    class Cached(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.factor = functools.lru_cache(maxsize=2)(self._factor)

        def _factor(self, number):
            return self.weight.detach().sum() * number

        def forward(self, x):
            return super().forward(x) * self.factor(2)

    model = Cached()
    expected = model(X)
    with torch.no_grad(), parallel(model, TWO):
        assert_close(model(X), expected)


def test_replicas_with_cycles_are_freed_when_the_model_changes():
    """Replaced replicas are freed without garbage collection."""
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].parent = [model]
    gc.collect()
    gc.disable()
    try:
        with torch.no_grad(), parallel(model, TWO) as p:
            model(X)
            old = [weakref.ref(replica.module[0]) for replica in p._session.pool.refresh()]
            model.note = [1]
            model(X)
            assert [reference() for reference in old] == [None, None]
    finally:
        gc.enable()


globals_of_this_file = [nn.BatchNorm1d(4)]


def test_modules_in_global_containers_are_refused():
    """A module in a global list that forward uses raises ReplicaError."""

    class Reads(nn.Linear):
        def forward(self, x):
            return globals_of_this_file[0](x)

    with pytest.raises(ReplicaError, match="uses the global 'globals_of_this_file', which holds a BatchNorm1d"):
        parallel(Reads(4, 4), TWO).__enter__()
