"""Replicas: shells of the original, refreshed in place and never rebuilt for a changed value."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parawrap import ReplicaError
from parawrap.replicas import ReplicaSet, StandIn, home_of, put, restore

CPU = torch.device("cpu")


class Holds(nn.Module):
    """A model with every kind of attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.BatchNorm1d(2)
        self.alias = self.child
        self.bound = self.helper
        self.register_buffer("count", torch.zeros(()))

    def helper(self):
        return self

    def forward(self, x):
        return self.child(x)


def replicas(module, lanes=3):
    made = ReplicaSet(module, [CPU] * lanes)
    made.refresh()
    return made


def test_shells_have_dictionaries_and_buffers_of_their_own():
    """Setting an attribute or writing a buffer in one shell is seen nowhere else."""
    model = Holds()
    original, one, two = [each.module for each in replicas(model).replicas(3)]
    one.flag = 1
    one.count += 5
    assert original is model
    assert not hasattr(model, "flag")
    assert not hasattr(two, "flag")
    assert (model.count.item(), two.count.item()) == (0, 0)


def test_shared_submodules_stay_shared_in_a_shell():
    """A module under two names is one shell under two names."""
    _, one = [each.module for each in replicas(Holds(), 2).replicas(2)]
    assert one.child is one.alias


def test_bound_methods_are_bound_to_the_shell():
    """An attribute that is the model's own method belongs to the shell in it."""
    _, one = [each.module for each in replicas(Holds(), 2).replicas(2)]
    assert one.bound() is one


def test_it_is_stale_only_when_something_changed():
    """A fresh set is not stale; a buffer, an attribute, a child or the mode make it so; refresh ends it."""
    model = Holds().eval()
    made = replicas(model)
    changes = [
        lambda: model.count.add_(1),
        lambda: setattr(model, "flag", 2),
        lambda: setattr(model, "alias", nn.BatchNorm1d(2).eval()),
        lambda: model.child.train(),
        lambda: model.child.eval(),
        lambda: setattr(model.child, "weight", nn.Parameter(torch.zeros(2))),
    ]
    assert not made.stale()
    for change in changes:
        change()
        assert made.stale()
        made.refresh()
        assert not made.stale() or model.child.training


def test_a_changed_value_makes_no_new_shell():
    """The shells are the same objects after a refresh, with the new value."""
    model = Holds().eval()
    made = replicas(model)
    before = [id(module) for module in [each.module for each in made.replicas(3)]]
    model.count.fill_(4)
    made.refresh()
    assert [id(module) for module in [each.module for each in made.replicas(3)]] == before
    assert [module.count.item() for module in [each.module for each in made.replicas(3)]] == [4, 4, 4]
    assert made.freshness.refreshes == 1


def test_home_of_a_module():
    """The device of its tensors, None without any, and an error that names two when they are apart."""
    assert home_of(nn.Linear(2, 2)) == CPU
    assert home_of(nn.ReLU()) is None
    with pytest.raises(ReplicaError, match=r"0\.weight.*1\.weight"):
        home_of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")))


def test_put_and_restore_leave_no_trace():
    """What put puts, restore takes out again, and what was there before is back."""
    model = Holds()
    before = dict(vars(model))
    stand_in = StandIn(model.forward, lambda wrapped, instance, args, kwargs: "stood in")
    replaced = [("forward", stand_in, put(model, "forward", stand_in))]
    assert model(torch.zeros(2, 2)) == "stood in"
    restore(model, replaced)
    assert vars(model).keys() == before.keys()
