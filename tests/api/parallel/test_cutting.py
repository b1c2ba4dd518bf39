"""How arguments are cut: which every lane gets whole, which are refused, and that each cure of an error works."""

from __future__ import annotations

import array
import ast
import collections
import dataclasses
import datetime as dt
import enum
import functools
import itertools
import math
import pathlib
import random
import re
import threading
import uuid
import warnings
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import rnn
from torch.testing import assert_close

from parawrap import GatherError, ShardError, parallel
from tests.helpers.same import assert_same
from tests.helpers.waiting import PATIENCE_S

pytestmark = pytest.mark.filterwarnings("ignore:a call of .* rows on .* lanes:UserWarning")  # of small batches
TWO = ["cpu"] * 2
THREE = ["cpu"] * 3
ROWS = 9


class Color(enum.Enum):
    RED = 1


@dataclasses.dataclass(frozen=True)
class Config:
    scale: float
    names: list[str] = dataclasses.field(default_factory=list)


class Mine:
    """An object of a user's class."""


class Spy:
    """A target that returns its first argument plus 1, and keeps what each lane got."""

    def __init__(self):
        self.seen = []

    def __call__(self, x, extra=None):
        self.seen.append((int(x[0]), len(x), extra))
        return x + 1

    def in_row_order(self):
        """Return the row count and the argument of each lane of the last call."""
        lanes, self.seen = sorted(self.seen, key=lambda each: each[0]), []
        return [(rows, extra) for _, rows, extra in lanes]


# -- whole


WHOLE = [
    3, 2.5, True, 1j, Decimal("1.5"), Fraction(1, 3), np.float32(1), np.int64(2), np.bool_(True),
    "text", b"bytes", None, ..., Color.RED, Color, int, len, torch.relu, math, lambda x: x,
    torch.float32, torch.device("cpu"), torch.strided, torch.contiguous_format, torch.Size((ROWS, 2)), np.dtype("f4"),
    slice(1, ROWS), pathlib.Path("a/b"), dt.date(2020, 1, 1), dt.datetime(2020, 1, 1, tzinfo=dt.UTC), dt.timedelta(1),
    dt.time(1), dt.UTC, re.compile("a"), uuid.UUID(int=1),
    [1, 2], (1, "a", None), {"a": [1, "b"], "c": {"d": (2.0, torch.int8)}}, ["a"] * (ROWS - 1), ["a"] * (ROWS + 1),
    [], (), {}, Config(2.0, ["a", "b"]), torch.tensor(3.0), torch.zeros(1, 2),
]  # fmt: skip


@pytest.mark.parametrize("value", WHOLE, ids=lambda value: type(value).__name__)
def test_values_that_every_lane_gets(value):
    spy, x = Spy(), torch.arange(float(ROWS))
    with parallel(spy, TWO) as p:
        for by_keyword in (True, False):
            assert_close(p(x, extra=value) if by_keyword else p(x, value), x + 1)
            (first, got), (second, also) = spy.in_row_order()
            assert (first, second) == (5, 4)
            assert_same(got, value)
            assert_same(also, value)


# -- refused, with cures


def read_once():
    yield from range(ROWS)


ITEMS = {
    "texts": lambda: list("abcdefghi"),
    "numbers": lambda: list(range(ROWS)),
    "lists": lambda: [[index] * 2 for index in range(ROWS)],
    "none": lambda: [None] * ROWS,
    "tuple": lambda: tuple("abcdefghi"),
    "deque": lambda: collections.deque(range(ROWS)),
    "range": lambda: range(ROWS),
    "array.array": lambda: array.array("d", range(ROWS)),
    "UserList": lambda: collections.UserList("abcdefghi"),
    "array": lambda: np.arange(ROWS),
    "matrix": lambda: np.arange(ROWS * 2.0).reshape(ROWS, 2),
    "array of texts": lambda: np.array(list("abcdefghi")),
}
"""Sequences with one item per row."""

OTHERS = {
    "short deque": lambda: collections.deque([1, 2]),
    "short range": lambda: range(3),
    "short array": lambda: np.arange(3),
    "iterator": lambda: iter("abcdefghi"),
    "generator": read_once,
    "count": itertools.count,
    "set": lambda: {1, 2},
    "frozenset": lambda: frozenset("ab"),
    "dict values": lambda: {"a": 1}.values(),
    "random": lambda: random.Random(1),
    "numpy random": lambda: np.random.default_rng(1),
    "lock": threading.Lock,
    "object": Mine,
    "object in a list": lambda: [Mine(), 1],
    "object in a dict": lambda: {"a": {"b": Mine()}},
    "iterator in a tuple": lambda: (1, iter("ab")),
}
"""Values that cannot be one item per row, and that may have a state."""


def cures_of(message):
    """Return the values of `in_dims` that an error names."""
    found = re.findall(r"in_dims=(\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\})", message)
    assert found, message
    return [ast.literal_eval(each) for each in found]


def item_of(values, index):
    value = values[index]
    return value.tolist() if isinstance(value, np.ndarray) else value


@pytest.mark.parametrize("name", [*ITEMS, *OTHERS])
def test_other_values_are_refused(name):
    """The error names the argument and the values of `in_dims`. With each of them, the call has the plain output."""
    make, x, spy = {**ITEMS, **OTHERS}[name], torch.arange(float(ROWS)), Spy()
    with parallel(spy, TWO) as p:
        with pytest.raises(ShardError, match=r"^kwargs\[\"extra\"\]"):
            p(x, extra=make())
        with pytest.raises(ShardError, match=r"^args\[1\]") as caught:
            p(x, make())
        assert spy.seen == []
        whole = make()
        p.submit(x, whole).result(PATIENCE_S)
        p(x[:1], whole)
        assert all(got is whole for _, got in spy.in_row_order())  # calls that are not cut
    cures = cures_of(str(caught.value))
    below = ("a", "b") if name == "object in a dict" else ()
    entries = [functools.reduce(dict.__getitem__, ("extra", *below), in_dims) for in_dims in cures]
    assert None in entries
    assert name not in ITEMS or "items" in entries
    for in_dims, entry in zip(cures, entries, strict=True):
        if entry == "items" and name not in ITEMS:
            continue  # the error does not know whether it has one item per row
        with parallel(spy, TWO, in_dims=in_dims) as p:
            value = make()
            assert_close(p(x, value), x + 1)
        (first, got), (second, also) = spy.in_row_order()
        assert (first, second) == (5, 4)
        if entry is None:
            assert got is value or got == value
            assert also is value or also == value
        else:
            assert (len(got), len(also)) == (5, 4)
            assert type(got) is type(also)
            items = [item_of(part, index) for part in (got, also) for index in range(len(part))]
            assert items == [item_of(value, index) for index in range(ROWS)]


def test_an_array_may_be_given_as_a_tensor():
    spy, x, value = Spy(), torch.arange(float(ROWS)), np.arange(ROWS)
    with parallel(spy, TWO) as p:
        with pytest.raises(ShardError, match=r"torch\.from_numpy"):
            p(x, value)
        p(x, torch.from_numpy(value))
    assert [extra.tolist() for _, extra in spy.in_row_order()] == [[0, 1, 2, 3, 4], [5, 6, 7, 8]]


@pytest.mark.parametrize(
    "value", [["a"] * (ROWS - 1), range(3), np.arange(3), {1, 2}, iter("abcdefghi")], ids=lambda value: type(value).__name__
)
def test_items_of_another_number(value):
    """With "items", a value that does not have one item per row is refused."""
    with parallel(Spy(), TWO, in_dims={"extra": "items"}) as p, pytest.raises(ShardError):
        p(torch.arange(float(ROWS)), value)


def test_lists_of_one_row_tensors():
    """Each of them would go whole to every lane, so a list as long as the batch is refused. Both cures work."""

    def scaled(x, boxes):
        return torch.stack([row * box.sum() for row, box in zip(x, boxes, strict=False)])

    x, boxes = torch.ones(9, 2), [torch.full((1, 4), float(row)) for row in range(9)]
    with (
        parallel(scaled, TWO) as p,
        pytest.raises(ShardError, match=r"args\[1\] is a list of 9 items with tensors of one row"),
    ):
        p(x, boxes)
    with parallel(scaled, TWO, in_dims={"boxes": "items"}) as p:
        assert torch.equal(p(x, boxes), scaled(x, boxes))
    with parallel(lambda x, boxes: x + boxes[8].sum(), TWO, in_dims={"boxes": None}) as p:
        assert torch.equal(p(x, boxes), x + 32)


class Cache:
    """An object of a class that parawrap does not know."""

    def __init__(self, keys):
        self.keys = keys


class Slotted:
    __slots__ = ("__keys",)

    def __init__(self, keys):
        self.__keys = keys


HOLDERS = {
    "object": Cache,
    "slots": Slotted,
    "containers": lambda keys: Cache([{"layer": (keys,)}]),
    "nested": lambda keys: Cache(Cache(keys)),
    "list": lambda keys: [Cache(keys)],
    "dict": lambda keys: {"a": Slotted([keys])},
}


@pytest.mark.parametrize("name", HOLDERS)
@pytest.mark.parametrize("rows", [2, 9])
def test_unknown_objects_that_hold_tensors(name, rows):
    """They are refused at every row count, until `in_dims` gives them to every lane."""
    cache, x = HOLDERS[name](torch.zeros(rows, 2)), torch.zeros(rows, 2)
    with parallel(lambda x, cache: x, TWO) as p:
        with pytest.raises(ShardError, match=r'register_split.*in_dims=\{"cache": (None|\{"a": None\})\}') as caught:
            p(x, cache)
        with pytest.raises(ShardError, match="register_split"):
            p(x, cache=cache)
    seen = []
    with parallel(lambda x, cache: seen.append(cache) or x, TWO, in_dims=cures_of(str(caught.value))[0]) as p:
        p(x, cache)
    assert all(each is cache or each == cache for each in seen)


def test_unequal_row_counts_are_refused():
    with (
        parallel(lambda x, *, mask: x, TWO) as p,
        pytest.raises(ShardError, match=r'kwargs\["mask"\] has 2 .*args\[0\] has 6.*in_dims=\{"mask": None\}'),
    ):
        p(torch.zeros(6, 3), mask=torch.zeros(2, dtype=torch.bool))


@pytest.mark.parametrize("dim", [2, -3])
def test_a_dim_out_of_range_is_refused(dim):
    with parallel(torch.tanh, TWO, dim=dim) as p, pytest.raises(ShardError, match=r"out of range.*\(4, 3\)"):
        p(torch.zeros(4, 3))


def test_nested_tensors_are_refused():
    """As arguments and as outputs."""
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # torch warns once that they are a prototype
        nested = torch.nested.nested_tensor([torch.randn(size, 3) for size in (2, 4, 1, 3, 2, 5, 3)])
    with parallel(lambda x: x, TWO) as p, pytest.raises(ShardError, match=r"nested.*in_dims"):
        p(nested)
    nest = parallel(lambda x: torch.nested.nested_tensor(list(x)), TWO)
    with nest as p, pytest.raises(GatherError, match='join="list"'):
        p(torch.randn(9, 3))


@pytest.mark.parametrize("step", [torch.tensor(0.0), torch.zeros(1, 2)], ids=["0-d", "one row"])
def test_writes_to_broadcast_tensors(step):
    """Each lane would repeat the write, so the call is refused."""

    def target(x, step):
        step += 1
        return x * step

    with parallel(target, TWO) as p, pytest.raises(ShardError, match="in place"):
        p(torch.ones(9, 2), step.clone())


# -- in_dims


def test_in_dims_by_position_and_keyword():
    """For a module, the names are parameters of forward. None gives the whole value to every lane."""

    class Model(nn.Module):
        def forward(self, ids, table, columns):
            return table[ids] + columns.T

    model, table, columns = Model(), torch.randn(5, 2), torch.randn(2, 7)
    ids = torch.tensor([0, 4, 2, 2, 1, 3, 0])
    plain = model(ids, table, columns)
    with parallel(model, THREE, in_dims={"table": None, "columns": 1}) as p:
        assert_close(model(ids, table, columns), plain)
        assert_close(model(ids, columns=columns, table=table), plain)
        assert_close(p(columns=columns, table=table, ids=ids), plain)


@dataclasses.dataclass
class Fields:
    """A batch, an output, or a declaration."""

    x: object
    mask: object


Pair = collections.namedtuple("Pair", "x mask")


@pytest.mark.parametrize(
    "kind", [Fields, Pair, lambda x, mask: {"x": x, "mask": mask}], ids=["dataclass", "namedtuple", "dict"]
)
def test_declarations_have_the_type_of_a_value(kind):
    """`in_dims` and `out_dims` take the dataclass, namedtuple, or dict that the target gets and returns."""

    def target(batch):
        x, mask = (batch["x"], batch["mask"]) if isinstance(batch, dict) else (batch.x, batch.mask)
        assert len(mask) == 7
        return kind(x + mask.sum(), mask)

    batch = kind(torch.randn(7, 2), torch.arange(7.0))
    with parallel(target, TWO, in_dims={"batch": kind(0, None)}, out_dims=kind(0, None)) as p:
        assert_same(p(batch), target(batch))


def test_items_below_an_argument():
    """Other parts of the argument follow the default."""

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
            {"x": torch.zeros(5), "texts": "a"},
            r"\[\"textz\"\] is declared.*a dict with \['texts', 'x'\]",
        ),
        ({"x": 0}, torch.zeros(5), r"'batch' is a Tensor"),
        ({"x": 0}, {"x": torch.zeros(5), "texts": ["a"] * 5}, r"args\[0\]\[\"texts\"\] is a list of 5 items"),
        ((0,), (torch.zeros(5), torch.zeros(5)), "declares 1 items"),
    ],
    ids=["misspelled", "no parts", "undeclared", "short tuple"],
)
def test_declarations_unlike_the_value(in_dims, batch, message):
    with parallel(lambda batch: batch, TWO, in_dims={"batch": in_dims}) as p, pytest.raises(ShardError, match=message):
        p(batch)


def test_texts_without_tensors_warn():
    """Such a call runs plainly. The warning names both values of `in_dims`, and each of them ends it."""
    texts = ["a", "b", "c", "d", "e"]

    def target(texts):
        return [text.upper() for text in texts]

    with parallel(target, TWO) as p:
        with pytest.warns(UserWarning, match=r"a call without tensors runs plainly: args\[0\] is a list") as caught:
            p(texts)
        p(texts)
    (warning,) = caught
    for in_dim, shards in (("items", (3, 2)), (None, ())):
        assert f"in_dims={{'texts': {in_dim!r}}}".replace("'", '"') in str(warning.message)
        with parallel(target, TWO, in_dims={"texts": in_dim}) as p:
            assert p(texts) == ["A", "B", "C", "D", "E"]
            assert p.stats().shards == shards


# -- packed sequences


class OnPacked(nn.Module):
    """Takes and returns a packed sequence."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 4)

    def forward(self, packed):
        return self.lstm(packed)[0]


@pytest.mark.parametrize("in_order", [True, False], ids=["sorted", "unsorted"])
@pytest.mark.parametrize("rows", [2, 5, 8])
def test_packed_arguments_are_cut_by_rows(rows, in_order):
    """Outputs and gradients are the plain ones. `map` passes a packed batch as one argument."""
    lengths = 1 + torch.arange(rows) * 3 % 5
    lengths = lengths.sort(descending=True).values if in_order else lengths
    packed = rnn.pack_padded_sequence(torch.randn(5, rows, 3), lengths, enforce_sorted=in_order)
    model = OnPacked()
    plain = model(packed)
    plain.data.square().sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with parallel(model, THREE) as p:
        output = model(packed)
        assert_same(output, plain)
        output.data.square().sum().backward()
        assert_same(next(p.map([packed])), plain)
    assert_close([parameter.grad for parameter in model.parameters()], gradients)


# -- unit


def minus_the_mean_of_the_clip(frames):
    """Subtract from each frame the mean of the four frames of its clip."""
    clips = frames.reshape(-1, 4, 3)
    return (clips - clips.mean(1, keepdim=True)).reshape(-1, 3)


@pytest.mark.parametrize(
    ("clips", "devices", "options", "clips_per_lane"),
    [
        (0, TWO, {}, ()),
        (1, TWO, {}, ()),
        (3, TWO, {}, (2, 1)),
        (5, TWO, {}, (3, 2)),
        (7, THREE, {}, (3, 2, 2)),
        (4, TWO, {"out_dims": 0}, (2, 2)),
        (2, THREE, {"out_dims": 0}, (1, 1)),
    ],
)
def test_rows_of_a_unit_stay_in_one_lane(clips, devices, options, clips_per_lane):
    frames = torch.randn(4 * clips, 3)
    with parallel(minus_the_mean_of_the_clip, devices, unit=4, **options) as p:
        assert_close(p(frames), minus_the_mean_of_the_clip(frames))
        assert p.stats().shards == tuple(4 * count for count in clips_per_lane)


def test_a_unit_applies_to_every_argument():
    """Also to lists that are cut by item, and to tensors with their rows on another dim."""
    seen = []

    def target(x, columns, names):
        seen.append((len(x), columns.shape[1], names))
        return x + columns.T

    x, columns, names = torch.randn(6, 2), torch.randn(2, 6), list("abcdef")
    with parallel(target, TWO, in_dims={"columns": 1, "names": "items"}, unit=2) as p:
        assert_close(p(x, columns, names), x + columns.T)
    assert sorted(seen) == [(2, 2, ["e", "f"]), (4, 4, ["a", "b", "c", "d"])]


@pytest.mark.parametrize("rows", [1, 3, 7, 18])
def test_batches_that_are_no_multiple_of_unit(rows):
    """The error names row counts that work."""
    with parallel(minus_the_mean_of_the_clip, TWO, unit=4, out_dims=0) as p:
        with pytest.raises(ShardError, match=rf"args\[0\] has {rows} rows, which is not a multiple of unit=4") as caught:
            p(torch.randn(rows, 3))
        cures = re.search(r"Pass a batch of (?:(\d+) or )?(\d+) rows", str(caught.value))
        for count in map(int, filter(None, cures.groups())):
            frames = torch.randn(count, 3)
            assert_close(p(frames), minus_the_mean_of_the_clip(frames))
