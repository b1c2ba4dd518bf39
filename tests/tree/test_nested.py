"""Flatten and rebuild nested values: containers keep their types, and every leaf has an address."""

from __future__ import annotations

import collections
import dataclasses
import enum
import threading
import types
from collections import OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parawrap.tree import Opaque, addresses, flatten, flatten_call, keep_whole, mismatch, unflatten


class Point(NamedTuple):
    x: Any
    y: Any


class LabelledPoint(Point):
    """A subclass of a namedtuple that adds a method."""

    def swapped(self):
        return LabelledPoint(self.y, self.x)


@dataclasses.dataclass
class Plain:
    a: Any
    b: Any = 3


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    a: Any
    b: Any = None


@dataclasses.dataclass
class Unset:
    a: Any
    late: Any = dataclasses.field(init=False)


@dataclasses.dataclass
class Derived:
    a: Any
    twice: Any = dataclasses.field(init=False)

    def __post_init__(self):
        self.twice = (self.a, self.a)


@dataclasses.dataclass
class Inherited(Plain):
    c: Any = None


@dataclasses.dataclass
class Output(OrderedDict):
    """A dataclass that is also an OrderedDict with the same values, like ModelOutput of transformers."""

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


class Shape(tuple):
    """A tuple subclass without __slots__."""

    __slots__ = ()


class Options(dict):
    """A dict subclass."""


class Batch(UserDict):
    """A Mapping that is not a dict, like BatchEncoding of transformers."""


class ReadOnly(Mapping):
    """A read-only Mapping with a constructor that takes a mapping."""

    def __init__(self, items):
        self._items = dict(items)

    def __getitem__(self, key):
        return self._items[key]

    def __iter__(self):
        return iter(self._items)

    def __len__(self):
        return len(self._items)


def rebuilt(value):
    leaves, spec = flatten(value)
    return unflatten(spec, leaves)


def alike(one: Any, other: Any) -> bool:
    """Return True if two nested values and all their types are equal."""
    if type(one) is not type(other):
        return False
    if dataclasses.is_dataclass(one) and not isinstance(one, Mapping):
        names = [f.name for f in dataclasses.fields(one)]
        return all(
            hasattr(one, n) == hasattr(other, n) and alike(getattr(one, n, None), getattr(other, n, None)) for n in names
        )
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(map(alike, one, other))
    return one is other or one == other


scalars = st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.builds(torch.Size, st.just((2, 3)))
keys = st.text("abc", min_size=1, max_size=3)


def _containers(values):
    few = st.lists(values, max_size=3)
    items = st.dictionaries(keys, values, max_size=3)
    return st.one_of(
        few,
        items,
        few.map(tuple),
        few.map(Words),
        few.map(Shape),
        few.map(deque),
        items.map(OrderedDict),
        items.map(lambda found: defaultdict(list, found)),
        items.map(Options),
        items.map(Batch),
        items.map(ReadOnly),
        st.builds(Point, values, values),
        st.builds(LabelledPoint, values, values),
        st.builds(Plain, values, values),
        st.builds(Inherited, values, values, values),
        st.builds(Frozen, values),
        st.builds(Slotted, values, values),
        st.builds(Unset, values),
        st.builds(Derived, values),
        st.builds(Output, values, values),
    )


trees = st.recursive(scalars, _containers, max_leaves=12)


@given(trees)
def test_a_rebuilt_value_has_the_original_types(tree):
    """Flattening and rebuilding returns an equal value with equal types at every level."""
    assert alike(rebuilt(tree), tree)


@given(trees)
def test_every_leaf_has_a_unique_address(tree):
    """There is one address per leaf, all addresses differ, and all start at the root."""
    leaves, spec = flatten(tree)
    found = addresses(spec, ("output",))
    assert len(found) == len(leaves) == len(set(found))
    assert all(address.startswith("output") for address in found)


@given(trees)
def test_an_address_evaluates_to_its_leaf(tree):
    """Evaluating the address of a leaf on the rebuilt value returns that leaf."""
    leaves, spec = flatten(tree)
    marks = [object() for _ in leaves]
    output = unflatten(spec, marks)
    for address, mark in zip(addresses(spec, ("output",)), marks, strict=True):
        assert eval(address, {"output": output}) is mark


@given(trees, trees)
def test_mismatch_finds_a_place_if_structures_differ(one, other):
    """Two trees have a mismatch exactly if their specs differ."""
    specs = [flatten(one)[1], flatten(other)[1]]
    assert mismatch([specs[0], flatten(one)[1]], "output") is None
    found = mismatch(specs, "output")
    assert (found is None) == (specs[0] == specs[1])


def test_addresses_read_like_python():
    """Addresses show keys in quotes, positions as numbers, and dataclass fields as attributes."""
    _, spec = flatten(((torch.zeros(1), [Plain(1)]), {"batch": {"mask": Frozen(2)}, "n": Point(3, 4)}))
    found = addresses(spec, ("args", "kwargs"))
    assert found[:3] == ["args[0]", "args[1][0].a", "args[1][0].b"]
    assert 'kwargs["batch"]["mask"].a' in found


def test_a_bare_leaf_is_addressed_by_its_root():
    """The address of a value outside any container is the root."""
    leaves, spec = flatten(5)
    assert (leaves, addresses(spec, ("output",))) == ([5], ["output"])


def test_none_is_a_leaf():
    """None is counted as a leaf and rebuilt in its place."""
    leaves, spec = flatten([None, 1, None])
    assert leaves == [None, 1, None]
    assert addresses(spec, ("v",)) == ["v[0]", "v[1]", "v[2]"]


def test_a_torch_size_is_a_leaf():
    """A torch.Size is one value, not a tuple of numbers."""
    assert flatten(torch.zeros(2, 3).shape)[0] == [torch.Size((2, 3))]


def test_a_structure_that_torch_returns_keeps_its_type():
    """Results of max and topk are rebuilt as their types in torch.return_types."""
    found = rebuilt(torch.tensor([[1.0, 2.0]]).max(1))
    assert type(found) is torch.return_types.max
    assert found.indices.tolist() == [1]


def test_a_model_output_keeps_attributes_and_items_in_step():
    """A rebuilt model output has the same unset fields, and its attributes and items agree."""
    found = rebuilt(Output(logits=1))
    assert type(found) is Output
    assert (dict(found), found.logits, found.hidden) == ({"logits": 1}, 1, None)


def test_post_init_does_not_run_again():
    """A dataclass is rebuilt without its checks, because a shard may hold values that the checks refuse."""
    runs = []

    @dataclasses.dataclass(frozen=True)
    class Counted:
        a: Any

        def __post_init__(self):
            runs.append(self.a)

    assert rebuilt(Counted(1)) == Counted(1)
    assert len(runs) == 2  # the two that this test made


def test_a_dict_keeps_its_order():
    """A rebuilt dict has its keys in insertion order."""
    assert list(rebuilt({"b": 1, "a": 2})) == ["b", "a"]


def test_a_dict_may_have_keys_that_cannot_be_sorted():
    """A dict with keys of several types is rebuilt."""
    value = {1: "one", "a": "letter", None: "nothing"}
    assert rebuilt(value) == value


def test_a_deque_keeps_its_bound():
    """A rebuilt deque has its maxlen."""
    assert rebuilt(deque([1, 2], maxlen=2)).maxlen == 2


def test_a_default_dict_keeps_its_factory():
    """A rebuilt defaultdict has its default factory."""
    assert rebuilt(defaultdict(list, a=1))["new"] == []


def test_a_subclass_of_default_dict_keeps_its_factory():
    """A rebuilt instance of a defaultdict subclass has its default factory."""

    class Bag(defaultdict):
        pass

    assert rebuilt(Bag(list, a=1))["new"] == []


def test_a_read_only_proxy_is_rebuilt():
    """A mappingproxy is rebuilt as a mappingproxy."""
    assert rebuilt(types.MappingProxyType({"a": 1})) == {"a": 1}


def test_a_counter_is_rebuilt():
    """A Counter keeps its counts, although its constructor counts its arguments."""
    assert rebuilt(collections.Counter("aab")) == collections.Counter(a=2, b=1)


def test_a_dataclass_keeps_attributes_outside_its_fields():
    """A rebuilt dataclass has the attributes that __post_init__ added."""

    @dataclasses.dataclass
    class Cached:
        a: Any

        def __post_init__(self):
            self.note = "beside the fields"

    assert rebuilt(Cached(1)).note == "beside the fields"


def test_a_module_that_is_a_dataclass_is_a_leaf():
    """A module stays one leaf even if its class is a dataclass, because its fields do not suffice to rebuild it."""

    @dataclasses.dataclass(eq=False)
    class Head(torch.nn.Module):
        width: int = 3

        def __post_init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(self.width, 1)

    head = Head()
    assert flatten(head)[0] == [head]


def test_an_exception_that_is_a_dataclass_survives():
    """An exception with dataclass fields is kept or rebuilt."""

    @dataclasses.dataclass
    class Failure(Exception):
        a: int

    found = rebuilt(Failure(3))
    assert (type(found), found.a) == (Failure, 3)


def test_enum_members_keep_their_identity():
    """A member of an Enum is one leaf, even if its class is also a tuple."""

    class Corner(tuple, enum.Enum):
        TOP = (0, 1)

    assert rebuilt(Corner.TOP) is Corner.TOP


def test_a_list_subclass_keeps_its_attributes():
    """A rebuilt list subclass has its attributes."""

    class Tagged(list):
        pass

    value = Tagged([1, 2])
    value.tag = "validation"
    assert rebuilt(value).tag == "validation"


def test_a_class_that_only_looks_like_a_list_is_a_leaf():
    """UserList does not inherit from list, so it is one leaf."""
    value = UserList([1])
    assert flatten(value)[0][0] is value


def test_the_fast_path_for_tensors_gives_the_same_spec():
    """A call with a few tensors has the same spec on the fast path and on the general path."""
    x, y = torch.zeros(2), torch.ones(2)
    leaves, spec = flatten_call((x, y), {})
    slow_leaves, slow_spec = flatten(((x, y), {}))
    assert spec == slow_spec
    assert all(map(lambda one, other: one is other, leaves, slow_leaves))
    assert flatten_call((), {})[1] == flatten(((), {}))[1]


@pytest.mark.parametrize(
    ("one", "other", "place"),
    [
        ({"a": [1]}, {"a": [1, 2]}, 'output["a"]'),
        ({"a": 1}, {"b": 1}, "output"),
        ((1, {"x": (1,)}), (1, {"x": 1}), 'output[1]["x"]'),
        ([1, [2]], [1, {"k": 2}], "output[1]"),
    ],
)
def test_mismatch_names_the_innermost_place(one, other, place):
    """The mismatch is the deepest place that both trees have, with a description of each side."""
    found = mismatch([flatten(one)[1], flatten(other)[1]], "output")
    assert found is not None
    assert found[0] == place
    assert found[1][0] != found[1][1]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (OrderedDict(a=1, b=2), OrderedDict(b=2, a=1)),
        (Options(a=1, b=2), Options(b=2, a=1)),
        ({1: 0}, {"1": 0}),
        (deque([1], maxlen=2), deque([1], maxlen=3)),
        (defaultdict(list, a=1), defaultdict(dict, a=1)),
    ],
    ids=["OrderedDict", "dict-subclass", "keys-of-two-types", "deque", "defaultdict"],
)
def test_trees_that_differ_are_described_differently(one, other):
    """The descriptions of two unequal structures differ."""
    specs = [flatten(one)[1], flatten(other)[1]]
    found = mismatch(specs, "output")
    assert (found is None) == (specs[0] == specs[1])
    if found is not None:
        assert found[1][0] != found[1][1]


def test_keep_whole_makes_an_instance_one_leaf():
    """After keep_whole, an instance is one wrapped leaf, and rebuilding returns the instance."""

    class Cargo:
        pass

    keep_whole(Cargo)
    cargo = Cargo()
    leaves, spec = flatten({"cargo": cargo})
    assert [type(leaf) for leaf in leaves] == [Opaque]
    assert leaves[0].value is cargo
    assert unflatten(spec, leaves)["cargo"] is cargo
    assert unflatten(spec, ["bare"])["cargo"] == "bare"


@pytest.mark.parametrize("base", [list, tuple, dict])
def test_keep_whole_makes_a_container_one_leaf(base):
    """keep_whole applies to containers too, even after an instance was flattened."""
    cls = type("Crate", (base,), {})
    crate = cls()
    assert flatten(crate)[0] == []
    keep_whole(cls)
    keep_whole(cls)
    (leaf,), spec = flatten(crate)
    assert leaf.value is crate
    assert unflatten(spec, [leaf]) is crate


def test_keep_whole_makes_a_namedtuple_one_leaf():
    """keep_whole overrides optree's rule for namedtuples."""
    cls = namedtuple("Sealed", "a b")
    keep_whole(cls)
    sealed = cls(1, 2)
    assert [leaf.value for leaf in flatten(sealed)[0]] == [sealed]


def test_an_opaque_leaf_stays_one_leaf():
    """A container inside Opaque is one leaf."""
    opaque = Opaque(["a", "b"])
    leaves, spec = flatten(([opaque], {}))
    assert len(leaves) == 1
    assert leaves[0] is opaque
    assert addresses(spec, ("args", "kwargs")) == ["args[0]"]


def test_threads_may_flatten_a_new_type_at_once():
    """All threads flatten a new container type, whichever thread registers it."""
    for _ in range(20):
        cls = dataclasses.make_dataclass("Stranger", [("a", Any), ("b", Any)])
        gate = threading.Barrier(4)
        found: list[Any] = []

        def meet(cls=cls, gate=gate, found=found):
            gate.wait()
            try:
                found.append(flatten([cls(1, 2)])[0])
            except BaseException as error:
                found.append(error)

        threads = [threading.Thread(target=meet) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [[1, 2]] * 4
