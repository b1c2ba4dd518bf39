"""`reduce_metrics`: weighted means and sums over ranks."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist

from parawrap import GatherError, PlatformError, current_rank, functional
from tests.helpers.ranks import on

NAN = math.nan


class Metrics(NamedTuple):
    loss: float
    hits: torch.Tensor


def reduced(*calls):
    """Run calls on two ranks. Return, per rank and call, the result with the number of collectives, or the error."""

    def reduce(calls):
        count = []
        plain = dist.all_reduce
        dist.all_reduce = lambda *args, **kwargs: (count.append(args), plain(*args, **kwargs))[1]
        found = []
        for values, weights, options in calls:
            rank = current_rank().global_rank
            count.clear()
            try:
                found.append((functional.reduce_metrics(values[rank], weights[rank], **options), len(count)))
            except (TypeError, ValueError, OverflowError) as error:
                found.append((type(error).__name__, str(error)))
        return found

    return on(2, reduce, calls)


def test_means_are_weighted_by_rows():
    """Both ranks get the mean over all rows for each number, with one collective for the whole tree."""
    one = {"loss": 1.0, "per class": torch.tensor([1.0, 0.0]), "pair": (1, [torch.tensor(2.0)])}
    other = {"loss": 5.0, "per class": torch.tensor([0.0, 1.0]), "pair": (5, [torch.tensor(6.0)])}
    plain = [one, other], [3, 1], {}
    numbers = [2.0, 4.0], [torch.tensor(1), torch.tensor(3.0)], {}
    named = [Metrics(1.0, torch.tensor([1.0])), Metrics(2.0, torch.tensor([2.0]))], [1, 1], {}
    keys = [{"a": 1.0, "b": 2.0}, {"b": 4.0, "a": 3.0}], [1, 1], {}
    ((tree, count), (number, _), (metrics, _), (swapped, _)), others = reduced(plain, numbers, named, keys)
    assert count == 1
    assert tree["per class"].tolist() == [0.75, 0.25]
    assert (tree["loss"], tree["pair"]) == (2.0, (2.0, [torch.tensor(3.0)]))
    assert (type(tree["loss"]), type(tree["pair"][0])) == (float, float)
    assert number == 3.5
    assert (type(metrics), metrics.loss, metrics.hits.tolist()) == (Metrics, 1.5, [1.5])
    assert swapped == {"a": 2.0, "b": 3.0}
    assert torch.equal(others[0][0]["per class"], tree["per class"])
    assert [each[0] for each in others[1:2]] == [3.5]


def test_sums_are_weighted_too():
    """With op="sum", the result is the sum of weight * value. The default weight is 1."""
    counts = [torch.tensor([1, 2]), torch.tensor([3, 4])], [1, 1], {"op": "sum"}
    totals = [0.5, 2.0], [4, 1], {"op": "sum"}
    nothing = [1.0, 1.0], [0, 0], {"op": "sum"}
    (counted, total, none), _ = reduced(counts, totals, nothing)
    assert (counted[0].tolist(), counted[0].dtype) == ([4, 6], torch.int64)
    assert (total[0], none[0]) == (4.0, 0.0)


def test_tensors_keep_shape_and_dtype():
    """Reduced tensors have the shape and dtype of the input, and no graph."""
    kinds = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    tree = [torch.ones(2, 3, dtype=kind, requires_grad=True) for kind in kinds] + [torch.empty(0, 3), np.float32(1)]
    ((found, _),), _ = reduced(([tree, tree], [1, 2], {}))
    assert [each.dtype for each in found[:4]] == kinds
    assert all(each.shape == (2, 3) and not each.requires_grad and bool((each == 1).all()) for each in found[:4])
    assert (found[4].shape, found[5], type(found[5])) == ((0, 3), 1.0, float)


def test_values_of_a_rank_with_weight_0_are_ignored():
    """With weight 0, even a NaN is ignored. With another weight, a NaN stays in its place."""
    empty = [0.25, NAN], [8, 0], {}
    other_kind = [torch.tensor(0.25), 0], [8, 0], {}
    infected = [(1.0, NAN, math.inf), (3.0, 1.0, 1.0)], [1, 1], {}
    (one, tensor, three), (other, number, _) = reduced(empty, other_kind, infected)
    assert one[0] == other[0] == 0.25
    assert (tensor[0].item(), number[0]) == (0.25, 0.25)
    assert three[0][0] == 2.0
    assert math.isnan(three[0][1])
    assert three[0][2] == math.inf


def test_many_numbers_take_two_collectives():
    """Up to 495 numbers need one collective, more numbers need two, and a tree without numbers needs one."""
    sizes = [0, 1, 495, 496, 10_000]
    calls = [([torch.full((size,), 1.0), torch.full((size,), 3.0)], [1, 1], {}) for size in sizes]
    found, _ = reduced(*calls, ([{}, {}], [1, 1], {}))
    assert [count for _, count in found] == [1, 1, 1, 2, 2, 1]
    assert all(means.shape == (size,) and bool((means == 2).all()) for (means, _), size in zip(found, sizes, strict=False))
    assert found[-1][0] == {}


def test_trees_that_differ_between_ranks_are_refused():
    """Different keys, shapes, or numbers of values raise GatherError on both ranks, which names the first difference."""
    calls = {
        r'rank 0 has values\["loss"\] \(\), rank 1 has values\["acc"\] \(\)': [{"loss": 1.0}, {"acc": 1.0}],
        r"rank 0 has values \(2,\), rank 1 has values \(3,\)": [torch.ones(2), torch.ones(3)],
        r"rank 0 has values \(\), rank 1 has values \(2000,\)": [1.0, torch.ones(2000)],
        r"rank 0 has nothing else, rank 1 has values\[1\]": [[1.0], [1.0, 2.0]],
    }
    ranks = reduced(*((values, [1, 1], {}) for values in calls.values()))
    for found in ranks:
        for (kind, text), message in zip(found, calls, strict=True):
            assert kind == "GatherError"
            assert re.search(message, text), text


def test_all_ranks_must_use_the_same_op():
    """If one rank uses "mean" and the other "sum", both raise."""

    def reduce():
        try:
            functional.reduce_metrics(1.0, op=("mean", "sum")[current_rank().global_rank])
        except GatherError as error:
            return str(error)

    one, other = on(2, reduce)
    assert one == other
    assert "rank 0 has op='mean', rank 1 has op='sum'" in one


def test_a_mean_with_weight_0_on_every_rank_is_refused():
    """If the weight is 0 on every rank, every rank raises ValueError."""
    for found in reduced(([1.0, 2.0], [0, 0], {})):
        assert found[0][0] == "ValueError"
        assert "weight is 0 on every rank" in found[0][1]
    with pytest.raises(ValueError, match="weight is 0 on every rank"):
        functional.reduce_metrics(1.0, weight=0)


def test_integer_sums_that_do_not_fit_are_refused():
    """If a sum does not fit its dtype, or float64 cannot represent it exactly, every rank raises OverflowError."""
    full = [torch.tensor([100], dtype=torch.int8)] * 2, [1, 1], {"op": "sum"}
    huge = [torch.tensor([2**53])] * 2, [1, 1], {"op": "sum"}
    halves = [torch.tensor([1])] * 2, [0.5, 1], {"op": "sum"}
    found, _ = reduced(full, huge, halves)
    assert [kind for kind, _ in found] == ["OverflowError"] * 3
    assert all("values: the sum over ranks does not fit" in text for _, text in found)


def test_integer_sums_are_exact_or_refused():
    """A sum whose parts float64 cannot hold is refused, also with one rank, and the least integer of a dtype fits."""
    large = [torch.tensor([2**53 + 1]), torch.tensor([-(2**53)])], [1, 1], {"op": "sum"}
    weighted = [torch.tensor([2**50 + 1]), torch.tensor([-(2**50)])], [8, 8], {"op": "sum"}
    least = [torch.tensor([-100], dtype=torch.int8), torch.tensor([-28], dtype=torch.int8)], [1, 1], {"op": "sum"}
    unused = [torch.tensor([7]), torch.tensor([2**60])], [1, 0], {"op": "sum"}
    found, _ = reduced(large, weighted, least, unused)
    assert [kind for kind, _ in found[:2]] == ["OverflowError"] * 2
    assert (found[2][0].tolist(), found[3][0].tolist()) == ([-128], [7])
    with pytest.raises(OverflowError, match=r"does not fit a tensor of torch\.int64 exactly"):
        functional.reduce_metrics(torch.tensor(2**53 + 1), op="sum")


def test_one_rank_with_weight_0_has_no_sum():
    """With one rank too, a sum with weight 0 is 0, also of NaN."""
    assert functional.reduce_metrics(NAN, weight=0, op="sum") == 0.0


@pytest.mark.parametrize(
    ("values", "options", "error", "message"),
    [
        ({"a": "text"}, {}, TypeError, r'values\["a"\] is a str'),
        ([1.0, None], {}, TypeError, r"values\[1\] is a NoneType"),
        (torch.ones(2, dtype=torch.bool), {}, TypeError, "torch.bool"),
        (torch.ones(2, dtype=torch.complex64), {"op": "sum"}, TypeError, "torch.complex64"),
        (torch.eye(2).to_sparse(), {}, TypeError, "sparse_coo"),
        (torch.tensor(3), {}, TypeError, r"values is a tensor of torch.int64, which cannot hold a mean.*op='sum'"),
        (1.0, {"weight": -1}, ValueError, "weight=-1"),
        (1.0, {"weight": NAN}, ValueError, "weight=nan"),
        (1.0, {"op": "max"}, ValueError, "op='max'.*'mean' or 'sum'"),
    ],
    ids=lambda value: None,
)
def test_values_that_cannot_be_reduced_are_refused(values, options, error, message):
    """The error names the place and the value, and is raised before any communication."""
    with pytest.raises(error, match=message):
        functional.reduce_metrics(values, **options)


def test_one_rank_keeps_its_values():
    """With one rank, a mean is the value itself, whatever the weight."""
    assert functional.reduce_metrics({"a": 0.1, "b": True}, weight=3) == {"a": 0.1, "b": 1.0}
    assert functional.reduce_metrics(0.5, weight=3, op="sum") == 1.5
    tensor = torch.tensor([0.1, 0.7], requires_grad=True)
    assert functional.reduce_metrics(tensor, weight=7).tolist() == tensor.tolist()
    assert on(1, lambda: functional.reduce_metrics(0.1, weight=3)) == (0.1,)


def test_ranks_without_a_group_are_refused():
    """Without a process group, ranks raise PlatformError instead of returning their own values."""

    def reduce():
        with pytest.raises(PlatformError, match=r"reduce_metrics.* 2 ranks.*Leave ipc_groups out of Platform"):
            functional.reduce_metrics(1.0)

    on(2, reduce, ipc_groups=None)
