"""`join`: rows are concatenated, one value of all lanes is returned once, and anything that is not proven is refused."""

from __future__ import annotations

import copy
import enum

import pytest
import torch

from parawrap.errors import GatherError
from tests.helpers.same import assert_same
from tests.helpers.shards import CPU, OPTIONS, Output, joined, refusal, rows

numpy = pytest.importorskip("numpy")


class Color(enum.Enum):
    RED = 1


@pytest.mark.parametrize("sizes", [(5, 3), (3, 3, 2), (2, 1, 1)])
def test_a_fixed_size_is_no_row_count(sizes):
    for fixed in (1, 2, 3, 5, 7):
        for make in (torch.zeros, lambda size: [torch.tensor(0.0)] * size, numpy.zeros):
            with pytest.raises(GatherError):
                joined(*(make(fixed) for _ in sizes), sizes=sizes)


@pytest.mark.parametrize("shapes", [((3, 5), (1,)), ((3,), ()), ((), (1,)), ((3, 2), (0, 2)), ((6, 2), (2, 2))])
def test_outputs_without_the_rows(shapes):
    message = refusal({"y": torch.zeros(shapes[0])}, {"y": torch.zeros(shapes[1])})
    for part in ('output["y"]', *map(str, shapes), *OPTIONS):
        assert part in message
    assert "dim 1" in refusal(torch.zeros(3), torch.zeros(1), dim=1)


def test_equal_shards_prove_nothing():
    """An undeclared output is refused, also if its size is the row count; a declared one is joined."""
    for output, out_dims in ((torch.zeros(2, 3), 0), (["a", "b"], "items"), (numpy.zeros(2), 0)):
        message = refusal(output, copy.copy(output), sizes=(2, 2))
        assert "all lanes had 2 rows, which does not show whether this output follows the rows" in message
        assert all(part in message for part in OPTIONS)
        assert len(joined(output, copy.copy(output), sizes=(2, 2), out_dims=out_dims)) == 4


def test_equal_values_are_not_one_value():
    """Two lanes that both count 2 of each class have counted 4."""
    for make in (torch.tensor, numpy.array):
        message = refusal(make([2, 2]), make([2, 2]))
        assert "the lanes had 3, 1 rows and returned shapes" in message
        assert "Equal values do not make it one value: two lanes that count 3 are 6" in message
        assert all(part in message for part in OPTIONS)
    for empty in (torch.zeros(0, 4), numpy.zeros((0, 2)), []):
        assert_same(joined(copy.copy(empty), empty), empty)


def test_the_same_object_is_one_value():
    """A parameter or an uncut argument, without `originals`. Values that cannot be compared need `register_split`."""
    for shared in (torch.zeros(7), torch.tensor(1.0), numpy.zeros(2)):
        assert joined({"w": shared}, {"w": shared})["w"] is shared
        assert joined(shared, shared) is shared

    class Moody:
        __hash__ = None

        def __eq__(self, other):
            raise TypeError

    assert "register_split(Moody, split=..., join=..., rows=...) says how to join them" in refusal(Moody(), Moody())
    same = Moody()
    assert joined(same, same) is same


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
    for value in (None, "text", torch.float32, Color.RED, CPU, {}, (), ("a", "b"), Output("a")):
        found = joined({"y": torch.zeros(3), "v": value}, {"y": torch.zeros(1), "v": copy.copy(value)})["v"]
        assert_same(found, value)
    for one, other in (("a", "b"), (None, "a"), ("a", 1.0), (None, torch.zeros(1)), (Color.RED, CPU)):
        message = refusal({"n": one}, {"n": other})
        assert all(part in message for part in ('output["n"]', *OPTIONS))


@pytest.mark.parametrize("kind", [list, tuple])
def test_lists_with_one_item_per_row(kind):
    for items in (["a", "b", "c", "d"], [None] * 4, [[1], [2], [], [3]], [torch.zeros(n) for n in range(4)]):
        found = joined({"labels": kind(items[:3])}, {"labels": kind(items[3:])})["labels"]
        assert list(map(id, found)) == list(map(id, items))
        assert type(found) is kind


def test_lists_are_joined_by_item():
    first, second = rows(3, 1)
    found = joined([first, "name", [first]], [second, "name", [second]])
    assert (found[0].shape, found[1]) == ((4, 2), "name")
    assert torch.equal(found[2][0], found[0])
    assert joined([1, 2], [3, 4], reduce="sum") == [4, 6]
    assert "output[0]" in refusal([1, 2], [3, 4])
    assert 'output[1]["k"]' in refusal([first, {"k": 1}], [second, {"k": 2}])
    message = refusal({"boxes": ["a", "b"]}, {"boxes": ["c"]})
    assert "the lanes had 3, 1 rows and returned 2, 1 items" in message
    assert all(part in message for part in OPTIONS)


def test_keys_must_agree():
    """The error names the lane with other keys, and the keys of both lanes."""
    message = refusal({"a": torch.zeros(3)}, {"a": torch.zeros(1)}, {"b": torch.zeros(1)}, sizes=(3, 1, 1))
    for part in ("output cannot be joined", "lane 0 returned a dict with keys ['a']", "lane 2", "'b'", 'join="list"'):
        assert part in message
    assert 'output["k"] cannot be joined: lane 0 returned a dict' in refusal({"k": {"a": 1}}, {"k": {"b": 1}})
    found = joined({"a": torch.zeros(3), "b": torch.ones(3)}, {"b": torch.ones(1), "a": torch.zeros(1)})
    assert (found["a"].tolist(), found["b"].tolist()) == ([0] * 4, [1] * 4)


def test_outputs_that_stay_unchanged():
    """With join="list", or of one lane."""
    ragged = [torch.zeros(2, 5), torch.zeros(2, 7)]
    assert all(one is other for one, other in zip(joined(*ragged, join="list"), ragged, strict=True))
    assert joined("only", sizes=(4,), join="list") == ["only"]
    for output in (torch.tensor(3), 3, "text", [1, 2], {"loss": 1.5}, Output(torch.zeros(7))):
        for reduce in (None, "mean", "sum"):
            assert joined(output, sizes=(4,), reduce=reduce) is output


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_nested_tensors_are_refused():
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert 'a nested tensor has no dim to join on. join="list"' in refusal(nested, nested.clone())


def boxes(*counts):
    return [{"boxes": torch.zeros(count, 4)} for count in counts]


def test_refusals_of_the_rules_of_torch():
    for outputs, sizes, text in (
        ((1, 1), (2, 1), "each lane returned one int (1, 1), and equal numbers do not make it one number"),
        ((["a"], ["b"]), (2, 1), "the lanes had 2, 1 rows and returned a list of 1, 1 items without tensors"),
        ((["a"], ["b"]), None, "gather alone has no row counts to compare with"),
        (([["a", "b"]] * 2, [["c"]]), (2, 1), "both the list and each list in it follow"),
        ((boxes(2, 2), boxes(1)), (2, 1), "returned as many items of type dict, whose tensors have the rows too"),
        (([torch.zeros(5), torch.zeros(3)], [torch.zeros(4)]), None, "lists of tensors of different sizes"),
    ):
        assert text in refusal(*outputs, sizes=sizes, as_torch=True, reduce="stack")
    assert joined(*map(torch.tensor, (1.0, 2.0)), sizes=None, as_torch=True, reduce="stack").tolist() == [1, 2]
