"""The sizes of shards: different where outputs need a proof, else balanced."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from parawrap import DataParallel, parallel
from tests.helpers.caller_warnings import warnings_of
from tests.helpers.waiting import PATIENCE_S

small = pytest.mark.filterwarnings("ignore:a call of .* rows on .* lanes:UserWarning")
TWO = ["cpu"] * 2
THREE = ["cpu"] * 3


@pytest.mark.parametrize(
    ("rows", "lanes", "sizes"),
    [
        (9, 2, (5, 4)),
        (8, 2, (5, 3)),
        (16, 2, (9, 7)),
        (3, 2, (2, 1)),
        (9, 3, (4, 3, 2)),
        (6, 3, (4, 2)),
        (3, 3, (2, 1)),
        (8, 4, (3, 3, 2)),
        (16, 4, (5, 4, 4, 3)),
        (4, 4, (2, 1, 1)),
    ],
)
@small
def test_the_sizes_of_shards_differ(rows, lanes, sizes):
    x = torch.randn(rows, 2)
    with parallel(torch.tanh, ["cpu"] * lanes) as p:
        for _ in range(2):
            assert torch.equal(p(x), torch.tanh(x))
            assert p.stats().shards == sizes


@pytest.mark.parametrize(
    "options", [{"out_dims": 0}, {"out_dims": (0, 0)}, {"join": "list"}, {"out_dims": "ragged"}], ids=str
)
def test_declared_outputs_balance_shards(options):
    with warnings.catch_warnings(action="error"), parallel(lambda x: (x, x + 1), ["cpu"] * 4, **options) as p:
        p(torch.zeros(8, 3))
        assert p.stats().shards == (2, 2, 2, 2)
        p(torch.zeros(2, 3))
        assert p.stats().shards == (1, 1)
        assert [lane.rows for lane in p.stats().lanes] == [3, 3, 2, 2]


@small
def test_later_calls_do_not_change_how_a_call_is_cut():
    """Row counts, training flags, and grad modes of calls in between have no effect."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    seen = []
    model[0].register_forward_hook(lambda module, args, output: seen.append(len(output)))

    def sizes(rows, training):
        model.train(training)
        seen.clear()
        with torch.inference_mode(not training):
            model(torch.randn(rows, 3))
        return sorted(seen)

    cases = [(rows, training) for rows in (4, 9, 12) for training in (True, False)]
    alone = []
    for case in cases:
        with parallel(model, THREE):
            alone.append(sizes(*case))
    with parallel(model, THREE):
        for _ in range(2):
            assert [sizes(*case) for case in cases] == alone


@pytest.mark.parametrize(
    ("rows", "lanes", "says"),
    [
        (8, 2, "a call of 8 rows on 2 lanes has a shard of 5 rows, .* With out_dims=0, the largest shard has 4 of them"),
        (14, 2, "a call of 14 rows on 2 lanes has a shard of 8 rows, .* With out_dims=0, the largest shard has 7 of them"),
        (4, 2, "a call of 4 rows on 2 lanes runs whole, .* With out_dims=0, the largest shard has 2 of them"),
        (16, 2, None),
        (9, 2, None),
        (1, 2, None),
        (0, 2, None),
    ],
)
def test_unbalanced_shards_warn_once(rows, lanes, says):
    """A shard may be an eighth larger than a balanced one. `unit` counts whole units. Whole calls do not warn."""

    def use():
        with parallel(torch.tanh, ["cpu"] * lanes) as p:
            for size in (rows, 9, rows):
                p(torch.zeros(size, 3))

    def use_whole():
        x = torch.zeros(rows, 3)
        with parallel(torch.tanh, TWO) as p:
            p.submit(x).result(PATIENCE_S)
            list(p.map([x] * 3))
        DataParallel(nn.Linear(3, 3), TWO)(x)

    messages = warnings_of(use)
    assert len(messages) == (says is not None)
    if says is not None:
        with parallel(torch.tanh, TWO, unit=4) as p, pytest.warns(UserWarning, match=f"a call of {4 * rows} rows on 2"):
            p(torch.zeros(4 * rows))
        with pytest.warns(UserWarning, match=says), parallel(torch.tanh, ["cpu"] * lanes) as p:
            p(torch.zeros(rows, 3))
    assert warnings_of(use_whole) == []
