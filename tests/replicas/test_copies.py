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

CPU = torch.device("cpu")
TWO = ["cpu"] * 2
X = torch.randn(7, 4)


def replicas(module, lanes=2):
    made = ReplicaSet(module, [CPU] * lanes)
    made.refresh()
    return made


class Shared(nn.Module):
    """A buffer, and a view of it as another buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("whole", torch.zeros(6))
        self.register_buffer("part", self.whole.view(2, 3)[1])

    def forward(self, x):
        self.part.add_(1)
        return x + self.whole[3:].sum()


def test_buffers_that_share_memory_share_it_in_a_replica():
    """A write through one is seen through the other, and both go to the model."""
    model = Shared()
    with torch.no_grad(), parallel(model, TWO):
        for calls in (1, 2, 3):
            assert_close(model(X), X + 3 * calls)
            assert_close(model.whole, torch.tensor([0.0, 0, 0, calls, calls, calls]))


class Copied(nn.Linear):
    """A layer with a method for `copy.deepcopy`."""

    def __init__(self, how):
        super().__init__(4, 4)
        self.how, self.was_copied = how, False

    def __deepcopy__(self, memo):
        return self.how(self, memo)


def copies_attributes(layer, memo):
    made = memo[id(layer)] = Copied.__new__(Copied)
    made.__dict__.update(copy.deepcopy(vars(layer), memo))
    made.was_copied = True
    return made


def shares_itself(layer, memo):
    return layer


def makes_another(layer, memo):
    made = Copied(layer.how)
    made.load_state_dict(layer.state_dict())
    return made


def test_deepcopy_of_the_user_is_obeyed():
    """Its result is the replica, with the parameters of the replica."""
    model = nn.Sequential(Copied(copies_attributes))
    for replica in replicas(model).current:
        assert replica.module[0].was_copied
        assert replica.original_of(replica.module[0].weight) is model[0].weight


@pytest.mark.parametrize(
    ("how", "says"),
    [(shares_itself, "is the module itself"), (makes_another, "has another parameter 'weight'")],
)
def test_deepcopy_that_makes_no_replica_is_refused(how, says):
    """A module that lanes would share, or parameters that would not learn, are named with their path."""
    with pytest.raises(ReplicaError, match=rf"no replica of '0' can be made: .*{says}.*__deepcopy__"):
        replicas(nn.Sequential(Copied(how)))


class Graphed(nn.Module):
    """A parameter, a buffer, and a layer, for torch.fx."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4))
        self.register_buffer("shift", torch.rand(4))
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x) * self.scale + self.shift


def test_modules_of_torch_fx_are_copied():
    """Their own `__deepcopy__` would register views as parameters, which torch refuses."""
    model = torch.fx.symbolic_trace(Graphed())
    want = model(X)
    with parallel(model, TWO):
        output = model(X)
        output.sum().backward()
    assert_close(output, want)
    assert all(parameter.grad is not None for parameter in model.parameters())


class Cached(nn.Linear):
    """A layer with a cache of its class."""

    @functools.lru_cache(maxsize=8)  # noqa: B019
    def factor(self, number):
        return self.weight.detach().sum() * number

    def forward(self, x):
        return super().forward(x) * self.factor(2)


def test_a_cache_of_a_class_keeps_no_replica_alive():
    """`functools.lru_cache` holds the replicas that the method was called on until the block ends."""
    model = Cached(4, 4)
    with torch.no_grad(), parallel(model, TWO) as p:
        assert_close(model(X), nn.Linear.forward(model, X) * model.weight.sum() * 2)
        found = [weakref.ref(replica.module) for replica in p._session.pool.refresh()]
    del p
    gc.collect()
    assert [reference() for reference in found] == [None, None]


class Referring(nn.Module):
    """Reaches its layers through weak dictionaries, a method of a list, defaults, and a wrapped function."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.by_name = weakref.WeakValueDictionary(a=self.a)
        self.scales = weakref.WeakKeyDictionary({self.b: 2.0})
        self.seen = []
        self.note = self.seen.append
        inner = self.c.__call__

        @functools.wraps(inner)
        def wrapped(x, *, layer=self.b):
            return inner(layer(x))

        self.wrapped = functools.partial(wrapped)

    def forward(self, x):
        self.note(len(self.seen))
        (scale,) = [scale for layer, scale in self.scales.items() if layer is self.b]
        return self.wrapped(self.by_name["a"](x)) * scale + len(self.seen)


def test_references_lead_to_the_modules_of_the_replica():
    """Every lane runs its own modules, however the model refers to them."""
    model = Referring()
    modules = {}
    for name in "abc":
        getattr(model, name).register_forward_hook(
            lambda module, *_, name=name: modules.setdefault(name, set()).add(module)
        )
    want = model.c(model.b(model.a(X))) * 2 + 1
    modules.clear()
    with pytest.warns(UserWarning, match="the model wrote 'seen'"), torch.no_grad(), parallel(model, TWO):
        assert_close(model(X), want)
    assert {name: len(found) for name, found in modules.items()} == {"a": 2, "b": 2, "c": 2}
    assert model.seen == []
    assert not {model.a, model.b, model.c} & set().union(*modules.values())


def test_chains_that_are_too_long_are_refused():
    """`copy.deepcopy` recurses once per object in a chain of lists. The error says what to do."""
    model = nn.Linear(4, 4)
    model.chain = chain = []
    for _ in range(5000):
        chain.append([])
        chain = chain[0]
    with pytest.raises(ReplicaError, match=r"too long for copy\.deepcopy.*setrecursionlimit"):
        replicas(model)


def test_fully_sharded_modules_are_refused(monkeypatch):
    """A module that is parallel already is named."""
    fsdp = pytest.importorskip("torch.distributed.fsdp")

    class Sharded(nn.Linear):
        pass

    monkeypatch.setattr(fsdp, "FSDPModule", Sharded)
    with pytest.raises(ReplicaError, match="no replica of submodule '0' can be made: Sharded is parallel already"):
        replicas(nn.Sequential(Sharded(4, 4)))
