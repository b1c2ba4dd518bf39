"""Calls that cannot be cut: the error names the argument, what is wrong with it, and the `in_dims` that settle it."""

from __future__ import annotations

import array
import itertools
import random
import threading
from collections import UserList, deque
from collections.abc import Iterator

import pytest
import torch
from torch.nn.utils import rnn

from parawrap.shards import Cutter, Parameters, uneven
from tests.helpers.shards import cut, cutter, planned, uncut

numpy = pytest.importorskip("numpy")

ROWS = torch.zeros(3, 2)

# Row counts


@pytest.mark.parametrize(
    ("args", "kwargs", "parts"),
    [
        (
            (torch.zeros(64, 3),),
            {"mask": torch.zeros(2, 3)},
            ['kwargs["mask"] has 2 on dim 0', "args[0] has 64", 'in_dims={"mask": None}'],
        ),
        ((ROWS, {"k": torch.zeros(4)}), {}, ['args[1]["k"] has 4', "args[0] has 3", 'in_dims={"y": {"k": None}}']),
        ((ROWS, None, None, torch.zeros(4)), {}, ["args[3] has 4", 'in_dims={"rest": None}']),
        ((ROWS, [torch.zeros(4)] * 3), {}, ["args[1][0] has 4", 'in_dims={"y": None}', 'one tensor per row, give "items"']),
        ((ROWS, rnn.pack_sequence([torch.zeros(3), torch.zeros(2)])), {}, ["args[1] has 2", "args[0] has 3"]),
        ((torch.zeros(0), torch.zeros(3)), {}, ["args[1] has 3", "args[0] has 0"]),
    ],
    ids=["keyword", "nested", "rest", "list", "packed", "empty"],
)
def test_unequal_row_counts_are_refused(args, kwargs, parts):
    message = uncut(cutter(), *args, **kwargs)
    for part in parts:
        assert part in message


@pytest.mark.parametrize("entry", [0, "items"])
@pytest.mark.parametrize("texts", [["a", "b"], ["a", "b", "c", "d"], ("a", "b")])
def test_sequences_must_have_the_rows(entry, texts):
    message = uncut(cutter(in_dims={"texts": entry}), ROWS, texts=texts)
    assert f'kwargs["texts"] has {len(texts)} on dim 0, args[0] has 3' in message


@pytest.mark.parametrize("dim", [2, -3])
def test_a_dim_that_no_tensor_has_is_refused(dim):
    message = uncut(Cutter(dim=dim), torch.zeros(4, 3))
    assert f"dim {dim} is out of range for args[0], of shape (4, 3): it has 2 dimensions" in message


def test_a_declared_dim_must_exist():
    assert "dim 1 is out of range for args[1]" in uncut(cutter(in_dims={"y": 1}), torch.zeros(4), torch.zeros(4))


@pytest.mark.parametrize(("rows", "counts"), [(12, "8 or 16"), (7, "8"), (17, "16 or 24")])
def test_a_batch_must_be_a_multiple_of_unit(rows, counts):
    message = uncut(Cutter(sizes=uneven, unit=8), torch.zeros(rows))
    for part in (f"args[0] has {rows} rows", "not a multiple of unit=8", f"a batch of {counts} rows"):
        assert part in message


@pytest.mark.parametrize(
    ("entry", "argument", "parts"),
    [
        ({"k": 0}, {"j": ROWS}, ["in_dims[\"y\"][\"k\"] is declared, and 'y' is a dict with ['j'] there"]),
        ({"k": {"i": 0}}, {"k": ROWS}, ['in_dims["y"]["k"]["i"] is declared', "'y' is a Tensor there"]),
        ((0, 0), [ROWS], ["in_dims[\"y\"] declares 2 items, and 'y' has 1 there"]),
        ({"k": (0,)}, {"k": (ROWS, ROWS)}, ['in_dims["y"]["k"] declares 1 items, and \'y\' has 2 there']),
    ],
    ids=["key", "leaf", "items", "nested"],
)
def test_in_dims_must_have_the_arguments_structure(entry, argument, parts):
    message = uncut(cutter(in_dims={"y": entry}), ROWS, argument)
    for part in parts:
        assert part in message


# Lists that may have one item per row


AMBIGUOUS = [
    *(["a", "b", "c"], [1, 2, 3], [{"k": 1}] * 3, ("a", "b", "c"), [[1, 2]] * 3, (224, 224, 3), (None, 1, 2.0)),
    *((True, False, True), [torch.tensor(1.0)] * 3, [torch.zeros(1)] * 3),
]


@pytest.mark.parametrize("texts", AMBIGUOUS, ids=range(len(AMBIGUOUS)))
def test_a_list_as_long_as_the_batch_is_ambiguous(texts):
    """Both values of `in_dims` settle it."""
    message = uncut(cutter(), ROWS, texts=texts)
    kind = f'kwargs["texts"] is a {type(texts).__name__} of 3 items with'
    for part in (kind, "the batch has 3 rows", 'in_dims={"texts": "items"} cuts it', 'in_dims={"texts": None} gives'):
        assert part in message
    assert ("with tensors of one row" in message) == (str(texts) == str([torch.zeros(1)] * 3))
    for shard in cut(cutter(in_dims={"texts": None}), ROWS, texts=texts):
        assert shard.kwargs["texts"] == texts
    first, second = cut(cutter(in_dims={"texts": "items"}), ROWS, texts=texts)
    assert (first.kwargs["texts"], second.kwargs["texts"]) == (texts[:2], texts[2:])


def test_a_nested_ambiguous_list_is_named():
    message = uncut(cutter(), ROWS, {"k": [["a", "b", "c"]]})
    assert 'args[1]["k"][0] is a list' in message
    assert 'in_dims={"y": None}' in message


def test_a_list_inside_a_declared_argument():
    """With in_dims={"batch": 0}, a list of texts inside the batch is never broadcast."""
    used = Cutter(in_dims={"batch": 0}, parameters=Parameters(lambda batch: batch))
    first, _ = cut(used, batch={"x": torch.zeros(4), "texts": ["a", "b", "c", "d"]})
    assert first.kwargs["batch"]["texts"] == ["a", "b"]


@pytest.mark.parametrize("rows", [0, 2, 3, 4])
def test_arrays_are_refused_at_any_length(rows):
    """All lanes would share the array, or it has one item per row."""
    message = uncut(cutter(), ROWS, numpy.arange(float(rows)))
    cures = ('in_dims={"y": "items"}', 'in_dims={"y": None}', "torch.from_numpy")
    for part in (f"args[1] is an array with {rows} rows, and the batch has 3", *cures):
        assert part in message


# Objects


class Settable:
    """An object of the user, with state."""


OBJECTS = {
    "iterator": lambda: iter("abc"),
    "generator": lambda: (each for each in "abc"),
    "set": lambda: {"a"},
    "random": lambda: random.Random(0),
    "lock": threading.Lock,
    "object": Settable,
    "counter": itertools.count,
}
SEQUENCES = {
    "range": lambda: range(3),
    "deque": lambda: deque("abc"),
    "array.array": lambda: array.array("i", [1, 2, 3]),
    "userlist": lambda: UserList("abc"),
    "numpy": lambda: numpy.arange(3),
}
"""Sequences that may have one item per row, whatever their length."""
PLACES = {
    "argument": (lambda value: value, lambda value: value, "", None),
    "dict": (lambda value: {"k": value}, lambda value: value["k"], '["k"]', {"k": None}),
    "list": (lambda value: [value], lambda value: value[0], "[0]", None),
}
"""How a value is wrapped and found again, its address, and the entry of `in_dims`."""


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("make", [*OBJECTS.values(), *SEQUENCES.values()], ids=[*OBJECTS, *SEQUENCES])
def test_objects_with_state_are_refused(make, place):
    """With None in `in_dims`, all lanes get the same object, or each its own deque."""
    wrap, find, address, entry = PLACES[place]
    for rows in (3, 5):
        value = make()
        message = uncut(cutter(), torch.zeros(rows, 2), texts=wrap(value)).replace("'", '"')
        assert f'kwargs["texts"]{address}' in message
        assert f'in_dims={{"texts": {entry}}}'.replace("'", '"') in message
        for shard in cut(cutter(in_dims={"texts": entry}), torch.zeros(rows, 2), texts=wrap(value)):
            got = find(shard.kwargs["texts"])
            assert got == value if type(value) is deque else got is value


@pytest.mark.parametrize("make", SEQUENCES.values(), ids=SEQUENCES)
def test_any_sequence_can_be_cut_by_item(make):
    value = make()
    assert 'in_dims={"texts": "items"}' in uncut(cutter(), ROWS, texts=value)
    first, second = cut(cutter(in_dims={"texts": "items"}), ROWS, texts=value)
    assert (len(first.kwargs["texts"]), len(second.kwargs["texts"])) == (2, 1)
    assert [*first.kwargs["texts"], *second.kwargs["texts"]] == list(value)
    assert type(first.kwargs["texts"]) is type(value)


@pytest.mark.parametrize("make", OBJECTS.values(), ids=OBJECTS)
def test_objects_pass_if_nothing_is_cut(make):
    """With one lane, with one row, and with torch's rules, which refuse iterators in cut calls."""
    value = make()
    cases = [({}, 3, 1), ({}, 1, 2), ({"lists_are_shared": True}, 3, 1)]
    cases += [] if isinstance(value, Iterator) else [({"lists_are_shared": True}, 3, 2)]
    for options, rows, lanes in cases:
        for shard in cut(cutter(**options), torch.zeros(rows), texts=value, lanes=lanes):
            assert shard.kwargs["texts"] is value
    if isinstance(value, Iterator):
        assert "a parallel block with in_dims=" in uncut(cutter(lists_are_shared=True), ROWS, texts=value)


class Holder:
    """An object of an unknown class that holds a value."""

    def __init__(self, value):
        self.value = value


class Slots:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


HOLDERS = {
    "attribute": Holder(torch.zeros(3)),
    "nested": Holder({"layers": [Holder((torch.zeros(1),))]}),
    "slot": Slots(torch.zeros(3)),
    "module": torch.nn.Linear(2, 2),
    "set": frozenset({torch.zeros(3)}),
    "method": Holder(torch.zeros(3)).__init__,
}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("unknown", HOLDERS.values(), ids=HOLDERS)
def test_unknown_holders_of_tensors_are_refused(unknown, rows):
    """Also in calls that are not cut. With None in `in_dims`, every lane gets the object."""
    kind = type(unknown).__name__
    message = uncut(cutter(), torch.zeros(rows), {"cache": unknown})
    length = "" if hasattr(unknown, "__len__") else ", rows=..."
    for part in (
        f'args[1]["cache"] is a {kind}, which holds tensors',
        f"register_split({kind}, split=..., join=...{length})",
        'in_dims={"y": {"cache": None}}',
    ):
        assert part in message
    for shard in cut(cutter(in_dims={"y": None}), torch.zeros(rows), unknown):
        assert shard.args[1] is unknown


def test_cycles_of_unknown_objects():
    one, other = Holder(None), Holder(None)
    one.value, other.value = other, one
    assert "a state that each lane would change" in uncut(cutter(), ROWS, one)
    other.tensor = torch.zeros(1)
    assert "register_split" in uncut(cutter(), ROWS, one)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("alone", [True, False])
def test_strided_nested_tensors_are_refused(dim, alone):
    """Torch cannot split them. With None in `in_dims`, every lane gets the same one."""
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    args = (nested,) if alone else (torch.zeros(2, 2), nested)
    message = uncut(cutter(dim=dim), *args)
    assert f"args[{len(args) - 1}] is a nested tensor" in message
    for shard in cut(cutter(in_dims={"x" if alone else "y": None}, dim=dim), *args):
        assert shard.args[-1] is nested


class Tagged(list):
    """A container with attributes."""


@pytest.mark.parametrize("make", [OBJECTS["iterator"], Settable, lambda: ["a"] * 3], ids=["iterator", "object", "list"])
def test_attributes_are_refused_like_arguments(make):
    value = Tagged([torch.zeros(3)])
    value.state = state = make()
    message = uncut(cutter(), ROWS, value)
    assert "args[1].state" in message
    assert 'in_dims={"y": {"state": None}}' in message
    for shard in cut(cutter(in_dims={"y": {"state": None}}), ROWS, value):
        assert shard.args[1].state is state or shard.args[1].state == state


# The hint for calls without tensors


@pytest.mark.parametrize(
    ("texts", "kind"),
    [(["a", "b"], "list"), (("a", "b"), "tuple"), (numpy.zeros(2), "array"), (["a"], None), (numpy.zeros(1), None)],
    ids=["list", "tuple", "array", "one", "one-array"],
)
def test_texts_alone_have_a_hint(texts, kind):
    """A call with texts or an array, and without tensors, runs plainly. The hint names both values of `in_dims`."""
    plan, _ = planned(cutter(), 1, texts=texts)
    assert plan.sizes == (0,)
    if kind is None:
        assert plan.hint is None
        return
    assert f'a call without tensors runs plainly: kwargs["texts"] is a {kind}' in plan.hint
    assert 'in_dims={"texts": "items"}; to keep the call plain, use in_dims={"texts": None}' in plan.hint
    assert planned(cutter(in_dims={"texts": None}), 1, texts=texts)[0].hint is None
    assert planned(cutter(), 1, texts=texts, lanes=1)[0].hint is None
    assert planned(cutter(lists_are_shared=True), 1, texts=texts)[0].hint is None
    assert planned(Cutter(), texts)[0].hint is None  # a parameter without a name
