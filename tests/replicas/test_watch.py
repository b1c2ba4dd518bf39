"""What a module looked like: every change to its tree is seen, also where torch tells no versions of dictionaries."""

from __future__ import annotations

from collections import OrderedDict, UserDict

import pytest
import torch
from torch import nn

from parawrap.replicas import _watch
from parawrap.replicas._watch import Watch, module_tree


@pytest.fixture(params=["versions", "no versions"], autouse=True)
def _versions(request, monkeypatch):
    if request.param == "no versions":
        monkeypatch.setattr(_watch, "_version", None)


def net():
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


def watch(module):
    return Watch([part for part, _ in module_tree(module)])


def sets_an_attribute(module):
    module[0].flag = 1


def sets_another_value(module):
    module[0].out_features = 7


def deletes_an_attribute(module):
    del module[0].in_features


def replaces_a_parameter(module):
    module[0].weight = nn.Parameter(torch.zeros(2, 2))


def replaces_a_buffer(module):
    module[1].running_mean = torch.ones(2)


def replaces_a_dictionary(module):
    module[0]._parameters = {"weight": nn.Parameter(torch.zeros(2, 2)), "bias": None}


def swaps_a_child(module):
    module[0] = nn.Identity()


def adds_a_child(module):
    module.append(nn.ReLU())


def becomes_another_class(module):
    module[0].__class__ = type("Other", (nn.Linear,), {})


def changes_mode(module):
    module[1].eval()


CHANGES = [
    sets_an_attribute,
    sets_another_value,
    deletes_an_attribute,
    replaces_a_parameter,
    replaces_a_buffer,
    replaces_a_dictionary,
    swaps_a_child,
    adds_a_child,
    becomes_another_class,
    changes_mode,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen_until_one_looks_anew(change):
    """Whatever is changed makes the watch say no, at every question; a new one says yes."""
    module = net()
    seen = watch(module)
    assert seen.intact()
    change(module)
    assert not seen.intact()
    assert not seen.intact()
    assert watch(module).intact()


def test_a_change_that_was_taken_back_is_none():
    """Another value and the one before again: nothing changed; the next change is seen all the same."""
    module = net()
    seen = watch(module)
    features = module[0].out_features
    module[0].out_features = 7
    module[0].out_features = features
    assert seen.intact()
    assert seen.intact()
    module[0].out_features = 7
    assert not seen.intact()


def test_another_order_of_children_is_seen():
    """Also in an OrderedDict, whose order may change without its version."""
    module = net()
    module._modules = OrderedDict(module._modules)
    seen = watch(module)
    assert seen.intact()
    module._modules.move_to_end("0")
    assert not seen.intact()


def test_any_mapping_may_be_in_the_place_of_a_dictionary():
    """What has no version is looked into."""
    module = net()
    vars(module[0])["_parameters"] = UserDict(module[0]._parameters)
    seen = watch(module)
    assert seen.intact()
    module[0].weight = nn.Parameter(torch.zeros(2, 2))
    assert not seen.intact()


def test_the_changed_modules_are_told():
    """Of a tree, those that are no longer what they were."""
    module = net()
    seen = watch(module)
    module[1].eval()
    assert seen.changed() == [module[1]]
