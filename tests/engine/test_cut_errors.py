"""Calls that cannot be cut: the error names the argument, what is wrong with it, and the `in_dims` that settle it."""

from __future__ import annotations

import torch

from parawrap.engine.cut import Cutter
from tests.helpers.shards import cutter, uncut

ROWS = torch.zeros(3, 2)


def test_rows_of_declared_arguments():
    for entry, texts in ((0, ["a", "b"]), ("items", ["a", "b"]), ("items", ("a", "b", "c", "d"))):
        message = uncut(cutter(in_dims={"texts": entry}), ROWS, texts=texts)
        assert f'kwargs["texts"] has {len(texts)} on dim 0, args[0] has 3' in message
    for dim in (2, -3):
        message = uncut(Cutter(dim=dim), torch.zeros(4, 3))
        assert f"dim {dim} is out of range for args[0], of shape (4, 3): it has 2 dimensions" in message
    assert "dim 1 is out of range for args[1]" in uncut(cutter(in_dims={"y": 1}), torch.zeros(4), torch.zeros(4))
    message = uncut(Cutter(dim=1), None, torch.zeros(4), torch.zeros(5))
    assert "args[1] and args[2], of shape (4,): it has 1 dimensions" in message
    for entry, argument, text in (
        ({"k": 0}, {"j": ROWS}, "in_dims[\"y\"][\"k\"] is declared, and 'y' is a dict with ['j'] there"),
        ({"k": {"i": 0}}, {"k": ROWS}, 'in_dims["y"]["k"]["i"] is declared, and \'y\' is a Tensor there'),
        ({"k": (0,)}, {"k": (ROWS, ROWS)}, 'in_dims["y"]["k"] declares 1 items, and \'y\' has 2 there'),
    ):
        assert text in uncut(cutter(in_dims={"y": entry}), ROWS, argument)
    message = uncut(cutter(), torch.zeros(4), torch.eye(4).to_sparse())
    assert "args[1] is a tensor of layout torch.sparse_coo, which torch cannot split" in message
    assert 'for a list with one tensor per row, give "items"' in uncut(cutter(), ROWS, [torch.zeros(4)] * 3)
