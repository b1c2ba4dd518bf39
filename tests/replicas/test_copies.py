"""A replica is `copy.deepcopy` of the target with linked tensors, and its functions and references lead to the copies."""

from __future__ import annotations

import copy
import functools
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import ReplicaError, parallel
from parawrap.replicas import ReplicaSet

TWO = ["cpu"] * 2
X = torch.randn(7, 4)


class Copied(nn.Linear):
    """A layer with a method for `copy.deepcopy`."""

    def __init__(self, how=None):
        super().__init__(4, 4)
        self.how, self.was_copied = how, False

    def __deepcopy__(self, memo):
        return self.how(self, memo)


def copies_attributes(layer, memo):
    made = memo[id(layer)] = Copied.__new__(Copied)
    made.__dict__.update(copy.deepcopy(vars(layer), memo))
    made.was_copied = True
    return made


def test_deepcopy_of_the_user_is_obeyed():
    """Its result is the replica. A module that lanes would share, and parameters that would not learn, are refused."""
    model = nn.Sequential(Copied(copies_attributes))
    made = ReplicaSet(model, [torch.device("cpu")] * 2)
    made.refresh()
    for replica in made.current:
        assert replica.module[0].was_copied
        assert replica.original_of(replica.module[0].weight) is model[0].weight
    for how, says in (
        (lambda layer, _: layer, "is the module itself"),
        (lambda *_: Copied(), "another parameter 'weight'"),
        (lambda *_: nn.Sequential(nn.ReLU()), "another submodule '0'"),
    ):
        with pytest.raises(ReplicaError, match=rf"no replica of '0' can be made: .*{says}.*__deepcopy__"):
            ReplicaSet(nn.Sequential(Copied(how)), [torch.device("cpu")] * 2).refresh()


class Scratch:
    """Refers to itself, and has a method for `copy.deepcopy`."""

    def __init__(self):
        self.itself = self

    def __deepcopy__(self, memo):
        return memo.setdefault(id(self), Scratch())


def test_each_lane_has_its_own_object():
    """A block that has ended keeps none of them alive until a garbage collection."""
    model, found = nn.Sequential(nn.Linear(4, 4)), []
    model[0].scratch = Scratch()
    model[0].register_forward_hook(lambda layer, *_: found.append(weakref.ref(layer.scratch)))
    gc.disable()
    try:
        with torch.no_grad(), parallel(model, TWO):
            model(X)
            assert len({model[0].scratch, *(reference() for reference in found)}) == 3
        assert [reference() for reference in found] == [None, None]
    finally:
        gc.enable()


class Graphed(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4))
        self.register_buffer("shift", torch.rand(4))

    def forward(self, x):
        return x * self.scale + self.shift


def test_modules_of_torch_fx_are_copied():
    """Their own `__deepcopy__` would register views as parameters, which torch refuses."""
    model = torch.fx.symbolic_trace(Graphed())
    with parallel(model, TWO):
        output = model(X)
        output.sum().backward()
    assert_close(output, X * model.scale + model.shift)
    assert_close(model.scale.grad, X.sum(0))


class Referring(nn.Module):
    """Reaches its parts by weak references, a method of a list, defaults, and cached and wrapped functions."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.by_name = weakref.WeakValueDictionary(a=self.a)
        self.scales = weakref.WeakKeyDictionary({self.b: 2.0})
        self.a.parent, self.a.method = weakref.proxy(self), weakref.WeakMethod(self.total)
        self.cached = functools.lru_cache(lambda number: self.b.bias.detach() * number)
        self.seen, inner = [], self.c.__call__
        self.note = self.seen.append

        @functools.wraps(inner)
        def wrapped(x, *, layer=self.b):
            return inner(layer(x))

        self.wrapped = functools.partial(wrapped)

    @functools.lru_cache(maxsize=8)  # noqa: B019
    def scaled(self, number):
        return self.b.bias.detach() * number

    def total(self):
        return self.x.sum(1, keepdim=True)

    def forward(self, x):
        self.note(len(self.seen))
        self.x = x
        (scale,) = [scale for layer, scale in self.scales.items() if layer is self.b]
        y = self.wrapped(self.by_name["a"](x)) * scale + len(self.seen)
        return y * self.a.parent.total() + self.a.method()() + self.cached(1) + self.scaled(2)


@pytest.mark.filterwarnings("ignore:the model wrote")
def test_references_lead_to_the_replica():
    """Every lane runs its own modules, however the model refers to them. A cache keeps no replica alive."""
    model, modules = Referring(), set()
    for layer in (model.a, model.b, model.c):
        layer.register_forward_hook(lambda module, *_: modules.add(module))
    total = X.sum(1, keepdim=True)
    want = (model.c(model.b(model.a(X))) * 2 + 1) * total + total + model.b.bias * 3
    modules.clear()
    with torch.no_grad(), parallel(model, TWO) as p:
        assert_close(model(X), want)
        found = [weakref.ref(replica.module) for replica in p._session.pool.refresh()]
    assert len(modules - {model.a, model.b, model.c}) == 6
    assert model.seen == []
    del p
    modules.clear()
    gc.collect()
    assert [reference() for reference in found] == [None, None]
