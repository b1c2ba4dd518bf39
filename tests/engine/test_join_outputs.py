"""`join`: rows are concatenated, one value of all lanes is returned once, and anything that is not proven is refused."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.helpers.same import assert_same
from tests.helpers.shards import CPU, OPTIONS, Output, joined, refusal

numpy = pytest.importorskip("numpy")


def test_equal_shards_prove_nothing():
    """An undeclared output is refused, also if its size is the row count; a declared one is joined."""
    for output, out_dims in ((torch.zeros(2, 3), 0), (["a", "b"], "items"), (numpy.zeros(2), 0)):
        message = refusal(output, copy.copy(output), sizes=(2, 2))
        assert "all lanes had 2 rows, which does not show whether this output follows the rows" in message
        assert all(part in message for part in OPTIONS)
        assert len(joined(output, copy.copy(output), sizes=(2, 2), out_dims=out_dims)) == 4


def test_equal_values_are_not_one_value():
    """Two lanes that both count 2 of each class have counted 4."""
    message = refusal(numpy.array([2, 2]), numpy.array([2, 2]))
    assert "the lanes had 3, 1 rows and returned shapes (2,), (2,), without the rows on dim 0. Equal values" in message
    assert all(part in message for part in OPTIONS)
    for empty in (torch.zeros(0, 4), numpy.zeros((0, 2)), []):
        assert_same(joined(copy.copy(empty), empty), empty)


def test_the_same_object_is_one_value():
    """A parameter, or an argument that goes whole to every lane."""
    for shared in (torch.zeros(7), torch.tensor(1.0), numpy.zeros(2)):
        assert joined({"w": shared}, {"w": shared})["w"] is shared


def test_copies_become_the_original():
    """If every lane returns its own copy of a parameter, the output is the parameter, even if the values differ."""
    original, one, other = torch.zeros(7), torch.zeros(7), torch.ones(7)
    of_lanes = [lambda value: original if value is one else None, lambda value: original if value is other else None]
    assert joined(one, other, originals=lambda: of_lanes) is original
    assert joined(original, other, originals=lambda: of_lanes) is original
    assert joined(Output(one), Output(other), originals=lambda: of_lanes).logits is original
    filled = torch.zeros(7)  # that only the function holds: each lane may have written its rows into it
    for parts in ((torch.zeros(7), other), (one, torch.zeros(7)), (one, one), (filled, filled)):
        assert "without the rows on dim 0" in refusal(*parts, originals=lambda: of_lanes)


def test_values_without_rows():
    for value in (None, "text", torch.float32, CPU, {}, (), ("a", "b"), Output("a")):
        found = joined({"y": torch.zeros(3), "v": value}, {"y": torch.zeros(1), "v": copy.copy(value)})["v"]
        assert_same(found, value)
    for one, other in (("a", "b"), (None, "a"), ("a", 1.0), (None, torch.zeros(1))):
        message = refusal({"n": one}, {"n": other})
        assert all(part in message for part in ('output["n"]', *OPTIONS))


def test_keys_must_agree():
    """The error names the lane with other keys, and the structures of both lanes."""
    message = refusal({"a": torch.zeros(3)}, {"a": torch.zeros(1)}, {"b": torch.zeros(1)}, sizes=(3, 1, 1))
    for part in ("output cannot be joined", "lane 0 returned PyTreeSpec({'a': *}", "lane 2", "'b'", 'join="list"'):
        assert part in message
    found = joined({"a": torch.zeros(3), "b": torch.ones(3)}, {"b": torch.ones(1), "a": torch.zeros(1)})
    assert (found["a"].tolist(), found["b"].tolist()) == ([0] * 4, [1] * 4)


def test_lists_of_items_in_a_tuple():
    """Each list has one item per row, next to a constant or to other lists."""
    assert joined((["a", "b"], ["c", "d"]), (["e"], ["f"]), sizes=(2, 1)) == (["a", "b", "e"], ["c", "d", "f"])
    assert joined((["a", "b"], "constant"), (["e"], "constant"), sizes=(2, 1)) == (["a", "b", "e"], "constant")
