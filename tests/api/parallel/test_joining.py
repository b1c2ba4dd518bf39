"""How outputs are joined: each call has the plain output, or an error that names the option to set, at every size."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import rnn
from torch.testing import assert_close

from parawrap import GatherError, parallel
from tests.helpers.same import assert_same

pytestmark = pytest.mark.filterwarnings("ignore:a call of .* rows on .* lanes:UserWarning")  # of small batches
TWO = ["cpu"] * 2
THREE = ["cpu"] * 3
ROWS = (2, 3, 4, 5, 6, 8, 9, 12)


def is_cut(rows, lanes):
    """True if a call without `out_dims` is cut: not with two rows, or with four on two lanes."""
    return rows > 2 and (rows, lanes) != (4, 2)


def assert_joined(target, make, rows=ROWS, **options):
    """Assert that calls on two to four lanes have the plain output, for several row counts."""
    for lanes in (2, 3, 4):
        with parallel(target, ["cpu"] * lanes, **options) as p:
            for count in rows:
                args = make(count)
                assert_same(p(*args), target(*args))


def assert_refused(target, make, option="out_dims", rows=ROWS, **options):
    """Assert that each call that is cut raises an error that names `option`, also if it is repeated."""
    for lanes in (2, 3, 4):
        with parallel(target, ["cpu"] * lanes, **options) as p:
            for count in rows:
                args = make(count)
                if not is_cut(count, lanes):
                    assert_same(p(*args), target(*args))
                    continue
                for _ in range(2):
                    with pytest.raises(GatherError, match=rf"{option}|register_split\("):
                        p(*args)


def columns(rows):
    return (torch.arange(rows * 3.0).reshape(rows, 3) % 7,)


# -- outputs with rows


@pytest.mark.parametrize(
    "target",
    [
        lambda x: x.numpy() * 2,
        lambda x: np.zeros(len(x)),
        lambda x: {"a": [np.ones((len(x), 2), dtype=np.int32), x.sum(1).numpy()]},
        lambda x: np.array([f"row {int(row[0])}" for row in x]),
        lambda x: [f"row {int(row[0])}" for row in x],
        lambda x: [0] * len(x),
        lambda x: [row[: 1 + int(row[0]) % 3] for row in x],
        lambda x: [{"label": str(int(row[0])), "box": row} for row in x],
        lambda x: {"texts": ["a"] * len(x), "logits": x},
        lambda x: tuple(int(row[0]) for row in x),
    ],
    ids=["array", "equal", "nested", "texts", "list", "equal items", "ragged items", "dicts", "in a dict", "tuple"],
)
def test_arrays_and_lists_with_rows(target):
    """They are concatenated, also if the items are equal or differ in shape."""
    assert_joined(target, columns)


def test_a_list_of_outputs_stays():
    """Also if each lane has as many rows as the list has outputs."""
    assert_joined(lambda x: [x, (x + 1, x.sum(1))], columns, rows=(2, 4, 6, 8, 9, 12))


class Packs(nn.Module):
    """Takes padded rows and their lengths, and returns a packed sequence."""

    def __init__(self, *, in_order):
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)
        self.in_order = in_order

    def forward(self, padded, lengths):
        packed = rnn.pack_padded_sequence(padded, lengths, batch_first=True, enforce_sorted=self.in_order)
        return self.lstm(packed)[0]


@pytest.mark.parametrize("in_order", [True, False], ids=["sorted", "unsorted"])
def test_packed_outputs_keep_the_order_of_rows(in_order):
    def make(rows):
        lengths = 1 + torch.arange(rows) * 3 % 5
        return torch.randn(rows, 5, 3), lengths.sort(descending=True).values if in_order else lengths

    with torch.no_grad():
        assert_joined(Packs(in_order=in_order), make, rows=(2, 5, 8))


# -- outputs without rows


@pytest.mark.parametrize(
    "target",
    [
        lambda x: (x, torch.arange(3)),
        lambda x: (x, np.arange(3)),
        lambda x: torch.full((3,), float(len(x))),
        lambda x: x.sum(0),
        lambda x: (x, {"total": x.sum(0, keepdim=True)}),
        lambda x: torch.cat([x, x]),
        lambda x: x.repeat_interleave(2, 0),
        lambda x: x[x[:, 0] > 2],
        lambda x: np.histogram(x.numpy(), 3)[0] + len(x),
        lambda x: f"{len(x)} rows",
        lambda x: (x, {"size": str(len(x))}),
        lambda x: (x, torch.Size((len(x),)), range(len(x))),
        lambda x: torch.cdist(x, x),
    ],
    ids=[
        "constant", "constant array", "size", "sum", "nested sum", "cat", "repeat", "filter", "histogram", "text",
        "nested text", "objects", "distances",
    ],
)  # fmt: skip
def test_outputs_without_rows_are_refused(target):
    """Also if a shard has as many rows as the output is long."""
    assert_refused(target, columns)


@pytest.mark.parametrize(
    "target",
    [
        len,
        lambda x: float(len(x)),
        lambda x: len(x) > 3,
        lambda x: (x > 2).sum(),
        lambda x: (x > 2).all(),
        lambda x: {"logits": x, "loss": x.square().mean()},
        lambda x: np.float32(x.sum()),
        lambda x: (x, [x.sum()]),
        lambda x: [x.mean(), x.sum()],
    ],
    ids=["int", "float", "bool", "count", "all", "loss", "numpy", "list", "two"],
)
def test_numbers_are_refused_without_reduce(target):
    assert_refused(target, columns, option="reduce")


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_hidden_states(kind, layers):
    """Their rows are on dim 1. They are refused for every layer count, and joined with `out_dims`."""
    model = kind(3, 2, layers, batch_first=True)

    def make(rows):
        return (torch.randn(rows, 5, 3),)

    with torch.no_grad():
        assert_refused(model, make)
        assert_joined(model, make, out_dims=(0, (1, 1)) if kind is nn.LSTM else (0, 1))
        time_first = kind(3, 2, layers)
        assert_joined(time_first, lambda rows: (torch.randn(5, rows, 3),), rows=(2, 9), dim=1, out_dims=1)


@pytest.mark.parametrize("length", [2, 3, 4])
def test_attention_weights(length):
    """With rows on dim 1, the weights have theirs on dim 0."""
    model = nn.MultiheadAttention(4, 2).eval()

    def make(rows):
        return (torch.randn(length, rows, 4),) * 3

    with torch.no_grad():
        assert_refused(model, make, dim=1)
        assert_joined(model, make, dim=1, out_dims=(1, 0))


def test_a_call_does_not_follow_earlier_outputs():
    """Hidden states are refused also after calls whose output followed the rows."""

    class Hidden(nn.LSTM):
        hidden = False

        def forward(self, x):
            output, (states, _) = super().forward(x)
            return states if self.hidden else output

    model = Hidden(3, 4, 3, batch_first=True)
    with torch.no_grad(), parallel(model, THREE):
        model(torch.randn(7, 5, 3))
        model.hidden = True
        with pytest.raises(GatherError, match="out_dims"):
            model(torch.randn(9, 5, 3))


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_the_models_tensors_are_returned_once(kind):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.randn(3, 2))
            if kind == "parameter":
                del self.table
                self.table = nn.Parameter(torch.randn(3, 2))

        def forward(self, x):
            return x, self.table

    model = Model()
    with parallel(model, THREE):
        for _ in range(2):
            table = model(torch.zeros(7, 2))[1]
            assert_close(table, model.table)
            assert table is model.table or kind == "buffer"


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (lambda x: {"a": x, "b": x} if len(x) == 3 else {"a": x}, r"lane 0.*'b'.*lane 1"),
        (lambda x: (x, len(x)), r"output\[1\]"),
        (lambda x: x if len(x) == 3 else None, "None"),
        (lambda x: (x, "many" if len(x) > 2 else "few"), r"output\[1\]"),
        (lambda x: {"a": [x, x @ x.T]}, r'\["a"\]\[1\].*\(3, 3\).*\(2, 2\).*join="list"'),
        (lambda x: x.T @ x, r'reduce="sum", or reduce=\{"key": "sum"\}'),
    ],
    ids=["keys", "numbers", "None", "texts", "ragged", "matrix"],
)
def test_errors_name_the_place(target, says):
    with parallel(target, TWO) as p, pytest.raises(GatherError, match=says):
        p(torch.zeros(5, 2))


def test_outputs_that_hold_a_layer_are_refused():
    """A lane's copy of a layer ends with the block. The rule holds in calls, `map`, and `submit`."""

    class Returns(nn.Linear):
        def forward(self, x):
            return super().forward(x), self

    x = torch.ones(5, 2)
    with torch.no_grad(), parallel(Returns(2, 2), TWO) as p:
        for use in (lambda: p(x), lambda: next(p.map([x])), lambda: p.submit(x).result()):
            with pytest.raises(GatherError, match="Returns"):
                use()


# -- out_dims and join


@pytest.mark.parametrize("constant", [torch.arange(3), np.arange(3), "text", 3], ids=["tensor", "array", "text", "number"])
def test_out_dims_none_returns_the_value_once(constant):
    assert_joined(lambda x: (x, constant), columns, out_dims=(0, None))
    with parallel(lambda x: (x, x[0]), TWO, out_dims=(0, None)) as p, pytest.raises(GatherError, match=r"output\[1\]"):
        p(torch.randn(6, 3))


def test_out_dims_of_distances():
    """A matrix of all rows and one whole argument has the plain output."""
    assert_joined(torch.cdist, lambda rows: (torch.randn(rows, 3), torch.randn(9, 3)), rows=(5, 9), in_dims={"x2": None})


def test_out_dims_ragged():
    """Rows are joined in order, whatever their number."""

    def mean_of_the_clip(frames):
        return frames.reshape(-1, 4, 3).mean(1)

    frames = torch.randn(20, 3)
    with parallel(mean_of_the_clip, TWO, unit=4, out_dims="ragged") as p:
        assert_close(p(frames), mean_of_the_clip(frames))
    with parallel(mean_of_the_clip, TWO, unit=4) as p, pytest.raises(GatherError, match="out_dims"):
        p(frames)


def test_out_dims_unlike_the_output():
    with parallel(lambda x: {"a": x}, TWO, out_dims={"b": 0}) as p, pytest.raises(GatherError, match="'b'"):
        p(torch.zeros(5, 2))


def test_join_list():
    """Outputs are returned in lane order, for batches of any size."""
    with parallel(lambda x: torch.zeros(len(x), len(x)), THREE, join="list") as p:
        for rows, shapes in ((7, [(3, 3), (2, 2), (2, 2)]), (1, [(1, 1)]), (0, [(0, 0)])):
            assert [tuple(output.shape) for output in p(torch.zeros(rows, 2))] == shapes


def test_join_pad():
    """Other dims are padded to the longest lane."""
    with parallel(lambda x: x[:, : len(x)], TWO, join="pad", pad_value=-1.0) as p:
        assert p(torch.ones(5, 4)).tolist() == [[1, 1, 1, *[-1] * 0]] * 3 + [[1, 1, -1]] * 2


def test_output_device():
    with parallel(torch.tanh, TWO, output_device="cpu") as p:
        assert p(torch.zeros(5)).device == torch.device("cpu")


# -- reduce


@pytest.mark.parametrize(
    ("reduce", "rows", "want"),
    [
        ("sum", 7, 7.0),
        ("stack", 7, [3.0, 2.0, 2.0]),
        ("stack", 1, [1.0]),
        (torch.amax, 7, 3.0),
        ({"a": "sum"}, 7, {"a": 7.0}),
    ],
    ids=["sum", "stack", "stack of one", "function", "tree"],
)
def test_reduce_of_scalars(reduce, rows, want):
    tree = isinstance(reduce, dict)
    with parallel(lambda x: {"a": x.sum()} if tree else x.sum(), THREE, reduce=reduce) as p:
        output = p(torch.ones(rows))
    assert ({"a": output["a"].tolist()} if tree else output.tolist()) == want


def scored(rows):
    return torch.randn(rows, 5), torch.randint(0, 5, (rows,))


class Counts(nn.Module):
    """Returns counts of a batch in the structure that `kind` names."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, logits, labels):
        correct, total = (logits.argmax(1) == labels).sum(), len(labels)
        loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
        return {
            "tuple": (correct, total),
            "dict": {"loss": loss, "correct": correct, "total": total},
            "python": {"loss": loss.item(), "nested": [correct.item(), {"total": total}]},
            "numpy": (correct.numpy()[()], np.float64(total)),
        }[self.kind]


@pytest.mark.parametrize("kind", ["tuple", "dict", "python", "numpy"])
def test_counts_add_up(kind):
    assert_joined(Counts(kind), scored, rows=(0, 1, *ROWS), reduce="sum")


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


@pytest.mark.parametrize("kind", TREES)
def test_a_tree_reduces_each_number(kind):
    """A mean is weighted by rows, so it is exact for every size; its gradients are the plain ones."""
    model, x = Losses(kind), torch.randn(11, 3)
    assert_joined(model, lambda rows: (torch.randn(rows, 3),), rows=(1, 3, 11), reduce=TREES[kind])

    def gradient():
        model.zero_grad()
        output = model(x)
        output = output.get("metrics", output)["loss"] if isinstance(output, dict) else output[0]
        (output * 3).backward()
        return model.linear.weight.grad.clone()

    plain = gradient()
    with parallel(model, THREE, reduce=TREES[kind]):
        assert_close(gradient(), plain)


@pytest.mark.parametrize(
    ("reduce", "says"),
    [
        ({"loss": "mean"}, r'output\["count"\] cannot be joined.*reduce'),
        ({"loss": "mean", "counts": "sum"}, r"the key 'counts', and the output has \['count', 'logits', 'loss'\]"),
        (("mean", "sum"), r"reduce declares 2 items, and the output has 3"),
        ({"loss": {"a": "mean"}, "count": "sum"}, r'output\["loss"\]'),
        ("mean", r'output\["count"\].*reduce="sum"'),
    ],
    ids=["left out", "misspelled", "another length", "too deep", "mean of a count"],
)
def test_reductions_unlike_the_output(reduce, says):
    model = Losses("dict")
    with parallel(model, TWO, reduce=reduce), pytest.raises(GatherError, match=says):
        model(torch.randn(9, 3))


def confusion(x):
    return {"scores": x, "matrix": x.T @ x}


@pytest.mark.parametrize("reduce", ["sum", lambda stacked: stacked.sum(0)], ids=["sum", "function"])
@pytest.mark.parametrize("rows", [8, 9])
def test_a_tensor_that_sums_over_rows(reduce, rows):
    """An entry of `reduce` of its own reduces it, also if `out_dims` has an entry for all, or None for it."""
    x = torch.randn(rows, 3, dtype=torch.float64)
    for out_dims in ({}, {"out_dims": 0}, {"out_dims": {"scores": 0, "matrix": None}}):
        with parallel(confusion, TWO, reduce={"matrix": reduce}, **out_dims) as p:
            assert_close(p(x), confusion(x))
    with parallel(lambda x: x.T @ x, TWO, reduce=reduce) as p:
        assert_close(p(x), x.T @ x)
    with parallel(confusion, TWO, reduce="sum") as p, pytest.raises(GatherError, match=r'output\["matrix"\]'):
        p(x)  # "sum" for all numbers says nothing about a matrix


def test_an_array_that_sums_over_rows():
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


@pytest.mark.parametrize("out_dims", [{}, {"out_dims": {"loss": 0, "z": 0}}, {"out_dims": 0}], ids=["none", "tree", "all"])
def test_a_row_without_its_dim_is_not_reduced(out_dims):
    """If squeeze() makes one-row shards 0-d, they are refused instead of averaged like a loss."""

    def target(x):
        z = x.sum(1).squeeze()
        return {"loss": z.mean(), "z": z}

    x = torch.randn(10, 4)
    with parallel(target, THREE, reduce="mean", **out_dims) as p:
        assert_close(p(x), target(x))
        with pytest.raises(GatherError, match=r"cannot be joined: (the lanes had 2, 1 rows|each lane had one row)"):
            p(torch.randn(3, 4))


def test_outputs_are_joined_outside_autocast():
    """Autocast would round the values of lanes."""
    seen = []

    def reduced(vector):
        seen.append(torch.is_autocast_enabled("cpu"))
        return vector.sum()

    with parallel(torch.sum, TWO, reduce=reduced) as p, torch.autocast("cpu", dtype=torch.bfloat16):
        p(torch.ones(9))
    assert seen == [False]


@dataclasses.dataclass
class Boxes:
    corners: torch.Tensor
    names: list[str]


def test_refused_outputs_do_not_count():
    """A call whose output is refused is no call of `stats`."""
    with parallel(lambda x: Boxes(x.mean(), []), TWO) as p:
        with pytest.raises(GatherError, match="corners"):
            p(torch.randn(9, 2))
        assert p.stats().calls == 0
