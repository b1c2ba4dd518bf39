"""Flatten and rebuild nested values: containers keep their types, and every leaf has an address."""

from __future__ import annotations

import dataclasses
import enum
import types
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from typing import Any

import pytest
import torch

from parawrap.tree import WholeLeaf, addresses, flatten, keep_whole, parts_below, unflatten
from tests.helpers.properties import given, st
from tests.helpers.same import assert_same

Point = namedtuple("Point", "x y")


@dataclasses.dataclass
class Plain:
    a: Any
    late: Any = dataclasses.field(init=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    a: Any
    b: Any = None


@dataclasses.dataclass
class Checked:
    """A dataclass with checks and an attribute that is not a field."""

    a: Any

    def __post_init__(self):
        Checked.runs += 1
        self.note = "beside the fields"


Checked.runs = 0


@dataclasses.dataclass
class Output(OrderedDict):
    """A dataclass that is also an OrderedDict with the same values, like ModelOutput of
    transformers.
    """

    logits: Any = None
    hidden: Any = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class Words(list):
    """A list subclass."""


class Options(dict):
    """A dict subclass."""


class Batch(UserDict):
    """A Mapping that is not a dict, like BatchEncoding of transformers."""


class GetDict(dict):
    __getattr__ = dict.__getitem__


class AttrDict(dict):
    def __init__(self, **items):
        super().__init__(items)
        self.__dict__ = self


class Bag(defaultdict):
    """A subclass of defaultdict."""


def rebuilt(value):
    leaves, spec = flatten(value)
    return unflatten(spec, leaves)


def containers(values):
    few = st.lists(values, max_size=3)
    items = st.dictionaries(st.text("abc", min_size=1, max_size=3), values, max_size=3)
    sequences = [few.map(kind) for kind in (list, tuple, Words, deque)]
    mappings = [
        items.map(kind)
        for kind in (dict, OrderedDict, Options, Batch, lambda found: Bag(list, found))
    ]
    records = [st.builds(kind, values, values) for kind in (Point, Slotted, Output)]
    return st.one_of(
        *sequences, *mappings, *records, st.builds(Plain, values), st.builds(Checked, values)
    )


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=3)
    | st.builds(torch.Size, st.just((2, 3)))
)
trees = st.recursive(scalars, containers, max_leaves=12)


@given(trees)
def test_rebuilt_values_and_addresses(tree):
    """A rebuilt value has equal types at every level; evaluating the address of a leaf returns that
    leaf.
    """
    leaves, spec = flatten(tree)
    assert_same(unflatten(spec, leaves), tree)
    marks = [object() for _ in leaves]
    output = unflatten(spec, marks)
    found = addresses(spec, "output")
    assert len(found) == len(leaves) == len(set(found))
    for address, mark in zip(found, marks, strict=True):
        assert eval(address, {"output": output}) is mark


def test_containers_keep_what_they_are():
    """Bounds, factories, attributes, orders, fields that are not set, and the types of
    torch.return_types.
    """
    assert rebuilt(deque([1, 2], maxlen=2)).maxlen == 2
    assert rebuilt(defaultdict(list, a=1))["new"] == rebuilt(Bag(list, a=1))["new"] == []
    for value in (Words([1]), Options(a=1)):
        value.tag = "validation"
        assert rebuilt(value).tag == "validation"
    output = rebuilt(Output(logits=1))
    assert (type(output), dict(output), output.logits, output.hidden) == (
        Output,
        {"logits": 1},
        1,
        None,
    )
    found = rebuilt(torch.tensor([[1.0, 2.0]]).max(1))
    assert (type(found), found.indices.tolist()) == (torch.return_types.max, [1])
    for value in (
        {1: "one", "a": "letter", None: 0},
        {"b": 1, "a": 2},
        types.MappingProxyType({"a": 1}),
        Counter("aab"),
    ):
        assert rebuilt(value) == value
        assert [*rebuilt(value)] == [*value]
        assert type(rebuilt(value)) in (type(value), dict)
    for cls in (GetDict, AttrDict):
        assert rebuilt(cls(a=1)).a == 1
    value = Checked(1)
    runs = Checked.runs
    assert rebuilt(value).note == "beside the fields"
    assert Checked.runs == runs


class Corner(tuple, enum.Enum):
    TOP = (0, 1)


@pytest.mark.parametrize(
    "value",
    [Corner.TOP, torch.nn.ReLU(), UserList([1]), torch.Size((2, 3)), None, "text"],
    ids=repr,
)
def test_values_that_are_one_leaf(value):
    """Enum members, modules, sizes, and classes that only look like a list are one leaf."""
    assert flatten(value)[0][0] is value
    assert rebuilt(value) is value


@pytest.mark.parametrize("bases", [(), (list,), (Point,)], ids=["plain", "list", "namedtuple"])
def test_keep_whole_makes_one_leaf(bases):
    """A class that is kept whole makes one leaf, also after an instance was flattened. Rebuilding
    returns the instance, or what took its place.
    """
    cls = type("Cargo", bases, {})
    value = cls(1, 2) if bases == (Point,) else cls()
    flatten(value)
    keep_whole(cls)
    keep_whole(cls)
    (leaf,), spec = flatten({"held": value})
    assert type(leaf) is WholeLeaf
    assert [part.value for part in parts_below(value)] == [value]
    assert unflatten(spec, [leaf])["held"] is leaf.value is value
    assert unflatten(spec, ["bare"])["held"] == "bare"
    assert flatten([WholeLeaf(["a", "b"])])[0][0].value == ["a", "b"]
