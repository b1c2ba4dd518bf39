"""`Cutter`: the rows of a call go to shards, and everything else goes whole to every lane."""

from __future__ import annotations

import weakref
from collections import deque

import pytest
import torch

from parawrap.engine.cut import Cutter
from parawrap.errors import ShardError
from tests.helpers.same import assert_same
from tests.helpers.shards import Output, cut, cutter, planned


@pytest.mark.parametrize("rows", [0, 1, 2, 5])
def test_one_row_is_broadcast(rows):
    """A tensor with one row next to more rows, or none, goes whole to every lane, as in torch's
    broadcasting.
    """
    one, scale, columns = torch.ones(1, 3), torch.tensor(2.0), torch.zeros(3, rows)
    shards = cut(
        cutter(in_dims={"rest": None}), torch.zeros(rows, 3), one, None, whole := torch.zeros(7)
    )
    assert all(shard.args[1] is one and shard.args[3] is whole for shard in shards)
    assert sum(shard.rows for shard in shards) == rows
    assert len(shards) == (1 if rows < 2 else 2)
    for shard in cut(Cutter(dim=1), columns, scale, one[0]):  # tensors without the dim
        assert shard.args[1] is scale
        assert shard.args[2].shape == (3,)


class Names(list):
    """A list of a class of its own."""


X = torch.arange(6.0).view(3, 2)
TEXTS = ["a", "b", "c"]
LISTED = [torch.zeros(n) for n in (1, 2, 3)]
IN_DIMS = {
    "None": (None, X[:2], X[:2], X[:2]),
    "dim": (1, X.T, X[:2].T, X[2:].T),
    "negative": (-1, {"a": [X.T, X.T]}, {"a": [X[:2].T] * 2}, {"a": [X[2:].T] * 2}),
    "texts": (0, TEXTS, TEXTS[:2], TEXTS[2:]),
    "numbers": (0, (1, 2, 3), (1, 2), (3,)),
    "own class": (0, Names(TEXTS), TEXTS[:2], TEXTS[2:]),
    "deque": (
        0,
        {"t": deque(TEXTS), "n": 4},
        {"t": deque(TEXTS[:2]), "n": 4},
        {"t": deque(TEXTS[2:]), "n": 4},
    ),
    "empty": (
        0,
        {"x": X, "t": [], "u": ()},
        {"x": X[:2], "t": [], "u": ()},
        {"x": X[2:], "t": [], "u": ()},
    ),
    "texts in a dict": (
        0,
        {"t": TEXTS, "n": 4},
        {"t": TEXTS[:2], "n": 4},
        {"t": TEXTS[2:], "n": 4},
    ),
    "size in a dict": (
        0,
        {"x": X, "size": (8, 8, 8)},
        {"x": X[:2], "size": (8, 8, 8)},
        {"x": X[2:], "size": (8, 8, 8)},
    ),
    "items": ("items", ("a", "b", "c"), ("a", "b"), ("c",)),
    "items of tensors": ("items", LISTED, LISTED[:2], LISTED[2:]),
    "items of equal tensors": ("items", [X, X, X], [X, X], [X]),
    "items in a dict": (
        "items",
        {"x": X, "t": TEXTS},
        {"x": X[:2], "t": TEXTS[:2]},
        {"x": X[2:], "t": TEXTS[2:]},
    ),
    "part of a tree": (
        {"t": "items"},
        {"x": X, "t": TEXTS},
        {"x": X[:2], "t": TEXTS[:2]},
        {"x": X[2:], "t": TEXTS[2:]},
    ),
    "list": ([None, "items"], [5, TEXTS], [5, TEXTS[:2]], [5, TEXTS[2:]]),
    "dataclass": (
        Output(0, "items"),
        Output(X, TEXTS),
        Output(X[:2], TEXTS[:2]),
        Output(X[2:], TEXTS[2:]),
    ),
}
"""The entry of a parameter, its argument, and the parts of two shards of 2 rows and 1 row."""


@pytest.mark.parametrize(("entry", "argument", "first", "second"), IN_DIMS.values(), ids=IN_DIMS)
def test_in_dims_declare_each_argument(entry, argument, first, second):
    for place in ("y", "texts"):
        args, kwargs = ((argument,), {}) if place == "y" else ((), {"texts": argument})
        shards = cut(cutter(in_dims={place: entry}), torch.zeros(3), *args, **kwargs)
        found = [shard.args[1] if place == "y" else shard.kwargs["texts"] for shard in shards]
        assert_same(found, [first, second])


def test_containers_of_each_lane():
    """Each lane gets its own containers, and one object at two places stays one."""
    x, scale = torch.zeros(4), torch.ones(1)
    first, second = cut(cutter(), x, [x, scale, scale])
    for shard in (first, second):
        assert shard.args[0] is shard.args[1][0]
        assert shard.args[1][1] is shard.args[1][2] is scale
    first.args[1].clear()
    assert len(second.args[1]) == 3


def test_plans_of_many_sizes_are_freed():
    used = cutter()
    first = weakref.ref(planned(used, torch.zeros(1))[0])
    for rows in range(2, 1100):
        planned(used, torch.zeros(rows))
    assert first() is None


def test_plans_are_not_mixed():
    """A number or a 0-d tensor, and a tensor without the dim, have different plans at the same
    place.
    """
    used = cutter(in_dims={"y": 1})
    for _ in range(2):
        assert (
            len(cut(used, torch.zeros(4), 3.0))
            == len(cut(used, torch.zeros(4), torch.tensor(3.0)))
            == 2
        )
        with pytest.raises(ShardError, match="dim 1"):
            cut(used, torch.zeros(4), torch.zeros(4))
