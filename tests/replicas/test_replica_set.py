"""`ReplicaSet`: one copy of the module's structure per lane, with the module's parameters, refreshed in place."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from parawrap import ReplicaError
from parawrap.replicas import ReplicaSet, home_of

CPU = torch.device("cpu")


class Holds(nn.Module):
    """A model with a child under two names, a bound method, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.child = self.alias = nn.BatchNorm1d(2)
        self.bound = self.helper
        self.register_buffer("count", torch.zeros(()))
        self.step, self.config = 1, SimpleNamespace(scale=1.0)
        self.one, self.other = torch.zeros(2), torch.zeros(2)

    def helper(self):
        return self


def replicas(module, lanes=3, **options):
    made = ReplicaSet(module, [CPU] * lanes, **options)
    made.refresh()
    return made, [replica.module for replica in made.current]


def test_replicas_have_the_structure():
    """Parameters share memory, are not leaves, and lead to the originals; shared children and bound methods stay so."""
    model = Holds()
    made, modules = replicas(model)
    assert [replica.lane for replica in made.current] == [0, 1, 2]
    for replica, module in zip(made.current, modules, strict=True):
        assert module is not model
        assert module.child is module.alias
        assert module.bound() is module
        assert all(each._is_replica for each in module.modules())
        for mine, theirs in zip(module.parameters(), model.parameters(), strict=True):
            assert isinstance(mine, nn.Parameter)
            assert not mine.is_leaf
            assert mine.data_ptr() == theirs.data_ptr()
            assert replica.original_of(mine) is theirs
        assert replica.original_of(module.count) is model.count
        assert replica.original_of(torch.zeros(1)) is None


CHANGES = {
    "in place": lambda model: model.count.fill_(4),
    "number": lambda model: setattr(model, "step", 7),
    "buffer": lambda model: setattr(model, "count", torch.ones(())),
    "object": lambda model: setattr(model.config, "scale", 5.0),
    "mode": lambda model: (model.child.train(), model.child.eval()),
    "tie": lambda model: vars(model).update(dict.fromkeys(("one", "other"), torch.ones(2))),
    "child": lambda model: setattr(model, "alias", nn.BatchNorm1d(2).eval()),
    "parameter": lambda model: setattr(model.child, "weight", nn.Parameter(torch.zeros(2))),
}


@pytest.mark.parametrize("name", CHANGES)
def test_replicas_follow_changes(name):
    """New values are set in the same replicas, if the structure stays; a tensor is the lane's own copy, and ties stay."""
    model = Holds().eval()
    made, before = replicas(model)
    CHANGES[name](model)
    assert made.stale() or name == "mode"
    made.refresh()
    assert not made.stale()
    modules = [replica.module for replica in made.current]
    assert (list(map(id, modules)) == list(map(id, before))) == (name not in ("tie", "child", "parameter"))
    for replica in modules:
        assert (replica.step, replica.config.scale) == (model.step, model.config.scale)
        assert (replica.alias is replica.child) == (model.alias is model.child)
        assert (replica.one is replica.other) == (model.one is model.other)
        assert replica.child.weight.data_ptr() == model.child.weight.data_ptr()
        assert replica.one is not model.one
        assert torch.equal(replica.one, model.one)
        assert torch.equal(replica.count, model.count)
    modules[0].count.add_(3)
    made.current[0].write_back()
    assert torch.equal(model.count, modules[1].count + 3)


def test_home_of_a_module():
    """None without tensors. A model on two devices, and a model without data, have no replicas."""
    assert home_of(nn.Linear(2, 2)) == CPU
    assert home_of(nn.ReLU()) is None
    with pytest.raises(ReplicaError, match=r"'0\.weight' on cpu and '1\.weight' on meta"):
        home_of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")))
    with pytest.raises(ReplicaError, match=r"'0\.weight' is on the meta device and has no data to copy"):
        replicas(nn.Sequential(nn.Linear(2, 2, device="meta")))
    made, _ = replicas(nn.Linear(2, 2))
    assert (made.is_on(CPU), made.is_on(torch.device("meta")), made.has_model) == (True, False, True)
    assert not ReplicaSet(torch.neg, [CPU]).has_model
