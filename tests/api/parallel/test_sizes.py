"""The sizes of shards: different where outputs need a proof, else balanced."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import DataParallel, parallel
from parawrap.backends import backend_of
from tests.helpers.caller_warnings import warnings_of
from tests.helpers.waiting import PATIENCE_S

TWO = ["cpu"] * 2


@pytest.mark.parametrize("options", [{"out_dims": 0}, {"join": "list"}, {"out_dims": "ragged"}], ids=str)
def test_declared_outputs_are_balanced(options):
    with warnings.catch_warnings(action="error"), parallel(lambda x: (x, x + 1), ["cpu"] * 4, **options) as p:
        p(torch.zeros(8, 3))
        assert p.stats().shards == (2, 2, 2, 2)
        p(torch.zeros(2, 3))
        assert p.stats().shards == (1, 1)


@pytest.mark.parametrize(("rows", "sizes"), [(8, (4, 4)), (5, (3, 2)), (2, (1, 1))])
def test_equal_shards_if_sizes_compile(rows, sizes, monkeypatch):
    """If each shard size costs a compilation, all shards but the last are equal, and outputs have their rows on `dim`."""
    monkeypatch.setattr(type(backend_of("cpu")), "compiles_each_shape", True)
    model, x = nn.Linear(3, 2), torch.randn(rows, 3)
    with parallel(model, TWO) as p:
        assert_close(model(x), nn.functional.linear(x, model.weight, model.bias))
        assert p.stats().shards == sizes


@pytest.mark.parametrize(
    ("rows", "unit", "says"),
    [
        (8, 1, "a call of 8 rows on 2 lanes has a shard of 5 rows, .* With out_dims=0, the largest shard has 4 of them"),
        (4, 1, "a call of 4 rows on 2 lanes runs whole, .* With out_dims=0, the largest shard has 2 of them"),
        (24, 4, "a call of 24 rows on 2 lanes has a shard of 16 rows.*the largest shard has 12 of them"),
    ],
)
def test_unbalanced_shards_warn_once(rows, unit, says):
    """A shard may be an eighth larger than a balanced one. Whole calls and DataParallel do not warn."""
    x = torch.zeros(rows, 3)

    def use():
        with parallel(torch.tanh, TWO, unit=unit) as p:
            for _ in range(3):
                p(x)

    def use_whole():
        with parallel(torch.tanh, TWO) as p:
            p.submit(x).result(PATIENCE_S)
            p(torch.zeros(16, 3))
        DataParallel(nn.Linear(3, 3), TWO)(x)

    (message,) = warnings_of(use)
    assert re.match(says, message)
    assert warnings_of(use_whole) == []
