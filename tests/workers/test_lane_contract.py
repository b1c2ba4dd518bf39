"""The contract of lanes, over each kind of lanes: cut calls, joined outputs, and refusals."""

from __future__ import annotations

import random
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.utils import rnn
from torch.testing import assert_close

from parawrap import GatherError, SessionError, ShardError
from tests.workers.lanes_of_every_kind import (  # noqa: F401
    assert_calls_are_plain,
    assert_same,
    every_kind,
)

ROWS = (9, 0, 1, 3, 7, 16, 9)
"""Row counts whose uneven shards are no more than an eighth larger than balanced ones."""

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Output:
    logits: torch.Tensor
    hidden: list[torch.Tensor]
    name: str


class Named(OrderedDict):
    """A class of dicts."""


class Structured(nn.Module):
    """Returns its output in the structure that the caller names."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x, kind):
        y = self.linear(x)
        return {
            "tensor": lambda: y,
            "tuple": lambda: (y, x, y[:, 0]),
            "dict": lambda: {"y": y, "nested": {"x": [x, (y, None)]}, "name": "a"},
            "namedtuple": lambda: Pair(y, (x, "text")),
            "dataclass": lambda: Output(y, [x, y], "a"),
            "class of dicts": lambda: Named(y=y, x=x),
            "list": lambda: [y, x],
            "list of items": lambda: [f"row {float(row[0]):.3f}" for row in x],
            "list of ragged tensors": lambda: [row[: 1 + int(row[0] > 0)] for row in x],
            "array": lambda: x.numpy().sum(1).tolist(),
            "none": lambda: None,
            "text": lambda: "always the same",
            "parameter": lambda: (y, {"weight": self.linear.weight}, self.linear.bias),
            "detached parameter": lambda: (y, self.linear.weight.detach()),
            "empty": lambda: (y, (), {}),
        }[kind]()


class Attending(nn.Module):
    """An encoder with a padding mask."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x, *, mask=None):
        hidden = self.encoder(x, src_key_padding_mask=mask)
        return self.head(hidden, hidden, hidden, key_padding_mask=mask)


class Keywords(nn.Module):
    def forward(self, x, *others, mask=None, scale=1.0, **more):
        x = x * scale
        for other in (*others, *more.values()):
            x = x + other
        return x if mask is None else x.masked_fill(mask[:, None], 0.0)


class Bag:
    """An object that parawrap does not know, with a tensor."""

    def __init__(self, tensor):
        self.tensor = tensor


def double(x):
    return x * 2


def call(*args, **kwargs):
    return args, kwargs


def matmul(x, weight):
    return x @ weight


def words(x, texts):
    return x * torch.tensor([len(text) for text in texts])[:, None], [text.upper() for text in texts]


def loss(x):
    return x.square().mean()


def counts(x):
    return {"positive": (x > 0).sum(), "rows": len(x), "total": x.sum().item()}


def positive_rows(x):
    return x[x[:, 0] > 0]


def widths(x):
    return x[:, : int(x[:, 0].abs().max())]


def all_rows_sum(x):
    return x.sum(0)


def rows_of_a_bag(x, bag):
    return x + bag.tensor


# -- cutting ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model",
    [
        lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)),
        lambda: nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 6, 3), nn.BatchNorm1d(6), nn.ReLU()).eval(),
        lambda: nn.Sequential(nn.Linear(4, 4, dtype=torch.float64), nn.GELU()),
    ],
    ids=["linear", "convolution", "double precision"],
)
def test_cut_call_equals_plain_call(lanes, model):
    """Rows in are rows out, in order, for each number of rows."""
    model = model()
    dtype = next(model.parameters()).dtype
    assert_calls_are_plain(lanes, model, [call(torch.randn(rows, 4, dtype=dtype)) for rows in ROWS])


def test_structure_of_an_output_is_kept(lanes):
    """Nested outputs keep types, None, strings, and the order of items."""
    kinds = (
        "tensor",
        "tuple",
        "dict",
        "namedtuple",
        "dataclass",
        "class of dicts",
        "list",
        "list of items",
        "list of ragged tensors",
        "array",
        "none",
        "text",
        "empty",
    )
    calls = [call(torch.randn(rows, 4), kind) for kind in kinds for rows in (7, 9, 3)]
    assert_calls_are_plain(lanes, Structured(), calls)


def test_equal_tensors_without_the_rows_are_refused(lanes):
    """A detached parameter is a tensor of each lane, and may be a count."""
    with lanes(Structured()) as p, pytest.raises(GatherError, match="Equal values do not make it one value"):
        p(torch.randn(7, 4), "detached parameter")


def test_parameter_in_an_output_is_the_model_s(lanes):
    """The call returns the model's own parameter if every lane returns it."""
    model, x = Structured(), torch.randn(9, 4)
    with lanes(model):
        for _ in range(2):
            _, table, bias = model(x, "parameter")
            assert table["weight"] is model.linear.weight
            assert bias is model.linear.bias


def test_padding_mask_is_cut_with_the_batch(lanes):
    """An attention model gives the plain output, with and without a padding mask."""
    calls = []
    for rows in ROWS[:1] + ROWS[2:]:
        mask = torch.zeros(rows, 5, dtype=torch.bool)
        mask[::2, 3:] = True
        calls += [call(torch.randn(rows, 5, 8), mask=mask), call(torch.randn(rows, 5, 8))]
    assert_calls_are_plain(lanes, Attending().eval(), calls)


def test_keywords_are_cut_and_broadcast(lanes):
    """Keyword arguments are cut as positional ones; numbers, 0-d tensors, and single rows reach each lane."""
    calls = []
    for rows in ROWS:
        x, mask = torch.randn(rows, 4), torch.arange(rows) % 2 == 0
        calls += [
            call(x, mask=mask, scale=2.0),
            call(x=x, mask=mask),
            call(x, torch.tensor(3.0), torch.randn(rows, 1), scale=torch.tensor(0.5), more=torch.randn(rows, 4)),
            call(x, torch.randn(1, 4)),
        ]
    assert_calls_are_plain(lanes, Keywords(), calls)


def test_call_without_tensors_runs(lanes):
    """A call without anything to cut has the plain output."""
    with lanes(lambda *args, **kwargs: (args, kwargs)) as p:
        assert_same(p("a", 3, key=None), (("a", 3), {"key": None}))


def test_in_dims_gives_another_dim(lanes):
    """Two arguments with rows on different dims are cut together."""

    def add(x, y):
        return x + y.T

    calls = [call(torch.randn(rows, 4), torch.randn(4, rows)) for rows in ROWS]
    assert_calls_are_plain(lanes, add, calls, in_dims={"y": 1})


def test_in_dims_none_passes_a_value_whole(lanes):
    """A value with None in `in_dims` reaches each lane whole, also if it has as many rows as the batch."""
    calls = [call(torch.randn(rows, 4), torch.randn(4, 4)) for rows in (9, 5, 3, 7)]
    assert_calls_are_plain(lanes, matmul, calls, in_dims={"weight": None})


def test_in_dims_items_cuts_a_list(lanes):
    """A list of strings with "items" is cut with the tensors, and its outputs are joined."""
    calls = [call(torch.randn(rows, 4), [f"{row}" * (row + 1) for row in range(rows)]) for rows in (9, 3, 7)]
    assert_calls_are_plain(lanes, words, calls, in_dims={"texts": "items"})


def test_dim_of_the_block(lanes):
    """With ``dim=1``, inputs are cut and outputs are joined on dim 1."""
    calls = [call(torch.randn(4, rows)) for rows in ROWS]
    assert_calls_are_plain(lanes, double, calls, dim=1)


# -- joining ---------------------------------------------------------------------------------------------------------------


def test_out_dims_of_an_lstm(lanes):
    """Declared dims join the state of an LSTM on dim 1."""
    calls = [call(torch.randn(rows, 5, 4)) for rows in (8, 2, 3, 7)]
    assert_calls_are_plain(lanes, nn.LSTM(4, 3, 2, batch_first=True), calls, out_dims=(0, (1, 1)))


def test_out_dims_none_returns_one_value(lanes):
    """The call returns a value once if it is the same in every lane."""

    def table(x):
        return x * 2, torch.arange(3.0)

    calls = [call(torch.randn(rows, 4)) for rows in (8, 3, 6)]
    assert_calls_are_plain(lanes, table, calls, out_dims=(0, None))


def test_out_dims_ragged_joins_any_number_of_rows(lanes):
    """Rows that the model drops are missing in the joined output as well."""
    calls = [call(torch.randn(rows, 4)) for rows in ROWS]
    assert_calls_are_plain(lanes, positive_rows, calls, out_dims="ragged")


def test_out_dims_items_joins_lists(lanes):
    """A list with one item per row is joined in order."""

    def items(x):
        return [{"row": row, "sum": float(row.sum())} for row in x]

    assert_calls_are_plain(lanes, items, [call(torch.randn(rows, 4)) for rows in (8, 2, 3)], out_dims="items")


def test_join_pad_pads_to_the_longest_lane(lanes):
    """Outputs of different widths are padded with `pad_value`."""
    x = torch.tensor([[3.0, 1, 1, 1], [2, 2, 2, 2], [1, 5, 5, 5], [1, 6, 6, 6]])
    with lanes(widths, join="pad", pad_value=-1, out_dims=0) as p:
        assert_close(p(x), torch.tensor([[3.0, 1, 1], [2, 2, 2], [1, -1, -1], [1, -1, -1]]))


def test_join_list_returns_the_output_of_each_lane(lanes):
    """With ``join="list"`` nothing is joined, and any output is allowed."""
    x = torch.randn(7, 4)
    with lanes(all_rows_sum, join="list") as p:
        assert_same(p(x), [all_rows_sum(x[:4]), all_rows_sum(x[4:])])


@pytest.mark.parametrize(
    ("reduce", "expected"),
    [
        ("mean", lambda x: loss(x)),
        ("stack", lambda x: torch.stack([loss(x[:4]), loss(x[4:])])),
        (torch.amax, lambda x: torch.stack([loss(x[:4]), loss(x[4:])]).amax()),
    ],
    ids=["mean", "stack", "function"],
)
def test_reduce_joins_losses(lanes, reduce, expected):
    """A mean weights shards by rows; "stack" and functions get one value per lane."""
    x = torch.randn(7, 4)
    with lanes(loss, reduce=reduce, out_dims=0) as p:
        for _ in range(2):
            assert_close(p(x), expected(x))


def test_reduce_sum_adds_counts(lanes):
    """Counts of all kinds of numbers add up."""
    assert_calls_are_plain(lanes, counts, [call(torch.arange(rows * 2.0).view(rows, 2)) for rows in ROWS], reduce="sum")


def test_a_tree_of_reductions_joins_each_number(lanes):
    """A dict in `reduce` names one reduction per number, and other outputs follow the rows."""

    def measured(x):
        return {"y": x * 2, "loss": loss(x), "rows": len(x)}

    calls = [call(torch.randn(rows, 4)) for rows in (9, 3, 7)]
    assert_calls_are_plain(lanes, measured, calls, reduce={"loss": "mean", "rows": "sum"})


def test_a_misspelled_key_is_refused(lanes):
    """A key of `out_dims` or `reduce` that the output does not have is an error."""
    for options in ({"out_dims": {"positiv": None}}, {"reduce": {"positiv": "sum"}}):
        with lanes(counts, **options) as p, pytest.raises(GatherError, match="'positiv'"):
            p(torch.randn(9, 4))


@pytest.mark.parametrize("in_order", [True, False], ids=["sorted", "unsorted"])
def test_packed_sequence_is_cut_and_joined(lanes, in_order):
    """A PackedSequence argument is cut by rows, and the output keeps the caller's order."""
    model, calls = nn.LSTM(3, 4), []
    for rows in (5, 2, 3, 6):
        lengths = (1 + torch.arange(rows) * 3 % 5).sort(descending=True).values.tolist()
        lengths = lengths if in_order else lengths[::-1]
        calls.append(call(rnn.pack_padded_sequence(torch.randn(5, rows, 3), lengths, enforce_sorted=in_order)))
    assert_calls_are_plain(lanes, model, calls, out_dims=(0, (1, 1)))


# -- proof by sizes --------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:a call of .* because the sizes of shards must differ")
def test_outputs_are_joined_by_their_sizes_for_any_number_of_rows(lanes):
    """The sizes of shards differ, so each call shows which outputs follow the rows."""

    def several(x):
        return x * 2, {"sum": x.sum(1), "text": "a"}

    assert_calls_are_plain(lanes, several, [call(torch.randn(rows, 4)) for rows in range(18)])


def test_sizes_of_shards(lanes):
    """Without `out_dims` the sizes differ; with it they are balanced."""
    with lanes(double) as p:
        p(torch.randn(16, 4))
        assert p.stats().shards == (9, 7)
    with lanes(double, out_dims=0) as p:
        p(torch.randn(16, 4))
        assert p.stats().shards == (8, 8)


def test_units_stay_in_one_lane(lanes):
    """With ``unit=4`` each shard holds whole groups of four rows. Another row count is refused."""
    with lanes(double, unit=4, out_dims=0) as p:
        x = torch.randn(12, 4)
        assert_close(p(x), x * 2)
        assert p.stats().shards == (8, 4)
        with pytest.raises(ShardError, match="not a multiple of unit=4"):
            p(torch.randn(10, 4))


def test_large_shard_warns_once(lanes):
    """A shard that is more than an eighth larger than a balanced one is named once per block."""
    with lanes(double) as p:
        with pytest.warns(UserWarning, match=r"a call of 8 rows on 2 lanes has a shard of 5 rows.*out_dims=0"):
            p(torch.randn(8, 4))
        p(torch.randn(8, 4))
        p(torch.randn(2, 4))


def test_refusal_changes_nothing(lanes):
    """A call after a refused one is cut and joined as before."""

    def shaped(x):
        return x if (x >= 0).all() else x.sum(0)

    x = torch.rand(9, 5)
    with lanes(shaped) as p:
        for _ in range(2):
            assert_close(p(x), x)
            with pytest.raises(GatherError, match="out_dims"):
                p(-x)


@pytest.mark.filterwarnings("ignore:a call of .* because the sizes of shards must differ")
def test_call_of_four_rows_runs_whole(lanes):
    """Four rows over two lanes would be three and one, so the call is not cut, and its output is the plain one."""
    with lanes(all_rows_sum) as p:
        for rows in (1, 2, 4):
            x = torch.randn(rows, 4)
            assert_close(p(x), x.sum(0))
        assert p.stats().shards == ()


# -- refusals --------------------------------------------------------------------------------------------------------------


def test_output_without_the_rows_is_refused(lanes):
    """An output that does not follow the rows raises an error that names `out_dims`, in every call."""
    x = torch.randn(9, 4)
    with lanes(all_rows_sum) as p:
        for _ in range(3):
            with pytest.raises(GatherError, match="out_dims"):
                p(x)


def test_loss_without_reduce_is_refused(lanes):
    """No reduction is right for every loss."""
    with lanes(loss) as p, pytest.raises(GatherError, match="reduce"):
        p(torch.randn(9, 4))


def test_declared_rows_are_checked(lanes):
    """An output without the declared rows is refused."""
    with lanes(positive_rows, out_dims=0) as p, pytest.raises(GatherError, match="rows"):
        p(torch.tensor([[1.0], [-1.0], [1.0], [1.0]]))


def test_different_values_are_not_one_value(lanes):
    """A value that differs between lanes is refused, though `out_dims` declares it the same."""
    with lanes(all_rows_sum, out_dims=None) as p, pytest.raises(GatherError, match="different values"):
        p(torch.randn(8, 4))


def test_different_structures_are_refused(lanes):
    """Lanes that return different structures are refused with both of them."""

    def uneven(x):
        return (x, {"a": x} if (x > 0).all() else [x])

    with lanes(uneven) as p, pytest.raises(GatherError, match="lane 1"):
        p(torch.tensor([1.0, 1, 1, 1, 1, -1, -1, -1, -1])[:, None])


def test_list_as_long_as_the_batch_is_refused(lanes):
    """A list with one item per row may be cut or not, so `in_dims` must say which."""
    with lanes(words) as p, pytest.raises(ShardError, match="in_dims"):
        p(torch.randn(4, 2), ["a", "b", "c", "d"])


@pytest.mark.parametrize("make", [lambda: iter("abc"), lambda: {"a"}, lambda: random.Random(0)])
def test_object_with_state_is_refused(lanes, make):
    """Each lane would change the object, so `in_dims` must name it."""
    with lanes(lambda x, extra: x) as p, pytest.raises(ShardError, match=r'in_dims=\{"extra": None\}'):
        p(torch.randn(9, 2), make())


def test_unknown_object_with_tensors_is_refused(lanes):
    """The error names `register_split`; with None in `in_dims` the object reaches each lane."""
    x, bag = torch.randn(9, 4), Bag(torch.randn(4))
    with lanes(rows_of_a_bag) as p, pytest.raises(ShardError, match="register_split"):
        p(x, bag)
    with lanes(rows_of_a_bag, in_dims={"bag": None}) as p:
        assert_close(p(x, bag), x + bag.tensor)


def test_different_numbers_of_rows_are_refused(lanes):
    """All cut tensors must agree on the number of rows."""
    with lanes(torch.add) as p, pytest.raises(ShardError, match="rows"):
        p(torch.randn(8, 4), torch.randn(6, 4))


def test_whole_tensor_that_a_call_writes_is_refused(lanes):
    """Each lane would repeat an in-place write into an argument that is not cut."""

    def write(x, total):
        total += 1
        return x

    with lanes(write, in_dims={"total": None}) as p, pytest.raises(ShardError, match="in place"):
        p(torch.randn(9, 4), torch.zeros(4))


def test_write_into_cut_rows_reaches_the_caller_or_is_refused(lanes):
    """A model that writes its rows in place writes the caller's tensor, as the plain call does. It is never lost."""

    def write(x):
        return x.mul_(2)

    x = torch.ones(8, 4)
    with lanes(write, out_dims=0) as p:
        try:
            assert_close(p(x), torch.full((8, 4), 2.0))
        except (ShardError, SessionError) as error:
            assert "in place" in str(error)  # noqa: PT017
        else:
            assert_close(x, torch.full((8, 4), 2.0))


# -- gradients -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["argument", "parameter"])
def test_gradients_are_computed_or_refused(lanes, what):
    """Lanes in threads compute gradients. Workers refuse the call, and name both ways out."""
    model = nn.Linear(2, 2).requires_grad_(what == "parameter")
    x = torch.ones(9, 2, requires_grad=what == "argument")
    with lanes(model), torch.enable_grad():
        if lanes.name == "thread":
            assert model(x).requires_grad
            return
        with pytest.raises(SessionError, match=rf"{what} .*torch\.no_grad.*@wrapper"):
            model(x)


def test_gradients_of_a_model_in_a_closure_are_computed_or_refused(lanes):
    """A function that calls a model needs gradients as the model does."""
    model = nn.Linear(2, 2)
    with lanes(lambda x: model(x), out_dims=0) as p, torch.enable_grad():
        try:
            assert p(torch.ones(8, 2)).requires_grad
        except SessionError as error:
            assert lanes.name != "thread"
            assert "torch.no_grad()" in str(error)  # noqa: PT017


def test_gradients_inside_forward_are_computed(lanes):
    """A target that computes a gradient itself, and returns it, has the plain output."""

    def slope(x):
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            return torch.autograd.grad(x.square().sum(), x)[0]

    assert_calls_are_plain(lanes, slope, [call(torch.randn(rows, 4)) for rows in (9, 3)])
