"""`reduce_metrics`: weighted means and sums over ranks."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch

from parawrap import PlatformError, current_rank, functional
from tests.helpers.ranks import on

NAN = math.nan


def reduce_of_rank(values, weights, options):
    rank = current_rank().global_rank
    try:
        return functional.reduce_metrics(values[rank], weights[rank], **options)
    except (TypeError, ValueError, OverflowError) as error:
        return f"{type(error).__name__}: {error}"


@pytest.fixture
def reduced(ranks):
    """Return a function that reduces on two ranks: it gives the result of rank 0, which equals that
    of rank 1.
    """

    def reduce(values, weights=(1, 1), **options):
        one, other = ranks(reduce_of_rank, values, weights, options)
        assert repr(one) == repr(other)
        return one

    return reduce


def test_means_are_weighted_by_rows(reduced):
    """A tree keeps its types; keys may be in any order."""
    one = {"loss": 1.0, "per class": torch.tensor([1.0, 0.0]), "pair": (1, [torch.tensor(2.0)])}
    other = {"loss": 5.0, "per class": torch.tensor([0.0, 1.0]), "pair": (5, [torch.tensor(6.0)])}
    tree = reduced([one, other], [3, 1])
    assert tree["per class"].tolist() == [0.75, 0.25]
    assert (tree["loss"], tree["pair"]) == (2.0, (2.0, [torch.tensor(3.0)]))
    assert (type(tree["loss"]), type(tree["pair"][0])) == (float, float)
    assert reduced([2.0, 4.0], [torch.tensor(1), torch.tensor(3.0)]) == 3.5
    found = reduced([torch.tensor(1), torch.tensor(2)])
    assert (found.item(), found.dtype) == (1.5, torch.float64)


def test_sums_are_weighted_too(reduced):
    """Sums of integers are int64 as in torch.sum, and exact.

    With a weight that is not an integer, they are float64.
    """
    assert reduced([0.5, 2.0], [4, 1], op="sum") == 4.0
    assert reduced([1.0, 1.0], [0, 0], op="sum") == 0.0
    assert reduced([torch.tensor([7]), torch.tensor([2**60])], [1, 0], op="sum").tolist() == [7]
    found = reduced([torch.tensor([100, 1], dtype=torch.int8)] * 2, op="sum")
    assert (found.tolist(), found.dtype) == ([200, 2], torch.int64)
    assert reduced([torch.tensor(2**53 + 1), torch.tensor(2**53)], op="sum").item() == 2**54 + 1
    found = reduced([torch.tensor([3])] * 2, [0.5, 1], op="sum")
    assert (found.tolist(), found.dtype) == ([4.5], torch.float64)


def test_tensors_keep_shape_and_dtype(reduced):
    """Tensors keep shape and dtype, and have no graph. A tree may have no numbers, or many."""
    kinds = [torch.float16, torch.float64]
    tree = [torch.ones(2, 3, dtype=kind, requires_grad=True) for kind in kinds]
    tree += [torch.empty(0, 3), np.float32(1), torch.ones(10_000)]
    found = reduced([tree, tree], [1, 2])
    assert [each.dtype for each in found[:2]] == kinds
    assert all(
        each.shape == (2, 3) and not each.requires_grad and bool((each == 1).all())
        for each in found[:2]
    )
    assert (found[2].shape, found[3], type(found[3])) == ((0, 3), 1.0, float)
    assert bool((found[4] == 1).all())
    assert reduced([{}, {}]) == {}


def test_weight_0_ignores_values(ranks, reduced):
    """A value of weight 0 is ignored, also a NaN or another type; keys may be in any order. With
    another weight, a NaN stays in its place.
    """
    assert reduced([0.25, NAN], [8, 0]) == 0.25
    found = ranks(
        reduce_of_rank, [{"a": 1.0, "b": torch.tensor(2.0)}, {"b": 0, "a": 3.0}], [8, 0], {}
    )
    assert found == ({"a": 1.0, "b": 2.0},) * 2
    one, other, third = reduced([(1.0, NAN, math.inf), (3.0, 1.0, 1.0)])
    assert (one, math.isnan(other), third) == (2.0, True, math.inf)
    assert functional.reduce_metrics(NAN, weight=0, op="sum") == 0.0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            [{"loss": 1.0}, {"acc": 1.0}],
            r'rank 0 has .*values\["loss"\] \(\), but rank 1 has .*values\["acc"\] \(\)',
        ),
        ([1.0, torch.ones(2000)], r"rank 0 has .*values \(\), but rank 1 has .*values \(2000,\)"),
        ([[1.0], [1.0, 2.0]], r"but rank 1 has .*values\[1\]"),
    ],
    ids=["keys", "shapes", "numbers"],
)
def test_trees_that_differ_are_refused(reduced, values, message):
    """Every rank raises, and the error shows the values of both."""
    found = reduced(values)
    assert found.startswith("GatherError")
    assert re.search(message, found), found


def test_ranks_must_agree(ranks, lone_ranks, reduced):
    """Ranks with another `op`, only weights of 0, and no process group are
    refused on every rank.
    """

    def use_another_op():
        with pytest.raises(ValueError, match=r"rank 0 has op='mean', .* rank 1 has op='sum'"):
            functional.reduce_metrics(1.0, op=("mean", "sum")[current_rank().global_rank])

    def use_no_group():
        with pytest.raises(
            PlatformError, match=r"reduce_metrics.* 2 ranks.*Leave ipc_groups out of Platform"
        ):
            functional.reduce_metrics(1.0)

    ranks(use_another_op)
    lone_ranks(use_no_group)
    assert "weight is 0 on every rank" in reduced([1.0, 2.0], [0, 0])


@pytest.mark.parametrize(
    ("values", "options", "error", "message"),
    [
        ({"a": "text"}, {}, TypeError, r'values\["a"\] is a str'),
        (torch.ones(2, dtype=torch.bool), {}, TypeError, "torch.bool"),
        (torch.eye(2).to_sparse(), {}, TypeError, "not a number or a dense tensor"),
        (1.0, {"weight": 0}, ValueError, "weight is 0 on every rank"),
        (1.0, {"weight": NAN}, ValueError, "weight=nan"),
        (1.0, {"op": "max"}, ValueError, "op='max'.*'mean' or 'sum'"),
    ],
    ids=range(6),
)
def test_other_values_are_refused(values, options, error, message):
    with pytest.raises(error, match=message):
        functional.reduce_metrics(values, **options)


def test_one_rank_keeps_its_values():
    """A mean is the value itself, whatever the weight."""
    assert functional.reduce_metrics({"a": 0.1, "b": True}, weight=3) == {"a": 0.1, "b": 1.0}
    assert functional.reduce_metrics(0.5, weight=3, op="sum") == 1.5
    tensor = torch.tensor([0.1, 0.7], requires_grad=True)
    assert functional.reduce_metrics(tensor, weight=7).tolist() == tensor.tolist()
    assert on(1, lambda: functional.reduce_metrics(0.1, weight=3)) == (0.1,)
