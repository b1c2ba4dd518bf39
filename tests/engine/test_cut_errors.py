"""Calls that cannot be cut: the error names the argument, what is wrong with it, and the `in_dims`
that settle it.
"""

from __future__ import annotations

from collections import deque

import pytest
import torch

from parawrap.engine.cut import Cutter
from tests.helpers.cures import cures_of
from tests.helpers.shards import cut, cutter, uncut

ROWS = torch.zeros(3, 2)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_rows_of_declared_arguments():
    for entry, texts in ((0, ["a", "b"]), ("items", ["a", "b"]), ("items", ("a", "b", "c", "d"))):
        message = uncut(cutter(in_dims={"texts": entry}), ROWS, texts=texts)
        assert f'kwargs["texts"] has {len(texts)} on dim 0, args[0] has 3' in message
    for dim in (2, -3):
        message = uncut(Cutter(dim=dim), torch.zeros(4, 3))
        assert (
            f"dim {dim} is out of range for args[0], of shape (4, 3): it has 2 dimensions"
            in message
        )
    message = uncut(Cutter(dim=1), None, torch.zeros(4), torch.zeros(5))
    assert "args[1] and args[2], of shape (4,): it has 1 dimensions" in message
    for entry, argument, text in (
        (
            {"k": 0},
            {"j": ROWS},
            "in_dims[\"y\"][\"k\"] is declared, and 'y' is a dict with ['j'] there",
        ),
        (
            {"k": {"i": 0}},
            {"k": ROWS},
            'in_dims["y"]["k"]["i"] is declared, and \'y\' is a Tensor there',
        ),
        (
            {"k": (0,)},
            {"k": (ROWS, ROWS)},
            'in_dims["y"]["k"] declares 1 items, and \'y\' has 2 there',
        ),
    ):
        assert text in uncut(cutter(in_dims={"y": entry}), ROWS, argument)
    message = uncut(cutter(), torch.zeros(4), torch.eye(4).to_sparse())
    assert "args[1] is a tensor of layout torch.sparse_coo, which torch cannot split" in message
    scales, zeros = torch.ones(4), torch.zeros(4)
    per_channel = torch.quantize_per_channel(torch.ones(4, 2), scales, zeros, 0, torch.qint8)
    assert "quantized per channel, which torch cannot split" in uncut(cutter(), per_channel)


def test_cuts_that_sizes_allow():
    """The error names another dim, or "items", where the argument has as many entries as the batch
    has rows.
    """
    state, boxes = torch.zeros(2, 3, 5), [torch.zeros(4)] * 3
    for args, cures in (
        ((ROWS, boxes), [{"y": None}, {"y": "items"}]),
        ((ROWS, state), [{"y": None}, {"y": 1}]),
        ((ROWS, (state, state)), [{"y": None}, {"y": 1}]),
        ((ROWS, torch.zeros(4, 2)), [{"y": None}]),
        ((ROWS, [torch.zeros(4)] * 2), [{"y": None}]),
        (([ROWS, torch.zeros(4)],), [{"x": {1: None}}]),
        (([ROWS, state],), [{"x": {1: None}}, {"x": {1: 1}}]),
        (({"k": [ROWS, state], 0: ROWS},), [{"x": {"k": {1: None}}}, {"x": {"k": {1: 1}}}]),
    ):
        assert cures_of(uncut(cutter(), *args)) == cures
        for cure in cures:
            assert [part.rows for part in cut(cutter(in_dims=cure), *args)] == [2, 1]
    message = uncut(cutter(in_dims={"texts": None}), ROWS, state, mask=boxes, texts=[1, 2, 3])
    kept = {"texts": None, "y": None, "mask": None}
    assert cures_of(message) == [kept, kept | {"y": 1}, kept | {"mask": "items"}]


def test_one_entry_for_several_parts():
    """A cure for one part of an argument keeps the entry of the user for the other parts."""
    parts = {"a": torch.zeros(2, 3), "b": torch.zeros(2, 4), "c": torch.zeros(2, 3)}
    for argument, entry, cure in (
        (parts, 1, {"a": 1, "b": None, "c": 1}),
        ([*parts.values()], 1, {0: 1, 1: None, 2: 1}),
        ([*parts.values()], (1, 1, 1), {0: 1, 1: None, 2: 1}),
    ):
        assert cures_of(uncut(cutter(in_dims={"x": entry}), argument)) == [{"x": cure}]
        assert [part.rows for part in cut(cutter(in_dims={"x": cure}), argument)] == [2, 1]


def test_sequences_that_may_have_items():
    """A sequence of another length than the batch cannot be cut by item."""
    numpy = pytest.importorskip("numpy")
    for make in (range, numpy.zeros, lambda length: deque(range(length))):
        for length, cures in ((3, [{"y": "items"}, {"y": None}]), (2, [{"y": None}])):
            assert cures_of(uncut(cutter(), ROWS, make(length))) == cures
            for cure in cures:
                shards = cut(cutter(in_dims=cure), ROWS, make(length))
                assert [part.rows for part in shards] == [2, 1]
    texts = {3: ["a"] * 3, "k": ("b",) * 3}
    for entry in ("items", None):
        cure = {"y": {3: entry, "k": entry}}
        assert cure in cures_of(uncut(cutter(), ROWS, texts))
        assert [part.rows for part in cut(cutter(in_dims=cure), ROWS, texts)] == [2, 1]


def test_entries_of_rows():
    """The rows are those that all others are multiples of, wherever they stand in the call."""
    patches, ids, mask = torch.zeros(12, 2), torch.zeros(3, 5), torch.zeros(6, 5, 5)
    for args in ((patches, ids), (ids, patches)):
        message = uncut(cutter(), *args)
        place = f"args[{[len(each) for each in args].index(12)}]"
        assert f"If {place} has 4 entries per row, as patches, frames, or masks" in message
        assert (
            "pass it as (3, 4, ...), and use flatten(0, 1) in the target. If none of these fits"
            in message
        )
    message = uncut(cutter(), ids, patches, mask=patches)
    assert 'If args[1] and kwargs["mask"] have 4 entries per row' in message
    assert 'to every lane, use in_dims={"x": None}' in message  # the fewer arguments, as a table
    message = uncut(cutter(), ids, mask, mask=patches)
    assert "If args[1] has 2 entries per row" in message
    assert 'If kwargs["mask"] has 4 entries per row' in message
    assert "entries per row" not in uncut(cutter(), ids, torch.zeros(4))


class SomeCache:
    """A cache of a model of transformers, of a class without rules."""

    def __init__(self):
        self.states = [torch.zeros(3, 2)]


SomeCache.__module__ = "transformers.models.some.modeling_some"


def test_caches_of_unknown_classes():
    message = uncut(cutter(), ROWS, SomeCache())
    assert (
        "register_split(SomeCache, split=..., join=..., rows=...) to cut it, or pass no cache"
        in message
    )
    assert "use_cache=False" in message


def test_cures_are_python_code():
    """Keys keep their quotes and backslashes."""
    for key in ("it's", 'a "b"', "back\\slash"):
        message = uncut(cutter(), ROWS, {key: torch.zeros(4), "rows": ROWS})
        assert {"y": {key: None}} in cures_of(message)
