"""`Snapshot`: every change of the objects that a module holds is detected, named, and put back, and nothing else."""

from __future__ import annotations

from collections import OrderedDict, deque
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from parawrap.replicas._snapshot import ABSENT, Snapshot
from parawrap.replicas._survey import Survey


class Slotted:
    """An object with a slot and without a `__dict__`."""

    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class Net(nn.Sequential):
    """A model with every kind of container."""

    def __init__(self):
        super().__init__(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.steps = [self[0], "word"]
        self.table = {"inner": {"scale": 2.0}}
        self.recent = deque([1, 2])
        self.kinds = {"a"}
        self.state = SimpleNamespace(h=None)
        self.slotted = Slotted(1)
        factor = 1.0

        def scaled(x):
            return self[0](x) * factor

        self.scaled = scaled


def watch(module):
    return Snapshot((node, node.value) for node in Survey(module).copied)


def sets_an_attribute(module):
    module[0].flag = 1


def sets_another_value(module):
    module[0].out_features = 7


def deletes_an_attribute(module):
    del module[0].in_features


def renames_an_attribute(module):
    module.first = vars(module).pop("steps")


def replaces_a_parameter(module):
    module[0].weight = nn.Parameter(torch.zeros(2, 2))


def replaces_a_buffer(module):
    module[1].running_mean = torch.ones(2)


def replaces_the_parameters(module):
    module[0]._parameters = {"weight": nn.Parameter(torch.zeros(2, 2)), "bias": None}


def replaces_the_dict(module):
    module[0].__dict__ = dict(vars(module[0]))


def swaps_a_child(module):
    module[0] = nn.Identity()


def adds_a_child(module):
    module.append(nn.ReLU())


def changes_the_class(module):
    module[0].__class__ = type("Other", (nn.Linear,), {})


def changes_the_mode(module):
    module[1].eval()


def adds_a_hook(module):
    module[1].register_forward_hook(lambda *_: None)


def appends_to_a_list(module):
    module.steps.append(1)


def sets_an_item(module):
    module.steps[1] = "other"


def sets_a_value_deep_inside(module):
    module.table["inner"]["scale"] = 3.0


def appends_to_a_deque(module):
    module.recent.append(3)


def adds_to_a_set(module):
    module.kinds.add("b")


def sets_an_attribute_of_an_object(module):
    module.state.h = 1


def sets_a_slot(module):
    module.slotted.value = 2


def sets_a_variable_of_a_closure(module):
    module.scaled.__closure__[1].cell_contents = nn.ReLU()


CHANGES = [
    sets_an_attribute,
    sets_another_value,
    deletes_an_attribute,
    renames_an_attribute,
    replaces_a_parameter,
    replaces_a_buffer,
    replaces_the_parameters,
    replaces_the_dict,
    swaps_a_child,
    adds_a_child,
    changes_the_class,
    changes_the_mode,
    adds_a_hook,
    appends_to_a_list,
    sets_an_item,
    sets_a_value_deep_inside,
    appends_to_a_deque,
    adds_to_a_set,
    sets_an_attribute_of_an_object,
    sets_a_slot,
    sets_a_variable_of_a_closure,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_detected_until_a_new_watch(change):
    """After a change, the watch is not intact at every check. A new watch is intact."""
    module = Net()
    seen = watch(module)
    assert seen.intact()
    change(module)
    assert not seen.intact()
    assert not seen.intact()
    assert watch(module).intact()


def test_a_change_that_was_undone_is_not_a_change():
    """If a value changes and changes back, the watch is intact. The next change is detected."""
    module = Net()
    seen = watch(module)
    features = module[0].out_features
    module[0].out_features = 7
    module[0].out_features = features
    assert seen.intact()
    module[0].out_features = 7
    assert not seen.intact()


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_another_order_of_children_is_detected(kind):
    """Reordering a dict is a change, which is put back."""
    module = Net()
    module._modules = kind(module._modules)
    seen = watch(module)
    module._modules["0"] = module._modules.pop("0")
    assert not seen.intact()
    (change,) = seen.changes()
    assert (change.key, change.before, change.now) == (None, ["0", "1"], ["1", "0"])
    seen.restore()
    assert [*module._modules] == ["0", "1"]
    assert seen.intact()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (changes_the_mode, "[1].training"),
        (sets_a_value_deep_inside, ".table['inner']['scale']"),
        (swaps_a_child, "[0]"),
        (adds_a_child, "[2]"),
        (deletes_an_attribute, "[0].in_features"),
        (appends_to_a_list, "steps"),
    ],
)
def test_changes_are_named(change, named):
    """A change has the place of the value. A value that was added or removed was or is absent."""
    module = Net()
    seen = watch(module)
    assert seen.changes() == []
    change(module)
    (found,) = seen.changes()
    path = found.node.path if found.key is None else found.node.path_of(found.key)
    assert path.replace("0", "[0]").replace("1", "[1]").replace("2", "[2]").strip(".") == named.strip(".")
    assert (found.before is ABSENT) == (change is adds_a_child)
    assert (found.now is ABSENT) == (change is deletes_an_attribute)


@pytest.mark.parametrize("change", [each for each in CHANGES if each is not changes_the_class])
def test_changes_are_put_back(change):
    """After `restore`, the snapshot is intact."""
    module = Net()
    seen = watch(module)
    change(module)
    seen.restore()
    assert seen.intact()


def test_a_change_that_is_taken_is_no_change():
    """After `take`, the snapshot holds the new value, and detects the next one."""
    module = Net()
    seen = watch(module)
    module[0].out_features = 7
    seen.take(seen.changes())
    assert seen.intact()
    module[0].out_features = 8
    assert not seen.intact()
