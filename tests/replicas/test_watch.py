"""`Watch` and `Ledger`: every change of a module's structure or tensors is detected, and nothing else."""

from __future__ import annotations

from collections import OrderedDict, deque
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from parawrap.replicas._copy_structure import Survey
from parawrap.replicas._detect_changes import Ledger, Watch


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
    return Watch(Survey(module).copied)


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


def test_another_order_of_children_is_detected():
    """Reordering an OrderedDict is a change."""
    module = Net()
    module._modules = OrderedDict(module._modules)
    seen = watch(module)
    module._modules.move_to_end("0")
    assert not seen.intact()


@pytest.mark.parametrize(
    ("change", "keeps_form", "is_of_atoms"),
    [
        (changes_the_mode, True, True),
        (sets_a_value_deep_inside, True, True),
        (sets_another_value, False, True),
        (replaces_a_parameter, True, False),
        (swaps_a_child, False, False),
        (adds_a_child, None, None),
    ],
    ids=["mode", "float", "int", "parameter", "module", "more keys"],
)
def test_changes_say_what_they_affect(change, keeps_form, is_of_atoms):
    """A change reports if outputs keep their form and if the values are atoms. For new keys, `changes()` is None."""
    module = Net()
    seen = watch(module)
    assert seen.changes() == []
    change(module)
    changes = seen.changes()
    if keeps_form is None:
        assert changes is None
        return
    assert [(each.keeps_form, each.is_of_atoms) for each in changes] == [(keeps_form, is_of_atoms)]
    seen.accept()
    assert seen.intact()


def half(tensor):
    tensor.data = tensor.data.half()


def other_memory(tensor):
    tensor.data = tensor.data.clone()


def transposed(tensor):
    tensor.data = tensor.data.t()


def fewer_rows(tensor):
    tensor.data = tensor.data[:1]


def freeze(tensor):
    tensor.requires_grad_(False)


@pytest.mark.parametrize("change", [half, other_memory, transposed, fewer_rows, freeze])
def test_another_form_of_a_tensor_is_detected(change):
    """The form of a tensor is its memory, strides, sizes, dtype, and requires_grad."""
    weight = nn.Parameter(torch.randn(3, 3))
    ledger = Ledger([weight], [])
    assert ledger.same_form()
    change(weight)
    assert not ledger.same_form()


def test_versions_show_writes_in_place():
    """An in-place write to a copied tensor is detected until `enter_versions` is called."""
    weight, other = torch.zeros(2), torch.zeros(2)
    ledger = Ledger([weight, other], [weight])
    weight.add_(1)
    other.add_(1)
    assert not ledger.unwritten()
    assert [id(tensor) for tensor in ledger.written()] == [id(weight)]
    ledger.enter_versions()
    assert ledger.unwritten()


def test_inference_tensors_count_as_written():
    """A tensor made in inference mode has no version counter, so it always counts as written."""
    with torch.inference_mode():
        weight = torch.zeros(2)
    ledger = Ledger([weight], [weight])
    assert not ledger.unwritten()
    assert ledger.written()[0] is weight
