"""Calls that cannot be cut: the error names the argument, what is wrong with it, and the `in_dims` that settle it."""

from __future__ import annotations

import pytest
import torch

from parawrap.engine.cut import Cutter
from tests.fuzz.models import SlottedBox
from tests.helpers.shards import cut, cutter, uncut

ROWS = torch.zeros(3, 2)

UNEQUAL = {
    "keyword": ((ROWS,), {"mask": ROWS[:2]}, ['kwargs["mask"] has 2 on dim 0', "args[0] has 3", 'in_dims={"mask": None}']),
    "nested": ((ROWS, {"k": torch.zeros(4)}), {}, ['args[1]["k"] has 4', "args[0] has 3", 'in_dims={"y": None}']),
    "parameters": (({"b": torch.zeros(4)}, ROWS), {}, ['args[0]["b"] has 4', "args[1] has 3", 'in_dims={"x": None}']),
    "rest": ((ROWS, None, None, torch.zeros(4)), {}, ["args[3] has 4", 'in_dims={"rest": None}']),
    "list": ((ROWS, [torch.zeros(4)] * 3), {}, ["args[1][0] has 4", 'in_dims={"y": None}', 'tensor per row, give "items"']),
    "empty": ((torch.zeros(0), torch.zeros(3)), {}, ["args[1] has 3", "args[0] has 0"]),
}


@pytest.mark.parametrize(("args", "kwargs", "parts"), UNEQUAL.values(), ids=UNEQUAL)
def test_unequal_row_counts_are_refused(args, kwargs, parts):
    message = uncut(cutter(), *args, **kwargs)
    for part in parts:
        assert part in message


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


class Settable:
    """An object of the user, with state."""


class Holder:
    def __init__(self, value):
        self.value = value


HOLDERS = {
    "attribute": Holder(torch.zeros(3)),
    "nested": Holder({"layers": [SlottedBox((torch.zeros(1),))]}),
    "module": torch.nn.Linear(2, 2),
    "set": frozenset({torch.zeros(3)}),
    "method": Holder(torch.zeros(3)).__init__,
}


@pytest.mark.parametrize("unknown", HOLDERS.values(), ids=HOLDERS)
def test_unknown_holders_of_tensors(unknown):
    """Also in calls that are not cut, and after calls of others. With None in `in_dims`, every lane gets the object."""
    kind = type(unknown).__name__
    used = cutter()
    cut(used, ROWS[:1], {"cache": Settable()})
    message = uncut(used, ROWS[:1], {"cache": unknown})
    assert uncut(cutter(), ROWS, {"cache": unknown}) == message
    length = "" if hasattr(unknown, "__len__") else ", rows=..."
    for part in (
        f'args[1]["cache"] is a {kind}, which holds tensors',
        f"register_split({kind}, split=..., join=...{length})",
        'in_dims={"y": {"cache": None}}',
    ):
        assert part in message
    for shard in cut(cutter(in_dims={"y": None}), ROWS, unknown):
        assert shard.args[1] is unknown
    one = Holder(Holder(None))
    one.value.value = one  # a cycle
    assert "a state that each lane would change" in uncut(cutter(), ROWS, one)
