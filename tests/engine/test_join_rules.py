"""`out_dims` and `reduce` as trees like the output, and the checks of all options."""

from __future__ import annotations

import copy
from collections import UserDict, deque

import pytest
import torch

from tests.helpers.shards import Output, joined, refusal, rows

numpy = pytest.importorskip("numpy")


class Fields(UserDict):
    """A Mapping that is not a dict."""


@pytest.mark.parametrize(("make", "declare"), [(dict, Output), (Fields, dict), (Output, dict)])
def test_trees_declare_keys_and_fields(make, declare):
    outputs = [make(logits=torch.zeros(3, n), loss=torch.tensor(2.0)) for n in (2, 2)]
    found = joined(*outputs, sizes=(2, 2), out_dims=declare(logits=1, loss=None))
    logits, loss = (
        (found.logits, found.loss) if make is Output else (found["logits"], found["loss"])
    )
    assert (tuple(logits.shape), loss.item(), type(found)) == ((3, 4), 2, make)
    outputs = [make(logits=torch.zeros(n), loss=torch.tensor(1.0)) for n in (3, 1)]
    for option in ("out_dims", "reduce"):
        message = refusal(*outputs, **{"out_dims": {"loss": None}, option: {"los": None}})
        assert (
            f"{option} declares the key 'los', and the output has ['logits', 'loss'] here"
            in message
        )


def test_sizes_are_checked():
    outputs = [{"a": torch.zeros(2, n), "b": torch.ones(n)} for n in (3, 1)]
    found = joined(*outputs, out_dims={"a": 1})
    assert (found["a"].shape, found["b"].shape) == ((2, 4), (4,))
    outputs = [{"a": torch.zeros(2, n), "b": torch.ones(2)} for n in (3, 1)]
    assert 'output["b"] cannot be joined' in refusal(*outputs, out_dims={"a": 1})
    message = refusal(torch.zeros(2, 3), torch.zeros(2, 3), sizes=(2, 2), out_dims=1)
    assert (
        "the lanes had 2, 2 rows and returned shapes (2, 3), (2, 3), without the rows on dim 1"
        in message
    )
    for make in (torch.zeros, numpy.zeros):
        assert "(3,), (1,)" in refusal(make(3), make(1), dim=1, out_dims=1)
        assert "(2,), (1,)" in refusal(make(2), make(1), out_dims=0)


EQUAL = [
    torch.zeros(2),
    torch.tensor(3.0),
    3,
    True,
    "text",
    [1, 2],
    numpy.zeros(2),
    numpy.array(["a"]),
    float("nan"),
]
UNEQUAL = [
    *(
        (torch.zeros(2), torch.ones(2)),
        (torch.zeros(2), torch.zeros(2, 1)),
        (torch.zeros(2), torch.zeros(2).double()),
    ),
    *((3, 4), (1, 1.0), ("a", "b"), ([1], [2]), ([1], [1, 2]), (numpy.zeros(2), numpy.ones(2))),
    *((numpy.zeros(2), numpy.zeros(2, dtype=int)), (torch.tensor([1, 2]), torch.tensor([1, 3]))),
    (
        layer := torch.nn.Linear(1, 1),
        copy.deepcopy(layer),
    ),  # copies of a layer, which end with the block
]
if hasattr(numpy, "dtypes") and hasattr(numpy.dtypes, "StringDType"):  # since numpy 2
    UNEQUAL.append(
        tuple(
            numpy.array([f"a text of {rows} rows"], dtype=numpy.dtypes.StringDType())
            for rows in (3, 1)
        )
    )


def test_none_declares_one_value():
    """Values are compared between lanes and returned once. NaN equals NaN."""
    for value in EQUAL:
        assert type(joined(value, value, sizes=(2, 2), out_dims=None)) is type(value)
    for one, other in (
        (
            numpy.array(["".join("ab"), 300 + len("a")], dtype=object),
            numpy.array(["".join("ab"), 301], dtype=object),
        ),
        (numpy.array([0.0]), numpy.array([-0.0])),
    ):
        assert joined(one, other, sizes=(2, 2), out_dims=None) is one
    for one, other in UNEQUAL:
        assert "cannot be joined" in refusal(one, other, sizes=(2, 2), out_dims=None)
    for make in (
        float,
        lambda value: torch.tensor([1.0, value]),
        lambda value: numpy.array([value]),
    ):
        assert "nan" in str(joined(make(float("nan")), make(float("nan")), out_dims=None))


def test_items_and_ragged():
    """Lists of equal shards are concatenated too, and their length is checked.

    A dim means the same for texts.
    """
    for items in (["a", "b", "c", "d"], [torch.zeros(n) for n in range(4)]):
        assert joined(items[:2], items[2:], sizes=(2, 2), out_dims="items") == items
        message = refusal({"l": items[:3]}, {"l": items[3:]}, sizes=(2, 2), out_dims={"l": "items"})
        assert "the lanes had 2, 2 rows and returned 3, 1 items" in message
    assert joined([], [], sizes=(2, 2), out_dims="items") == []
    assert joined(["a", "b"], ["c", "d"], sizes=(2, 2), out_dims=0) == ["a", "b", "c", "d"]
    assert [each.shape for each in joined([*rows(2)], [*rows(2)], sizes=(2, 2), out_dims=0)] == [
        (4, 2)
    ]
    first = {"t": torch.zeros(6, 2), "l": ["a"], "a": numpy.zeros(3)}
    found = joined(
        first, {"t": torch.ones(1, 2), "l": [], "a": numpy.ones(0)}, sizes=(2, 2), out_dims="ragged"
    )
    assert (found["t"].shape, found["l"], found["a"].shape) == ((7, 2), ["a"], (3,))
    found = joined(
        (torch.zeros(6, 2), torch.zeros(2)), (torch.ones(1, 2), torch.ones(2)), out_dims="ragged"
    )
    assert [each.shape for each in found] == [(7, 2), (4,)]
    assert joined(
        torch.zeros(2, 6), torch.ones(2, 1), sizes=(2, 2), dim=1, out_dims="ragged"
    ).shape == (2, 7)
    for make in (torch.zeros, numpy.zeros):
        assert "differ beyond dim 0" in refusal(make((3, 2)), make((1, 4)), out_dims="ragged")
        for length in (3, 1):
            assert f"({length},), (1,), which have no dim 1" in refusal(
                make(length), make(1), dim=1, out_dims="ragged"
            )


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_have_no_dim():
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for out_dims in (None, 0, "ragged"):
        for output, place in ((nested, "output"), ((nested, "text"), "output[0]")):
            assert f"{place} cannot be joined: a nested tensor" in refusal(
                output, output, out_dims=out_dims
            )


def test_trees_of_another_output():
    """Reductions and paddings of parts leave an output alone that has no such parts."""
    for options in (
        {"reduce": {"loss": "mean"}},
        {"pad_value": {"loss": 0}, "join": "pad"},
        {"reduce": ("sum", "sum")},
    ):
        assert joined(*rows(3, 1), **options).shape == (4, 2)
        assert joined(None, None, **options) is None


def test_a_tree_of_reductions():
    """A dict names keys and fields; a tuple names items. Rows are joined by their sizes."""
    parts = rows(3, 1)
    outputs = [
        {"y": part, "loss": torch.tensor(float(n)), "count": n}
        for part, n in zip(parts, (3, 1), strict=True)
    ]
    for reduce in ({"loss": "mean", "count": "sum"}, {"y": None, "loss": "mean", "count": "sum"}):
        found = joined(*outputs, reduce=reduce)
        assert (found["y"].shape, found["loss"].item(), found["count"]) == ((4, 2), 2.5, 4)
    found = joined(*map(Output, parts, (1.0, 5.0)), reduce=Output(None, "mean"))
    assert (found.logits.shape, found.loss) == ((4, 2), 2.0)
    assert joined(
        *(({"loss": float(n)}, n) for n in (3, 1)), reduce=({"loss": torch.max}, "sum")
    ) == ({"loss": 3.0}, 4)
    assert joined([1.0, 2], [3.0, 4], reduce=["stack", "sum"])[1] == 6
    assert 'output["count"] cannot be joined' in refusal(*outputs, reduce={"loss": "mean"})


def test_trees_must_fit_the_output():
    for outputs, options, text in (
        (
            ({"a": {"b": 1, "c": 2}},) * 2,
            {"reduce": {"a": {"b": "sum", "d": "sum"}}},
            "reduce declares the key 'd'",
        ),
        (
            ((1, 2), (3, 4)),
            {"reduce": ("sum",)},
            "reduce declares 1 items, and the output has 2 here",
        ),
        (
            (1.0, 2.0),
            {"reduce": ("sum", "sum")},
            "reduce declares a tuple here, and the lanes returned a float",
        ),
        (
            (rows(3), rows(1)),
            {"out_dims": (0, 0)},
            "out_dims declares 2 items, and the output has 1 here",
        ),
        # A dict has no positions: sorted by key, its parts would get each other's entries
        (
            ({"y": 1.0, "x": 2},) * 2,
            {"reduce": ("mean", "sum")},
            "reduce declares a tuple, and the output has the keys ['x', 'y'] here",
        ),
        (
            (Output(rows(3)[0], 3), Output(rows(1)[0], 3)),
            {"out_dims": (0, 0)},
            "out_dims declares a tuple, and the output has the keys ['logits', 'loss'] here",
        ),
        (
            (rows(3), rows(1)),
            {"out_dims": {0: 0}},
            "out_dims declares a dict here, and the lanes returned a tuple",
        ),
        (
            rows(3, 1),
            {"out_dims": (0, 0)},
            "out_dims declares a tuple here, and the lanes returned a Tensor",
        ),
        (
            (rows(3), rows(1)),
            {"out_dims": deque([0, 0])},
            "out_dims declares 2 items, and the output has 1 here",
        ),
        (
            rows(5, 5),
            {"reduce": {"a": "sum"}},
            "reduce declares a dict here, and the lanes returned a Tensor",
        ),
        (
            (torch.ones(3, 2), torch.ones(1, 3)),
            {"join": "pad", "pad_value": {"a": 0}},
            "pad_value declares a dict here, and the lanes returned a Tensor",
        ),
    ):
        assert text in refusal(*outputs, **options)
