"""`tp_collate` and `default_collate`: collate functions that return one part per device."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections import OrderedDict, UserDict, namedtuple

import cloudpickle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import default_collate as torch_default_collate
from torch.utils.data._utils import collate as torchs_collate

from parawrap.api.collate import default_collate, tp_collate
from tests.helpers.same import assert_same

Sample = namedtuple("Sample", ["x", "y"])


@tp_collate(2)
def collate_pairs(samples, scale=1):
    """Collate pairs into a pair of tensors."""
    xs, ys = zip(*samples, strict=True)
    return torch.tensor(xs) * scale, torch.tensor(ys)


def plain(samples):
    """An undecorated collate function."""
    return torch.tensor(samples)


class Collator:
    """Has a decorated method."""

    @tp_collate(2)
    def collate(self, samples):
        return plain(samples)


@given(st.integers(1, 40), st.integers(1, 12))
def test_parts_are_balanced(rows, ndevices):
    """Part sizes differ by at most one, larger parts first.

    No part is empty, and rows keep their order.
    """
    parts = tp_collate(ndevices)(plain)(list(range(rows)))
    sizes = [len(part) for part in parts]
    assert torch.cat(parts).tolist() == list(range(rows))
    assert len(sizes) == min(ndevices, rows)
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


def test_outermost_is_transposed():
    """A tuple or list becomes a tuple of tuples, also with one device.

    Nested values stay whole in their part.
    """
    (x1, x2), (y1, y2) = collate_pairs([(0, 5), (1, 6), (2, 7)])
    assert (x1.tolist(), x2.tolist(), y1.tolist(), y2.tolist()) == ([0, 1], [2], [5, 6], [7])
    assert_same(
        tp_collate(1)(lambda s: (torch.tensor(s), 7))([1, 2]), ((torch.tensor([1, 2]),), (7,))
    )
    assert tp_collate(2)(lambda s: [len(s), sum(s)])([1, 2, 3]) == ((2, 1), (3, 3))
    assert tp_collate(2)(lambda s: {"inner": {"s": s}})([1, 2]) == {
        "inner": ({"s": [1]}, {"s": [2]})
    }


@pytest.mark.parametrize("cls", [OrderedDict, UserDict, Sample])
def test_containers_keep_their_type(cls):
    """A PackedSequence, and a returned list of samples, are not split."""
    packed = [torch.zeros(2), torch.zeros(1)]
    batch = tp_collate(2)(lambda s: cls(x=s, y=pack_sequence(packed)))([1, 2, 3])
    assert type(batch) is cls
    xs, ys = batch if cls is Sample else batch.values()
    assert xs == ([1, 2], [3])
    assert [type(part) for part in ys] == [PackedSequence] * 2


def test_metadata_and_arguments():
    """The function keeps its metadata. Other arguments go to every part."""
    assert (collate_pairs.__name__, collate_pairs.__doc__) == (
        "collate_pairs",
        "Collate pairs into a pair of tensors.",
    )
    assert str(inspect.signature(collate_pairs)) == "(samples, scale=1)"
    assert repr(default_collate(2)) == "default_collate(2)"
    assert inspect.isfunction(collate_pairs.__wrapped__)
    assert_same(collate_pairs([(1, 0), (2, 0)], scale=3)[0], (torch.tensor([3]), torch.tensor([6])))
    assert_same(collate_pairs([(1, 0), (2, 0)], 4)[0], (torch.tensor([4]), torch.tensor([8])))
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'samples'"):
        collate_pairs()


@pytest.mark.parametrize(
    "collate",
    [
        tp_collate(2)(plain),
        Collator().collate,
        default_collate(2),
    ],
    ids=["function", "method", "default"],
)
def test_copies_still_cut(collate):
    for duplicate in (
        copy.copy(collate),
        copy.deepcopy(collate),
        pickle.loads(pickle.dumps(collate)),
        cloudpickle.loads(cloudpickle.dumps(collate)),
    ):
        assert_same(duplicate([1, 2, 3]), (torch.tensor([1, 2]), torch.tensor([3])))


def test_function_of_main_can_be_sent(monkeypatch):
    """Cloudpickle sends the function of a script or a notebook by value and decorated."""
    collate = tp_collate(2)(lambda samples: torch.tensor(samples))
    collate.__wrapped__.__module__ = "__main__"
    collate.__wrapped__.__qualname__ = "collate"
    monkeypatch.setattr("__main__.collate", collate, raising=False)
    sent = cloudpickle.dumps(collate)
    monkeypatch.delattr("__main__.collate")
    assert_same(cloudpickle.loads(sent)([1, 2, 3]), (torch.tensor([1, 2]), torch.tensor([3])))


# --- default_collate ---

LEAVES = [
    lambda row: row,
    lambda row: row / 2,
    lambda row: "text",
    lambda row: b"b",
    lambda row: torch.tensor([row, row]),
]
LAYOUTS = [
    *LEAVES,
    lambda row: tuple(leaf(row) for leaf in LEAVES),
    lambda row: [Sample(row, {"a": [], "b": ()}), [leaf(row) for leaf in LEAVES], {}],
    lambda row: {"a": {"b": (row, [Sample(row, torch.tensor(row))])}, "c": "text"},
]


@pytest.mark.parametrize("layout", LAYOUTS)
@given(rows=st.integers(1, 9), ndevices=st.integers(1, 4))
def test_default_collate_equals_torchs(layout, rows, ndevices):
    """For every structure, default_collate equals tp_collate around torch's default_collate."""
    samples = [layout(row) for row in range(rows)]
    assert_same(
        default_collate(ndevices)(samples), tp_collate(ndevices)(torch_default_collate)(samples)
    )


def test_default_collate_cuts_views(monkeypatch):
    """Tensors are copied once.

    Only the rows of one part need equal shapes; others raise torch's error.
    """
    # Packages such as tensordict register functions when they are imported
    registered = torchs_collate.default_collate_fn_map
    for kind, function in list(registered.items()):
        if function.__module__ != torchs_collate.__name__:
            monkeypatch.delitem(registered, kind)
    one, two = default_collate(2)([torch.zeros(3)] * 4)
    assert one.untyped_storage().data_ptr() == two.untyped_storage().data_ptr()
    assert [part.shape for part in default_collate(2)([torch.zeros(2), torch.zeros(3)])] == [
        (1, 2),
        (1, 3),
    ]
    with pytest.raises(RuntimeError, match="equal size"):
        default_collate(1)([torch.zeros(2), torch.zeros(3)])
