"""`Snapshot`: every change of the objects that a module holds is detected, named, and put back, and nothing else."""

from __future__ import annotations

from collections import OrderedDict, deque

import pytest
import torch
from torch import nn

from parawrap.replicas import Snapshot, Survey
from parawrap.replicas._snapshot import ABSENT
from tests.fuzz.models import SlottedBox


class Net(nn.Sequential):
    """A model with every kind of container."""

    def __init__(self):
        super().__init__(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.steps, self.recent, self.kinds = [self[0], "word"], deque([1, 2]), {"a"}
        self.table, self.slotted, factor = {"inner": {"scale": 2.0}}, SlottedBox(1), 1.0
        self.scaled = lambda x: self[0](x) * factor


def watch(module):
    return Snapshot((node, node.value) for node in Survey(module).copied)


CHANGES = [
    (lambda net: setattr(net[0], "flag", 1), "0.flag"),
    (lambda net: setattr(net[0], "out_features", 7), "0.out_features"),
    (lambda net: delattr(net[0], "in_features"), "0.in_features"),
    (lambda net: setattr(net, "first", vars(net).pop("steps")), None),
    (lambda net: setattr(net[0], "_parameters", {"weight": nn.Parameter(torch.zeros(2, 2)), "bias": None}), None),
    (lambda net: setattr(net[0], "__dict__", dict(vars(net[0]))), None),
    (lambda net: setattr(net[0], "__class__", type("Other", (nn.Linear,), {})), None),
    (lambda net: net[1].register_forward_hook(print), None),
    (lambda net: net.steps.__setitem__(1, "other"), "steps"),
    (lambda net: net.table["inner"].update(scale=3.0), "table['inner']['scale']"),
    (lambda net: net.recent.append(3), "recent"),
    (lambda net: net.kinds.add("b"), "kinds"),
    (lambda net: setattr(net.slotted, "items", 2), "slotted"),
    (lambda net: delattr(net.slotted, "items"), "slotted"),
    (lambda net: setattr(net.scaled.__closure__[1], "cell_contents", nn.ReLU()), None),
]
"""Changes, and their places. None if a change has several, or none."""


@pytest.mark.parametrize(("change", "place"), CHANGES, ids=range(len(CHANGES)))
def test_changes_are_seen_and_put_back(change, place):
    """At every check, until it is put back or a new snapshot is taken."""
    net = Net()
    seen = watch(net)
    assert seen.intact()
    assert seen.changes() == []
    change(net)
    assert not seen.intact()
    assert not seen.intact()
    assert watch(net).intact()
    if place is not None:
        (found,) = seen.changes()
        assert (found.node.path if found.key is None else found.node.path_of(found.key)) == place
        assert (found.before is ABSENT, found.now is ABSENT) == (place == "0.flag", place == "0.in_features")
    if type(net[0]).__name__ == "Other":  # the class of an object is not put back
        assert seen.changes() is None
        return
    seen.restore()
    assert seen.intact()


def test_undone_and_taken_changes():
    net = Net()
    seen = watch(net)
    features = net[0].out_features
    for net[0].out_features in (7, features):
        pass
    assert seen.intact()
    for net[0].out_features, enter in ((7, lambda: seen.take(seen.changes())), (8, seen.accept)):
        assert not seen.intact()
        enter()
        assert seen.intact()


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_another_order_is_a_change(kind):
    net = Net()
    net._modules = kind(net._modules)
    seen = watch(net)
    net._modules["0"] = net._modules.pop("0")
    assert not seen.intact()
    (change,) = seen.changes()
    assert (change.key, change.before, change.now) == (None, ["0", "1"], ["1", "0"])
    seen.restore()
    assert [*net._modules] == ["0", "1"]
