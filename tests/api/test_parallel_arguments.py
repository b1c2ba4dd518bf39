"""Which arguments every lane gets whole, which are refused, and that each cure of an error works."""

from __future__ import annotations

import array
import ast
import collections
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
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from parawrap import DataParallel, ShardError, parallel

TWO = ["cpu"] * 2
ROWS = 9
CALLS = 6


class Color(enum.Enum):
    RED = 1


@dataclass(frozen=True)
class Config:
    scale: float
    names: list[str] = field(default_factory=list)


class Mine:
    """An object of a user's class."""


class Spy:
    """A target that returns its first argument, and keeps what each lane got."""

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
    [], (), {},
    Config(2.0, ["a", "b"]), torch.tensor(3.0), torch.zeros(1, 2),
]  # fmt: skip


@pytest.mark.parametrize("value", WHOLE, ids=repr)
@pytest.mark.parametrize("by_keyword", [False, True], ids=["positional", "keyword"])
def test_values_without_rows_and_state_go_whole_to_every_lane(value, by_keyword):
    """Numbers, texts, types, functions, and containers of these are equal in every lane, at every call."""
    spy, x = Spy(), torch.arange(float(ROWS))
    with parallel(spy, TWO) as p:
        for _ in range(CALLS):
            assert_close(p(x, extra=value) if by_keyword else p(x, value), x + 1)
            (first, got), (second, also) = spy.in_row_order()
            assert (first, second) == (5, 4)
            assert type(got) is type(also) is type(value)
            if isinstance(value, torch.Tensor):
                assert_close([got, also], [value, value])
            else:
                assert got == also == value


# -- refused, with cures


def read_once():
    yield from range(ROWS)


ITEMS = {
    "list of texts": lambda: list("abcdefghi"),
    "list of numbers": lambda: list(range(ROWS)),
    "list of lists": lambda: [[index] * 2 for index in range(ROWS)],
    "list of None": lambda: [None] * ROWS,
    "tuple of texts": lambda: tuple("abcdefghi"),
    "tuple of numbers": lambda: tuple(range(ROWS)),
    "deque": lambda: collections.deque(range(ROWS)),
    "range": lambda: range(ROWS),
    "array.array": lambda: array.array("d", range(ROWS)),
    "UserList": lambda: collections.UserList("abcdefghi"),
    "numpy array": lambda: np.arange(ROWS),
    "numpy matrix": lambda: np.arange(ROWS * 2.0).reshape(ROWS, 2),
    "numpy texts": lambda: np.array(list("abcdefghi")),
}
"""Sequences with one item per row."""

OTHERS = {
    "short deque": lambda: collections.deque([1, 2]),
    "short range": lambda: range(3),
    "short numpy array": lambda: np.arange(3),
    "iterator": lambda: iter("abcdefghi"),
    "generator": read_once,
    "count": itertools.count,
    "zip": lambda: zip("ab", "cd", strict=True),
    "set": lambda: {1, 2},
    "frozenset": lambda: frozenset("ab"),
    "dict values": lambda: {"a": 1}.values(),
    "random.Random": lambda: random.Random(1),
    "numpy generator": lambda: np.random.default_rng(1),
    "lock": threading.Lock,
    "object": Mine,
    "object in a list": lambda: [Mine(), 1],
    "object in a dict": lambda: {"a": {"b": Mine()}},
    "iterator in a tuple": lambda: (1, iter("ab")),
}
"""Values that cannot be one item per row, and that may have a state."""


def errors_of(p, x, value):
    """Return the different errors of six calls. Each call must be refused."""
    errors = set()
    for index in range(CALLS):
        with pytest.raises(ShardError) as caught:
            p(x, extra=value) if index % 2 else p(x, value)
        errors.add(re.sub(r"args\[1\]|kwargs\[\"extra\"\]", "ARG", str(caught.value)))
    return errors


def cures_of(message):
    """Return the values of `in_dims` that an error names."""
    found = re.findall(r"in_dims=(\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\})", message)
    assert found, message
    return [ast.literal_eval(each) for each in found]


def item_of(values, index):
    value = values[index]
    return value.tolist() if isinstance(value, np.ndarray) else value


@pytest.mark.parametrize("name", [*ITEMS, *OTHERS])
def test_other_arguments_are_refused_at_every_call_until_in_dims_names_them(name):
    """The error names the argument and the values of `in_dims`, and with each of them the call has the plain output."""
    make, x = {**ITEMS, **OTHERS}[name], torch.arange(float(ROWS))
    spy = Spy()
    with parallel(spy, TWO) as p:
        (message,) = errors_of(p, x, make())
    assert spy.seen == []
    assert message.startswith("ARG")
    cures = cures_of(message)
    below = ("a", "b") if name == "object in a dict" else ()
    entries = [functools.reduce(dict.__getitem__, ("extra", *below), in_dims) for in_dims in cures]
    assert None in entries
    assert name not in ITEMS or "items" in entries
    for in_dims, entry in zip(cures, entries, strict=True):
        if entry == "items" and name not in ITEMS:
            continue  # the error does not know whether it has one item per row
        with parallel(spy, TWO, in_dims=in_dims) as p:
            for _ in range(CALLS):
                value = make()
                assert_close(p(x, value), x + 1)
                (first, got), (second, also) = spy.in_row_order()
                assert (first, second) == (5, 4)
                if entry is None:
                    assert got is value or got == value
                    assert also is value or also == value
                else:
                    assert type(got) is type(also)
                    items = [item_of(part, index) for part in (got, also) for index in range(len(part))]
                    assert items == [item_of(value, index) for index in range(ROWS)]
                    assert (len(got), len(also)) == (5, 4)


def test_an_array_may_be_given_as_a_tensor():
    """The third cure of an array, torch.from_numpy, cuts it with the rows."""
    spy, x, value = Spy(), torch.arange(float(ROWS)), np.arange(ROWS)
    with parallel(spy, TWO) as p:
        (message,) = errors_of(p, x, value)
        assert "torch.from_numpy" in message
        assert_close(p(x, torch.from_numpy(value)), x + 1)
    assert [extra.tolist() for _, extra in spy.in_row_order()] == [[0, 1, 2, 3, 4], [5, 6, 7, 8]]


@pytest.mark.parametrize("value", [["a"] * (ROWS - 1), range(3), np.arange(3), {1, 2}, iter("abcdefghi")], ids=repr)
def test_items_of_another_number_than_the_rows_are_refused(value):
    """With "items", a sequence of another length, a set, and an iterator raise ShardError at every call."""
    with parallel(Spy(), TWO, in_dims={"extra": "items"}) as p:
        for _ in range(CALLS):
            with pytest.raises(ShardError):
                p(torch.arange(float(ROWS)), value)


@pytest.mark.parametrize("name", [*ITEMS, *OTHERS])
def test_whole_calls_take_any_argument(name):
    """`submit`, and a call of one row, are not cut, so the target gets the same object."""
    spy, value = Spy(), {**ITEMS, **OTHERS}[name]()
    with parallel(spy, TWO) as p:
        p.submit(torch.zeros(ROWS), value).result(20)
        p(torch.zeros(1), value)
    assert all(got is value or got == value for _, got in spy.in_row_order())


def test_data_parallel_keeps_torchs_rules():
    """DataParallel gives each lane the same list, tuple, or object, as torch does. It refuses iterators."""

    class Module(torch.nn.Module):
        def forward(self, x, extra):
            seen.append(extra)
            return x + 1

    seen, x = [], torch.zeros(ROWS, 2)
    net = DataParallel(Module(), TWO)
    for make in (ITEMS["list of texts"], ITEMS["range"], ITEMS["tuple of numbers"], OTHERS["object"]):
        value = make()
        assert_close(net(x, value), x + 1)
        assert all(got is value or got == value for got in seen)
        seen.clear()


def test_a_list_of_one_row_tensors_as_long_as_the_batch_is_refused():
    """Each tensor of one row would go whole to every lane. Both cures of the error work."""

    def scaled(x, boxes):
        return torch.stack([row * box.sum() for row, box in zip(x, boxes, strict=False)])

    x, boxes = torch.ones(9, 2), [torch.full((1, 4), float(row)) for row in range(9)]
    with parallel(scaled, ["cpu", "cpu"]) as p:
        for _ in range(3):
            with pytest.raises(ShardError, match=r"args\[1\] is a list of 9 items with tensors of one row"):
                p(x, boxes)
    with parallel(scaled, ["cpu", "cpu"], in_dims={"boxes": "items"}) as p:
        assert torch.equal(p(x, boxes), scaled(x, boxes))
    with parallel(lambda x, boxes: x + boxes[8].sum(), ["cpu", "cpu"], in_dims={"boxes": None}) as p:
        assert torch.equal(p(x, boxes), x + 32)
