"""The options `unit`, `reduce`, `in_dims`, and `out_dims` of a block."""

from __future__ import annotations

import collections
import dataclasses
import re

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import GatherError, ShardError, parallel

TWO = ["cpu"] * 2
THREE = ["cpu"] * 3


# -- unit


def minus_the_mean_of_the_clip(frames):
    """Subtract from each frame the mean of the four frames of its clip."""
    clips = frames.reshape(-1, 4, 3)
    return (clips - clips.mean(1, keepdim=True)).reshape(-1, 3)


@pytest.mark.parametrize(
    ("clips", "devices", "options", "clips_per_lane"),
    [
        (3, TWO, {}, (2, 1)),
        (5, TWO, {}, (3, 2)),
        (7, THREE, {}, (3, 2, 2)),
        (4, TWO, {"out_dims": 0}, (2, 2)),
        (6, THREE, {"out_dims": 0}, (2, 2, 2)),
        (2, THREE, {"out_dims": 0}, (1, 1)),
    ],
)
def test_rows_of_a_unit_stay_in_one_lane(clips, devices, options, clips_per_lane):
    """The sizes of shards are multiples of `unit`, so a model that mixes rows inside a unit has the plain output."""
    frames = torch.randn(4 * clips, 3)
    with parallel(minus_the_mean_of_the_clip, devices, unit=4, **options) as p:
        for _ in range(3):
            assert_close(p(frames), minus_the_mean_of_the_clip(frames))
            assert p.stats().shards == tuple(4 * count for count in clips_per_lane)


def test_a_unit_applies_to_every_cut_argument():
    """Lists that are cut by item, and tensors with their rows on another dim, are cut between units too."""
    seen = []

    def target(x, columns, names):
        seen.append((len(x), columns.shape[1], names))
        return x + columns.T

    x, columns, names = torch.randn(6, 2), torch.randn(2, 6), list("abcdef")
    with parallel(target, TWO, in_dims={"columns": 1, "names": "items"}, unit=2) as p:
        assert_close(p(x, columns, names), x + columns.T)
    assert sorted(seen) == [(2, 2, ["e", "f"]), (4, 4, ["a", "b", "c", "d"])]


def test_one_output_row_per_unit_is_joined_with_ragged():
    """With out_dims="ragged", a model that returns one row per clip has the plain output."""

    def mean_of_the_clip(frames):
        return frames.reshape(-1, 4, 3).mean(1)

    frames = torch.randn(20, 3)
    with parallel(mean_of_the_clip, TWO, unit=4, out_dims="ragged") as p:
        assert_close(p(frames), mean_of_the_clip(frames))
        assert p.stats().shards == (12, 8)
    with parallel(mean_of_the_clip, TWO, unit=4) as p, pytest.raises(GatherError, match="out_dims"):
        p(frames)


@pytest.mark.parametrize("rows", [1, 3, 7, 9, 18])
def test_a_batch_that_is_no_multiple_of_the_unit_is_refused(rows):
    """Every call raises ShardError, which names the argument, the rows, and row counts that work."""
    with parallel(minus_the_mean_of_the_clip, TWO, unit=4, out_dims=0) as p:
        errors = set()
        for _ in range(3):
            with pytest.raises(
                ShardError, match=rf"args\[0\] has {rows} rows, which is not a multiple of unit=4"
            ) as caught:
                p(torch.randn(rows, 3))
            errors.add(str(caught.value))
        (message,) = errors
        cures = re.search(r"Pass a batch of (?:(\d+) or )?(\d+) rows", message)
        assert cures is not None
        for count in filter(None, map(int, filter(None, cures.groups()))):
            frames = torch.randn(count, 3)
            assert_close(p(frames), minus_the_mean_of_the_clip(frames))


def test_no_rows_and_one_unit_run_plainly():
    """A batch of zero rows, and one of a single unit, are plain calls."""
    with parallel(minus_the_mean_of_the_clip, TWO, unit=4) as p:
        assert p(torch.randn(0, 3)).shape == (0, 3)
        frames = torch.randn(4, 3)
        assert_close(p(frames), minus_the_mean_of_the_clip(frames))
        assert (p.stats().calls, p.stats().plain) == (2, 2)


def test_the_sizes_warning_counts_rows_of_whole_units():
    """Six units on two lanes are cut as four and two; out_dims=0 would cut them as three and three."""
    with (
        parallel(torch.tanh, TWO, unit=4) as p,
        pytest.warns(
            UserWarning, match="a call of 24 rows on 2 lanes has a shard of 16 rows.*the largest shard has 12 of them"
        ),
    ):
        p(torch.randn(24))


@pytest.mark.parametrize("unit", [0, -1, True, 2.0, "8", None])
def test_a_unit_that_is_not_a_positive_number_is_refused(unit):
    """`parallel` raises ShardError, which names the value."""
    with pytest.raises(ShardError, match=re.escape(f"unit={unit!r}")):
        parallel(torch.tanh, TWO, unit=unit)


# -- reduce


class Losses(nn.Module):
    """Returns a mean loss, a count, and logits, in the structure that `kind` names."""

    def __init__(self, kind):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.kind = kind

    def forward(self, x):
        logits = self.linear(x)
        loss, count = logits.square().mean(), (logits > 0).sum()
        return {
            "dict": {"loss": loss, "count": count, "logits": logits},
            "tuple": (loss, count, logits),
            "list": [loss, count, logits],
            "nested": {"metrics": {"loss": loss, "count": count.item()}, "out": (logits, None)},
        }[self.kind]


TREES = {
    "dict": {"loss": "mean", "count": "sum"},
    "tuple": ("mean", "sum", None),
    "list": ["mean", "sum", None],
    "nested": {"metrics": {"loss": "mean", "count": "sum"}},
}


@pytest.mark.parametrize("lanes", [2, 3, 4])
@pytest.mark.parametrize("kind", TREES)
def test_a_tree_reduces_each_number_in_its_own_way(kind, lanes):
    """With a mean for the loss and a sum for the count, outputs and gradients equal the plain ones."""
    model = Losses(kind)
    for rows in (1, 11, 17):
        x = torch.randn(rows, 3)
        plain = model(x)
        with parallel(model, ["cpu"] * lanes, reduce=TREES[kind]):
            for _ in range(3):
                assert_close(model(x), plain)
    model.zero_grad()
    loss_of(model(x)).backward()
    expected = model.linear.weight.grad.clone()
    model.zero_grad()
    with parallel(model, ["cpu"] * lanes, reduce=TREES[kind]):
        loss_of(model(x)).backward()
    assert_close(model.linear.weight.grad, expected)


def loss_of(output):
    output = output.get("metrics", output)["loss"] if isinstance(output, dict) else output[0]
    return output * 3


@pytest.mark.parametrize("rows", [1, 11])
def test_a_tree_may_have_functions_and_stack(rows):
    """A function gets the vector of the lanes' values, and "stack" returns it, also for a call that is not cut."""

    def target(x):
        return {"most": x.max(), "each": x.sum()}

    x = torch.rand(rows)
    with parallel(target, TWO, reduce={"most": torch.amax, "each": "stack"}) as p:
        output = p(x)
    assert output["most"] == x.max()
    assert output["each"].shape == ((1,) if rows == 1 else (2,))
    assert_close(output["each"].sum(), x.sum())


@pytest.mark.parametrize(
    ("reduce", "says"),
    [
        ({"loss": "mean"}, r'output\["count"\] cannot be joined.*reduce'),
        (
            {"loss": "mean", "counts": "sum"},
            r"reduce declares the key 'counts', and the output has \['count', 'logits', 'loss'\]",
        ),
        (("mean", "sum"), r"reduce declares 2 items, and the output has 3"),
        ({"loss": {"a": "mean"}, "count": "sum"}, r'output\["loss"\]'),
    ],
    ids=["left out", "misspelled", "another length", "too deep"],
)
def test_a_tree_that_is_not_like_the_output_is_refused(reduce, says):
    """Each call raises GatherError, which names the place."""
    model = Losses("dict")
    with parallel(model, TWO, reduce=reduce):
        for _ in range(3):
            with pytest.raises(GatherError, match=says):
                model(torch.randn(9, 3))


@pytest.mark.parametrize("reduce", ["median", {"loss": "median"}, ("mean", "max"), {"a": {"b": 3}}, 1], ids=str)
def test_an_unknown_reduction_is_refused(reduce):
    """`parallel` raises GatherError before the block."""
    with pytest.raises(GatherError, match="is not supported"):
        parallel(torch.tanh, TWO, reduce=reduce)


def test_reduce_is_a_tree_like_the_output():
    """Each number has its own reduction."""
    x = torch.arange(14.0).reshape(7, 2)
    with parallel(lambda x: {"loss": x.mean(), "count": len(x)}, TWO, reduce={"loss": "mean", "count": "sum"}) as p:
        assert_close(p(x), {"loss": x.mean(), "count": 7})


def confusion(x):
    return {"scores": x, "matrix": x.T @ x}


@pytest.mark.parametrize(
    ("reduce", "expected"), [("sum", lambda x: x.T @ x), (lambda stacked: stacked.sum(0), lambda x: x.T @ x)]
)
def test_a_tensor_that_sums_over_rows_is_reduced(reduce, expected):
    """A confusion matrix of each lane, for which `reduce` names the reduction, becomes the matrix of the batch."""
    x = torch.randn(7, 3, dtype=torch.float64)
    with parallel(confusion, TWO, reduce={"matrix": reduce}) as p:
        assert_close(p(x), {"scores": x, "matrix": x.T @ x})
    with parallel(lambda x: x.T @ x, TWO, reduce=reduce) as p:
        assert_close(p(x), x.T @ x)


def test_a_reduction_of_all_numbers_does_not_reduce_tensors_with_dims():
    """reduce="sum" for a loss says nothing about a matrix next to it."""
    with parallel(confusion, TWO, reduce="sum") as p, pytest.raises(GatherError, match=r'output\["matrix"\]'):
        p(torch.randn(7, 3))


def test_out_dims_with_a_reduction_names_reduce():
    """The error for out_dims="mean" says that it is a value of `reduce`."""
    with pytest.raises(GatherError, match="'mean' is a value of reduce"):
        parallel(torch.tanh, TWO, out_dims="mean")


@dataclasses.dataclass
class Fields:
    """A batch, an output, or a declaration."""

    x: object
    mask: object


Pair = collections.namedtuple("Pair", "x mask")


@pytest.mark.parametrize(
    "kind", [Fields, Pair, lambda x, mask: {"x": x, "mask": mask}], ids=["dataclass", "namedtuple", "dict"]
)
def test_declarations_have_the_type_of_the_value(kind):
    """`in_dims` and `out_dims` take the dataclass, namedtuple, or dict that the target gets and returns."""

    def target(batch):
        x, mask = (batch["x"], batch["mask"]) if isinstance(batch, dict) else (batch.x, batch.mask)
        assert len(mask) == 7
        return kind(x + mask.sum(), mask)

    x, mask = torch.randn(7, 2), torch.arange(7.0)
    with parallel(target, TWO, in_dims={"batch": kind(0, None)}, out_dims=kind(0, None)) as p:
        output, plain = p(kind(x, mask)), target(kind(x, mask))
    assert type(output) is type(plain)
    assert_close(
        *(each if isinstance(each, dict) else vars(each) if kind is Fields else each._asdict() for each in (output, plain))
    )


def test_items_below_an_argument():
    """A list in a dict is cut by item if its entry says so. Other parts of the dict follow the default."""

    def target(batch):
        return torch.stack([row + len(text) for row, text in zip(batch["x"], batch["texts"], strict=True)])

    batch = {"x": torch.zeros(5, 1), "texts": ["a", "bb", "ccc", "dddd", "eeeee"]}
    with parallel(target, TWO) as p, pytest.raises(ShardError, match=r'in_dims=\{"batch": \{"texts": "items"\}\}'):
        p(batch)
    with parallel(target, TWO, in_dims={"batch": {"texts": "items"}}) as p:
        assert_close(p(batch), target(batch))


@pytest.mark.parametrize(
    ("in_dims", "batch", "message"),
    [
        (
            {"textz": "items"},
            {"texts": ["a"] * 5},
            r"in_dims\[\"batch\"\]\[\"textz\"\] is declared.*a dict with \['texts', 'x'\]",
        ),
        ({"x": 0}, torch.zeros(5), r"'batch' is a Tensor"),
        ({"x": 0}, {"texts": ["a"] * 5}, r"args\[0\]\[\"texts\"\] is a list of 5 items"),
    ],
)
def test_wrong_declarations_below_an_argument_are_refused(in_dims, batch, message):
    """A misspelled key, a value without parts, and a list that no entry declares raise ShardError."""
    if isinstance(batch, dict):
        batch["x"] = torch.zeros(5)
    with parallel(lambda batch: batch, TWO, in_dims={"batch": in_dims}) as p, pytest.raises(ShardError, match=message):
        p(batch)
    with pytest.raises(ShardError, match=r"in_dims\['batch'\]=\{'x': 'rows'\} is not supported"):
        parallel(lambda batch: batch, TWO, in_dims={"batch": {"x": "rows"}})


@pytest.mark.filterwarnings("ignore:a call of 8 rows")
@pytest.mark.parametrize("rows", [8, 9])
def test_a_named_reduction_comes_before_out_dims(rows):
    """An entry of `reduce` for one output holds also if `out_dims` has an entry for all, or None for it."""
    x = torch.randn(rows, 4, dtype=torch.float64)
    expected = {"scores": x, "matrix": x.T @ x}
    for out_dims in (0, {"scores": 0, "matrix": None}):
        with parallel(confusion, TWO, reduce={"matrix": "sum"}, out_dims=out_dims) as p:
            assert_close(p(x), expected)
    with parallel(lambda x: (x.T @ x, x), TWO, reduce=("sum", None), out_dims=(None, 0)) as p:
        assert_close(p(x), (x.T @ x, x))


def test_an_array_that_sums_over_rows_is_reduced():
    """Counts in a numpy array are summed, like a tensor."""
    x = torch.randn(9, 4)
    with parallel(lambda x: {"counts": (x > 0).sum(0).numpy()}, TWO, reduce={"counts": "sum"}) as p:
        assert p(x)["counts"].tolist() == (x > 0).sum(0).tolist()
    with (
        parallel(lambda x: {"x": x.numpy()}, TWO, reduce={"x": "sum"}) as p,
        pytest.raises(GatherError, match="Leave this entry out of reduce"),
    ):
        p(x)
    with (
        parallel(lambda x: {"mean": x.mean(0).numpy()}, TWO, reduce={"mean": "mean"}) as p,
        pytest.raises(GatherError, match=r"torch\.from_numpy"),
    ):
        p(x)


def test_the_error_for_a_matrix_names_reduce():
    """A tensor that sums over rows is refused, and the error names the reduction."""
    with (
        parallel(lambda x: x.T @ x, TWO) as p,
        pytest.raises(GatherError, match=r'reduce="sum", or reduce=\{"key": "sum"\}'),
    ):
        p(torch.randn(9, 4))


def test_a_short_tuple_in_in_dims_is_refused():
    """A tuple declares every item of an argument."""
    with (
        parallel(lambda pair: pair[0], TWO, in_dims={"pair": (0,)}) as p,
        pytest.raises(ShardError, match="declares 1 items"),
    ):
        p((torch.zeros(5), torch.zeros(5)))
