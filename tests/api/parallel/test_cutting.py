"""How arguments are cut: which every lane gets whole, which are refused, and
the sizes of shards.
"""

from __future__ import annotations

import collections
import datetime as dt
import decimal
import enum
import fractions
import functools
import pathlib
import re
import types
import uuid
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import rnn
from torch.testing import assert_close

from parawrap import GatherError, ShardError, parallel
from tests.fuzz.models import SlottedBox
from tests.helpers.caller_warnings import warnings_of
from tests.helpers.cures import cures_of
from tests.helpers.same import assert_same
from tests.helpers.shards import Output
from tests.helpers.waiting import PATIENCE_S

# Of small batches
pytestmark = pytest.mark.filterwarnings("ignore:a call of .* rows on .* lanes:UserWarning")
TWO = ["cpu"] * 2
ROWS = 9
Color = enum.Enum("Color", "RED")


class Spy:
    """A target that returns its first argument plus 1, and keeps what each lane got.

    Lanes have copies of the target.
    """

    def __init__(self):
        type(self).seen = []

    def __call__(self, x, extra=None):
        self.seen.append((int(x[0]), len(x), extra))
        return x + 1

    def in_row_order(self):
        """Return the row counts and the arguments of the lanes of the last call."""
        lanes = sorted(self.seen, key=lambda each: each[0])
        self.seen.clear()
        return [rows for _, rows, _ in lanes], [extra for *_, extra in lanes]


WHOLE = [
    *(
        3,
        2.5,
        True,
        1j,
        np.int64(2),
        decimal.Decimal("0.5"),
        fractions.Fraction(1, 2),
        None,
        ...,
        Color.RED,
        Color,
        int,
    ),
    *(
        "text",
        b"bytes",
        pathlib.Path("a/b"),
        re.compile("a"),
        slice(1, ROWS),
        torch.relu,
        types,
        uuid.UUID(int=1),
    ),
    *(
        dt.date(2026, 1, 1),
        dt.timedelta(1),
        torch.float32,
        torch.device("cpu"),
        torch.strided,
        torch.channels_last,
    ),
    *(
        torch.finfo(),
        torch.Size((ROWS, 2)),
        torch.tensor(3.0),
        torch.zeros(1, 2),
        {"a": [1, "b"], "c": {"d": (2.0, None)}},
    ),
    # Of another length than the batch, or a dict
    *((), [], [1, 2], ["a"] * (ROWS - 1), dict.fromkeys("abcdefghi", 1)),
]


@pytest.mark.parametrize("value", WHOLE, ids=lambda value: type(value).__name__)
def test_values_that_every_lane_gets(value):
    spy, x = Spy(), torch.arange(float(ROWS))
    with parallel(spy, TWO) as p:
        for extra in (
            value,
            {"short": [(value, [value])], "output": Output(value, (value, value))},
        ):
            for call in (lambda extra=extra: p(x, extra), lambda extra=extra: p(x=x, extra=extra)):
                assert_close(call(), x + 1)
                sizes, found = spy.in_row_order()
                assert sizes == [5, 4]
                assert_same(found, [extra, extra])


ITEMS = {
    "texts": lambda: list("abcdefghi"),
    "lists": lambda: [[index] * 2 for index in range(ROWS)],
    "deque": lambda: collections.deque(range(ROWS)),
    "array": lambda: np.arange(ROWS),
}
"""Sequences with one item per row."""

OTHERS = {
    "short array": lambda: np.arange(3),
    "set": lambda: {1, 2},
    "object in a dict": lambda: {"a": {"b": Spy()}},
    "tensor in an object": lambda: types.SimpleNamespace(
        held=[{"layer": SlottedBox((torch.zeros(ROWS),))}]
    ),
}
"""Values that cannot be one item per row, and that may have a state."""


@pytest.mark.parametrize("name", [*ITEMS, *OTHERS])
def test_other_values_are_refused(name):
    """The error names the argument and the values of `in_dims`.

    With each of them, the call has the plain output.
    """
    make, x, spy = {**ITEMS, **OTHERS}[name], torch.arange(float(ROWS)), Spy()
    with parallel(spy, TWO) as p:
        with pytest.raises(ShardError, match=r"^kwargs\[\"extra\"\]"):
            p(x, extra=make())
        with pytest.raises(ShardError, match=r"^args\[1\]") as caught:
            p(x, make())
        assert spy.seen == []
        p.submit(x, whole := make()).result(PATIENCE_S)  # is not cut
        assert spy.in_row_order()[1][0] is whole
    assert ("register_split" in str(caught.value)) == (name == "tensor in an object")
    assert ("torch.from_numpy" in str(caught.value)) == (name == "array")
    cures = cures_of(str(caught.value))
    below = ("a", "b") if name == "object in a dict" else ()
    entries = [functools.reduce(dict.__getitem__, ("extra", *below), in_dims) for in_dims in cures]
    assert {None, "items"} >= set(entries) >= ({None, "items"} if name in ITEMS else {None})
    for in_dims, entry in zip(cures, entries, strict=True):
        value = make()
        with parallel(spy, TWO, in_dims=in_dims) as p:
            if entry == "items" and name not in ITEMS:
                with pytest.raises(ShardError):
                    p(x, value)
                continue
            assert_close(p(x, value), x + 1)
        sizes, found = spy.in_row_order()
        assert sizes == [5, 4]
        if entry is None:
            assert all(got is value or got == value for got in found)
        else:
            assert [len(part) for part in found] == sizes
            assert [item for part in found for item in part] == list(value)


class Lookup(nn.Module):
    def forward(self, ids, table, columns):
        return table[ids] + columns.T


@pytest.mark.parametrize("form", [lambda model: model, torch.jit.script], ids=["plain", "scripted"])
def test_in_dims_of_any_argument(form):
    """For a module, the names are parameters of forward.

    None gives the whole value to every lane.
    """
    model, table, columns = form(Lookup()), torch.randn(5, 2), torch.randn(2, 7)
    ids = torch.tensor([0, 4, 2, 2, 1, 3, 0])
    plain = model(ids, table, columns)
    with parallel(model, TWO, in_dims={"table": None, "columns": 1}) as p:
        assert_close(model(ids, table, columns), plain)
        assert_close(p(columns=columns, table=table, ids=ids), plain)


def test_texts_without_tensors():
    """A call with texts alone runs plainly, unless `in_dims` cuts the texts by item."""

    def target(texts):
        return [text.upper() for text in texts]

    for in_dims, shards in ((None, ()), ({"texts": None}, ()), ({"texts": "items"}, (3, 2))):
        with parallel(target, TWO, in_dims=in_dims) as p:
            assert p(list("abcde")) == list("ABCDE")
            assert p.stats().shards == shards


class OnRows(nn.LSTM):
    def forward(self, rows, lengths):
        packed = rnn.pack_padded_sequence(rows, lengths, batch_first=True, enforce_sorted=False)
        return rnn.pad_packed_sequence(
            super().forward(packed)[0], batch_first=True, total_length=rows.shape[1]
        )[0]


def test_packed_sequences_are_refused():
    """Packed sequences are refused in cut calls, and run whole in `map`.

    The cures of the errors work: forward packs rows, and returns rows.
    """
    rows, lengths = torch.randn(7, 5, 3), torch.tensor([1, 4, 2, 5, 3, 1, 4])
    packed = rnn.pack_padded_sequence(rows, lengths, batch_first=True, enforce_sorted=False)
    model, on_rows = nn.LSTM(3, 4), OnRows(3, 4, batch_first=True)
    with torch.no_grad(), parallel(model, TWO) as p:
        with pytest.raises(
            ShardError, match="Pass padded rows and their lengths, and pack them in forward"
        ):
            model(packed)
        assert_same(next(p.map([packed])), nn.LSTM.forward(model, packed))
    block = parallel(lambda x: rnn.pack_sequence([*x]), TWO)
    with (
        torch.no_grad(),
        block as p,
        pytest.raises(GatherError, match=r"Return rnn\.pad_packed_sequence"),
    ):
        p(rows)
    with torch.no_grad():
        plain = on_rows(rows, lengths)
        with parallel(on_rows, TWO):
            assert_close(on_rows(rows, lengths), plain)


def minus_the_mean_of_the_clip(frames):
    clips = frames.reshape(-1, 4, 3)
    return (clips - clips.mean(1, keepdim=True)).reshape(-1, 3)


@pytest.mark.parametrize(
    ("clips", "options", "per_lane"), [(0, {}, ()), (5, {}, (3, 2)), (2, {"out_dims": 0}, (1, 1))]
)
def test_rows_of_a_unit_stay_together(clips, options, per_lane):
    frames = torch.randn(4 * clips, 3)
    with parallel(minus_the_mean_of_the_clip, TWO, unit=4, **options) as p:
        assert_close(p(frames), minus_the_mean_of_the_clip(frames))
        assert p.stats().shards == tuple(4 * count for count in per_lane)


@pytest.mark.parametrize(
    "options", [{"out_dims": 0}, {"join": "list"}, {"out_dims": "ragged"}], ids=str
)
def test_declared_outputs_are_balanced(options):
    with (
        warnings.catch_warnings(action="error"),
        parallel(lambda x: (x, x + 1), ["cpu"] * 4, **options) as p,
    ):
        p(torch.zeros(8, 3))
        assert p.stats().shards == (2, 2, 2, 2)
        p(torch.zeros(2, 3))
        assert p.stats().shards == (1, 1)


@pytest.mark.parametrize("options", [{}, {"out_dims": {"a": 0}}], ids=str)
def test_unbalanced_shards_warn_once(options):
    """A shard may be an eighth larger than a balanced one. Whole calls do not warn."""

    def use(rows):
        with parallel(lambda x: {"a": x, "b": x}, TWO, **options) as p:
            p(torch.zeros(16, 3))
            p.submit(torch.zeros(rows, 3)).result(PATIENCE_S)
            for _ in range(3):
                p(torch.zeros(rows, 3))

    (message,) = warnings_of(lambda: use(8))
    assert message.startswith("a call of 8 rows on 2 lanes has a shard of 5 rows")
    assert "declare it with out_dims=0: the largest shard has 4 of them then" in message
    (message,) = warnings_of(lambda: use(4))
    assert message.startswith("a call of 4 rows on 2 lanes runs whole")
    with parallel(lambda x: {"a": x, "b": 1}, TWO, out_dims={"a": 0, "b": None}) as p:
        assert warnings_of(lambda: p(torch.zeros(8, 3))) == []  # no option would balance it
