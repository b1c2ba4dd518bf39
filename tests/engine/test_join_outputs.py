"""`join`: rows are concatenated, and one value of all lanes is returned once.

A value that is not proven to be one of these is refused.
"""

from __future__ import annotations

import copy
from collections import deque

import pytest
import torch

from tests.helpers.cures import options_of
from tests.helpers.same import assert_same
from tests.helpers.shards import CPU, Output, joined, refusal

numpy = pytest.importorskip("numpy")


def test_equal_shards_prove_nothing():
    """An undeclared output is refused, also if it has the rows; a declared one is joined."""
    for output, out_dims in ((torch.zeros(2, 3), 0), (["a", "b"], "items"), (numpy.zeros(2), 0)):
        message = refusal(output, copy.copy(output), sizes=(2, 2))
        assert (
            "all lanes had 2 rows, which does not show whether this output follows the rows"
            in message
        )
        assert options_of(message) == {"out_dims": out_dims}
        assert len(joined(output, copy.copy(output), sizes=(2, 2), out_dims=out_dims)) == 4


def test_equal_values_are_not_one_value():
    """Two lanes that both count 2 of each class have counted 4."""
    message = refusal(numpy.array([2, 2]), numpy.array([2, 2]))
    assert (
        "the lanes had 3, 1 rows and returned shapes (2,), (2,), without the rows on dim 0. Equal "
        "values" in message
    )
    assert options_of(message) == {"out_dims": None}
    assert options_of(message, "or ") == {"reduce": "sum"}
    for empty in (torch.zeros(0, 4), numpy.zeros((0, 2)), []):
        assert_same(joined(copy.copy(empty), empty), empty)


def test_the_same_object_is_one_value():
    """One object that all lanes return, such as a parameter or a whole argument, is one value."""
    for shared in (torch.zeros(7), torch.tensor(1.0), numpy.zeros(2)):
        assert joined({"w": shared}, {"w": shared})["w"] is shared


def test_copies_become_the_original():
    """If every lane returns its copy of a parameter, the output is the parameter.

    The values of the copies may differ.
    """
    original, one, other = torch.zeros(7), torch.zeros(7), torch.ones(7)
    of_lanes = [
        lambda value: original if value is one else None,
        lambda value: original if value is other else None,
    ]
    assert joined(one, other, originals=lambda: of_lanes) is original
    assert joined(original, other, originals=lambda: of_lanes) is original
    assert joined(Output(one), Output(other), originals=lambda: of_lanes).logits is original
    # That only the function holds: each lane may have written its rows into it
    filled = torch.zeros(7)
    for parts in ((torch.zeros(7), other), (one, torch.zeros(7)), (one, one), (filled, filled)):
        assert "without the rows on dim 0" in refusal(*parts, originals=lambda: of_lanes)


def test_values_without_rows():
    for value in (None, "text", torch.float32, CPU, {}, (), ("a", "b"), Output("a")):
        found = joined(
            {"y": torch.zeros(3), "v": value}, {"y": torch.zeros(1), "v": copy.copy(value)}
        )["v"]
        assert_same(found, value)
    for one, other in (("a", "b"), (None, "a"), ("a", 1.0), (None, torch.zeros(1))):
        message = refusal({"n": one}, {"n": other})
        assert all(part in message for part in ('output["n"]', 'join="list"'))


def test_keys_must_agree():
    """The error names the lane with other keys, and the structures of both lanes."""
    message = refusal(
        {"a": torch.zeros(3)}, {"a": torch.zeros(1)}, {"b": torch.zeros(1)}, sizes=(3, 1, 1)
    )
    for part in (
        "output cannot be joined",
        "lane 0 returned PyTreeSpec({'a': *}",
        "lane 2",
        "'b'",
        'join="list"',
    ):
        assert part in message
    found = joined(
        {"a": torch.zeros(3), "b": torch.ones(3)}, {"b": torch.ones(1), "a": torch.zeros(1)}
    )
    assert (found["a"].tolist(), found["b"].tolist()) == ([0] * 4, [1] * 4)


def test_lists_of_items_in_a_tuple():
    """Each list has one item per row, next to a constant or to other lists."""
    assert joined((["a", "b"], ["c", "d"]), (["e"], ["f"]), sizes=(2, 1)) == (
        ["a", "b", "e"],
        ["c", "d", "f"],
    )
    assert joined((["a", "b"], "constant"), (["e"], "constant"), sizes=(2, 1)) == (
        ["a", "b", "e"],
        "constant",
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda rows: deque(range(rows), maxlen=9),
        lambda rows: deque([torch.zeros(rows, 2)] * 2, maxlen=9),
        lambda rows: {"x": deque([torch.zeros(rows, 2), [torch.zeros(rows)]], 9)},
    ],
    ids=["items", "tensors", "nested"],
)
def test_deques_keep_their_maxlen(make):
    found, plain = joined(make(3), make(2), sizes=(3, 2)), make(5)
    found, plain = (each["x"] if isinstance(each, dict) else each for each in (found, plain))
    assert (type(found), found.maxlen, len(found)) == (deque, 9, len(plain))


def test_bounded_deques_drop_the_oldest_rows():
    """A bounded deque drops the oldest rows, as the deque of the plain call does. Lanes with other
    bounds are refused.
    """
    parts = deque("abc", maxlen=4), deque("de", maxlen=4)
    assert joined(*parts, sizes=(3, 2)) == deque("bcde", maxlen=4)
    message = refusal(deque("abc", maxlen=3), deque("de", maxlen=2), sizes=(3, 2))
    assert "deques of maxlen 2, 3" in message


MADE = {
    "shape": lambda: torch.zeros(3).shape,
    "empty shape": lambda: torch.zeros(()).shape,
    "range": lambda: range(3),
    "slice": lambda: slice(0, 3),
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_shapes_and_ranges_are_values(make):
    """Shapes, ranges, and slices may count rows: equal ones are refused until they are declared."""
    outputs = [{"y": torch.zeros(rows), "v": make()} for rows in (3, 1)]
    message = refusal(*outputs)
    assert options_of(message) == {"out_dims": {"v": None}}
    assert joined(*outputs, out_dims={"v": None})["v"] == make()


class Odd:
    """An object with anything under the name `shape`."""

    def __init__(self, shape):
        self.given = shape

    @property
    def shape(self):
        if isinstance(self.given, Exception):
            raise self.given
        return self.given


ODD = {
    "method": lambda: (1, 2),
    "text": "abc",
    "number": 7,
    "list": [2, 2],
    "tuple of a text": ("a", 2),
    "tuple of None": (None,),
    "error": ValueError("no shape"),
    "empty": (),
    "like a tensor": (3, 2),
}
OPTIONS_OF_ODD = [{}, {"reduce": "sum"}, {"reduce": "stack"}, {"out_dims": 0}]


@pytest.mark.parametrize("shape", ODD.values(), ids=ODD)
@pytest.mark.parametrize("options", OPTIONS_OF_ODD, ids=str)
def test_outputs_with_an_odd_shape(shape, options):
    """A shape is a tuple of integers. An object with another one, or with a method of that name, is
    refused like other objects.
    """
    looks_like_a_number = shape == ()
    message = refusal(Odd(shape), Odd(shape), sizes=(2, 2), **options)
    assert ("register_split(Odd" in message) != looks_like_a_number
    for wrap in (
        lambda each: each,
        lambda each: [each],
        lambda each: {"a": torch.zeros(2), "b": each},
    ):
        message = refusal(wrap(Odd(shape)), wrap(Odd(shape)), sizes=(2, 2), **options)
        assert "cannot be joined" in message


def test_one_output_is_joined_by_every_rule():
    """A call that runs plainly has the output of a call that is cut."""
    output = {"y": torch.ones(3, 2), "n": torch.tensor(2.0), "words": ["a", "b", "c"]}
    for options in (
        {},
        {"join": "pad"},
        {"out_dims": 0},
        {"reduce": {"n": "sum"}},
        {"as_torch": True},
    ):
        assert_same(joined(output, sizes=(1,), **options), output)
    assert joined(output, sizes=(1,), join="list") == [output]
    assert joined(output, sizes=(1,), reduce="stack")["n"].tolist() == [2]
    assert joined(output, sizes=(1,), reduce={"n": "stack", "y": None})["n"].tolist() == [2]
    assert joined(torch.tensor(2.0), sizes=(1,), reduce=lambda vector: vector * 3).tolist() == [6]
    found = joined({"n": 1.5, "m": 2.0}, sizes=(0,), reduce={"n": "mean", "m": "stack"})
    assert (found["n"], found["m"].tolist()) == (1.5, [2])
