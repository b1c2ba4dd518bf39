"""Calls that cannot be cut: the error names the argument, what is wrong with it, and the `in_dims` that settle it."""

from __future__ import annotations

import array
import threading
from collections import UserList, deque
from collections.abc import Iterator

import pytest
import torch

from parawrap.engine.cut import Cutter, uneven_sizes
from tests.fuzz.models import SlottedBox
from tests.helpers.shards import cut, cutter, uncut

numpy = pytest.importorskip("numpy")

ROWS = torch.zeros(3, 2)

UNEQUAL = {
    "keyword": ((ROWS,), {"mask": ROWS[:2]}, ['kwargs["mask"] has 2 on dim 0', "args[0] has 3", 'in_dims={"mask": None}']),
    "nested": ((ROWS, {"k": torch.zeros(4)}), {}, ['args[1]["k"] has 4', "args[0] has 3", 'in_dims={"y": None}']),
    "parameters": (({"b": torch.zeros(4)}, ROWS), {}, ['args[0]["b"] has 4', "args[1] has 3", 'in_dims={"x": None}']),
    "rest": ((ROWS, None, None, torch.zeros(4)), {}, ["args[3] has 4", 'in_dims={"rest": None}']),
    "list": ((ROWS, [torch.zeros(4)] * 3), {}, ["args[1][0] has 4", 'in_dims={"y": None}', 'tensor per row, give "items"']),
    "empty": ((torch.zeros(0), torch.zeros(3)), {}, ["args[1] has 3", "args[0] has 0"]),
}


@pytest.mark.parametrize(("args", "kwargs", "parts"), UNEQUAL.values(), ids=UNEQUAL)
def test_unequal_row_counts_are_refused(args, kwargs, parts):
    message = uncut(cutter(), *args, **kwargs)
    for part in parts:
        assert part in message


def test_rows_of_declared_arguments():
    for entry, texts in ((0, ["a", "b"]), ("items", ["a", "b"]), ("items", ("a", "b", "c", "d"))):
        message = uncut(cutter(in_dims={"texts": entry}), ROWS, texts=texts)
        assert f'kwargs["texts"] has {len(texts)} on dim 0, args[0] has 3' in message
    for dim in (2, -3):
        message = uncut(Cutter(dim=dim), torch.zeros(4, 3))
        assert f"dim {dim} is out of range for args[0], of shape (4, 3): it has 2 dimensions" in message
    assert "dim 1 is out of range for args[1]" in uncut(cutter(in_dims={"y": 1}), torch.zeros(4), torch.zeros(4))
    message = uncut(Cutter(dim=1), None, torch.zeros(4), torch.zeros(5))
    assert "args[1] and args[2], of shape (4,): it has 1 dimensions" in message
    for entry, argument, text in (
        ({"k": 0}, {"j": ROWS}, "in_dims[\"y\"][\"k\"] is declared, and 'y' is a dict with ['j'] there"),
        ({"k": {"i": 0}}, {"k": ROWS}, 'in_dims["y"]["k"]["i"] is declared, and \'y\' is a Tensor there'),
        ({"k": (0,)}, {"k": (ROWS, ROWS)}, 'in_dims["y"]["k"] declares 1 items, and \'y\' has 2 there'),
    ):
        assert text in uncut(cutter(in_dims={"y": entry}), ROWS, argument)


def test_a_batch_is_a_multiple_of_unit():
    for rows, counts in ((12, "8 or 16"), (7, "8"), (17, "16 or 24")):
        message = uncut(Cutter(sizes=uneven_sizes, unit=8), torch.zeros(rows))
        for part in (f"args[0] has {rows} rows", "not a multiple of unit=8", f"a batch of {counts} rows"):
            assert part in message


def test_a_list_as_long_as_the_batch():
    """It may have one item per row. Both values of `in_dims` settle it."""
    for texts in (["a", "b", "c"], (224, 224, 3), [[1, 2], {"k": 1}, None], [torch.tensor(1.0)] * 3, [torch.zeros(1)] * 3):
        message = uncut(cutter(), ROWS, texts=texts)
        kind = f'kwargs["texts"] is a {type(texts).__name__} of 3 items with'
        for part in (kind, "the batch has 3 rows", 'in_dims={"texts": "items"} cuts it', 'in_dims={"texts": None} gives'):
            assert part in message
        assert kind in uncut(cutter(in_dims={"y": None}), ROWS, texts, texts=texts)
        assert ("with tensors of one row" in message) == (str(texts[0]) == "tensor([0.])")
        for shard in cut(cutter(in_dims={"texts": None}), ROWS, texts=texts):
            assert shard.kwargs["texts"] == texts
        first, second = cut(cutter(in_dims={"texts": "items"}), ROWS, texts=texts)
        assert (first.kwargs["texts"], second.kwargs["texts"]) == (texts[:2], texts[2:])


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_arrays_and_nested_tensors():
    """All lanes would share an array, or it has one item per row. Torch cannot split a strided nested tensor."""
    for rows in (0, 3, 4):
        message = uncut(cutter(), ROWS, numpy.arange(float(rows)))
        cures = ('in_dims={"y": "items"}', 'in_dims={"y": None}', "torch.from_numpy")
        for part in (f"args[1] is an array with {rows} rows, and the batch has 3", *cures):
            assert part in message
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for args, dim, name in (((nested,), 0, "x"), ((ROWS, nested), 0, "y"), ((nested,), 1, "x")):
        assert f"args[{len(args) - 1}] is a nested tensor" in uncut(cutter(dim=dim), *args)
        for shard in cut(cutter(in_dims={name: None}, dim=dim), *args):
            assert shard.args[-1] is nested


class Settable:
    """An object of the user, with state."""


OBJECTS = [lambda: iter("abc"), lambda: {"a"}, threading.Lock, Settable]
SEQUENCES = [
    lambda: range(3),
    lambda: deque("abc"),
    lambda: array.array("i", [1]),
    lambda: UserList("abc"),
    lambda: numpy.ones(3),
]


@pytest.mark.parametrize("make", [*OBJECTS, *SEQUENCES], ids=range(9))
def test_objects_with_state_are_refused(make):
    """Of any length, also in containers. With None in `in_dims`, all lanes get the same object, or each its own deque."""
    value = make()
    for texts, place, entry in ((value, "", "None"), ({"k": value}, '["k"]', '{"k": None}'), ([value], "[0]", "None")):
        for rows in (3, 5):
            message = uncut(cutter(), torch.zeros(rows, 2), texts=texts)
            assert f'kwargs["texts"]{place}' in message
            assert f'in_dims={{"texts": {entry}}}' in message
    for shard in cut(cutter(in_dims={"texts": {"k": None}}), ROWS, texts={"k": value}):
        got = shard.kwargs["texts"]["k"]
        assert got == value if type(value) is deque else got is value


@pytest.mark.parametrize("make", OBJECTS, ids=range(4))
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
    def __init__(self, value):
        self.value = value


HOLDERS = {
    "attribute": Holder(torch.zeros(3)),
    "nested": Holder({"layers": [SlottedBox((torch.zeros(1),))]}),
    "module": torch.nn.Linear(2, 2),
    "set": frozenset({torch.zeros(3)}),
    "method": Holder(torch.zeros(3)).__init__,
}


@pytest.mark.parametrize("unknown", HOLDERS.values(), ids=HOLDERS)
def test_unknown_holders_of_tensors(unknown):
    """Also in calls that are not cut, and after calls of others. With None in `in_dims`, every lane gets the object."""
    kind = type(unknown).__name__
    used = cutter()
    cut(used, ROWS[:1], {"cache": Settable()})
    message = uncut(used, ROWS[:1], {"cache": unknown})
    assert uncut(cutter(), ROWS, {"cache": unknown}) == message
    length = "" if hasattr(unknown, "__len__") else ", rows=..."
    for part in (
        f'args[1]["cache"] is a {kind}, which holds tensors',
        f"register_split({kind}, split=..., join=...{length})",
        'in_dims={"y": {"cache": None}}',
    ):
        assert part in message
    for shard in cut(cutter(in_dims={"y": None}), ROWS, unknown):
        assert shard.args[1] is unknown
    one = Holder(Holder(None))
    one.value.value = one  # a cycle
    assert "a state that each lane would change" in uncut(cutter(), ROWS, one)
