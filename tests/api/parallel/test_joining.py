"""How outputs are joined: each call has the plain output, or an error that names an option."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from parawrap import GatherError, parallel
from tests.helpers.calling import Stateful
from tests.helpers.same import assert_same

# Of small batches
pytestmark = pytest.mark.filterwarnings("ignore:a call of .* rows on .* lanes:UserWarning")
TWO = ["cpu"] * 2
THREE = ["cpu"] * 3
ROWS = (2, 3, 4, 5, 6, 8, 9, 12)


def columns(rows):
    return torch.arange(rows * 3.0).reshape(rows, 3) % 7


def assert_joined(target, make=columns, rows=ROWS, **options):
    """Assert that calls on two to four lanes have the plain output, for several row counts."""
    for lanes in (2, 3, 4):
        with parallel(target, ["cpu"] * lanes, **options) as p:
            for count in rows:
                x = make(count)
                assert_same(p(x), target(x))


def assert_refused(target, make=columns, **options):
    """Assert that each call that is cut raises an error, also again."""
    for lanes in (2, 3, 4):
        with parallel(target, ["cpu"] * lanes, **options) as p:
            for count in ROWS:
                x = make(count)
                if count <= 4:  # not cut: two sizes would leave one row
                    assert_same(p(x), target(x))
                    continue
                for _ in range(2):
                    with pytest.raises(GatherError, match="cannot be joined"):
                        p(x)


@pytest.mark.parametrize(
    "target",
    [
        lambda x: {"a": [np.ones((len(x), 2), dtype=np.int32), x.sum(1).numpy()]},
        lambda x: np.array([f"row {int(row[0])}" for row in x]),
        lambda x: [row[: 1 + int(row[0]) % 3] for row in x],
        lambda x: {"texts": [{"label": str(int(row[0])), "box": row} for row in x], "logits": x},
        lambda x: [x, (x + 1, x.sum(1))],
        lambda x: {"x": x, "none": None, "name": "a", "dtype": x.dtype, "device": x.device},
    ],
    ids=["arrays", "array of texts", "ragged items", "dicts", "two outputs", "constants"],
)
def test_outputs_with_rows(target):
    """Arrays and lists with one item per row are concatenated; a list of two outputs stays one."""
    assert_joined(target)


@pytest.mark.parametrize(
    "target",
    [
        lambda x: torch.full((3,), float(len(x))),
        lambda x: (x, {"total": x.sum(0, keepdim=True)}),
        lambda x: torch.cat([x, x]),
        lambda x: x[x[:, 0] > 2],
        lambda x: (x, torch.Size((len(x),)), range(len(x))),
        lambda x: torch.cdist(x, x),
        lambda x: torch.bincount((x[:, 0] > 2).long(), minlength=3),
        lambda x: x[1:],
        lambda x: x.T,
    ],
    ids=[
        "size",
        "sum",
        "cat",
        "filter",
        "objects",
        "distances",
        "bins",
        "shorter",
        "turned",
    ],
)
def test_outputs_without_rows(target):
    """An output without rows is refused, also if a shard has as many rows as the output is long."""
    assert_refused(target)


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_hidden_states_are_on_dim_1(kind, layers):
    """Hidden states, with rows on dim 1, are refused for every layer count without `out_dims`."""
    model, make = kind(3, 2, layers, batch_first=True), lambda rows: torch.randn(rows, 5, 3)
    with torch.no_grad():
        assert_refused(model, make)
        assert_joined(
            model, make, rows=(2, 5, 9), out_dims=(0, (1, 1)) if kind is nn.LSTM else (0, 1)
        )
        assert_joined(
            kind(3, 2, layers), lambda rows: torch.randn(5, rows, 3), rows=(2, 9), dim=1, out_dims=1
        )


def test_masked_arrays_are_joined():
    with parallel(lambda x: np.ma.masked_greater(x.numpy(), 3), TWO) as p:
        assert p(torch.arange(6.0)).tolist() == [0, 1, 2, 3, None, None]


def test_outputs_that_hold_a_layer():
    """A lane's copy of a layer ends with the block, in calls, `map`, and `submit`."""
    model, x = (
        Stateful(lambda self, x: (self.layer(x), self), layer=nn.Linear(2, 2)),
        torch.ones(5, 2),
    )
    with torch.no_grad(), parallel(model, TWO, join="list") as p:
        for use in (lambda: p(x), lambda: next(p.map([x])), lambda: p.submit(x).result()):
            with pytest.raises(GatherError, match="holds a Stateful, which is a lane's"):
                use()


def test_join_list_has_lane_order():
    """Lists are in lane order, for batches of any size."""
    with parallel(lambda x: torch.zeros(len(x), len(x)), THREE, join="list") as p:
        for rows, sizes in ((7, [3, 2, 2]), (1, [1]), (0, [0])):
            assert [tuple(output.shape) for output in p(torch.zeros(rows, 2))] == [
                (size, size) for size in sizes
            ]


@pytest.mark.parametrize("lanes", [2, 3, 4])
@pytest.mark.parametrize("options", [{}, {"out_dims": 0}], ids=["uneven", "balanced"])
def test_the_last_batch_of_a_batch_norm(lanes, options):
    """A lane with one row would raise an error in training, where the plain call does not.

    With as many lanes as rows, every lane has one row if the outputs are declared.
    """
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with parallel(model, ["cpu"] * lanes, **options):
        for rows in range(2, 20):
            if rows > lanes or not options:
                assert model(torch.randn(rows, 4)).shape == (rows, 4)


def test_a_loss_next_to_rows():
    """The last batch may have one row per lane. A loss alone may be that row without its dim."""
    model = nn.Linear(4, 4)

    def with_loss(x):
        y = model(x)
        return y, y.mean()

    for rows in (9, 2, 1):
        x = torch.randn(rows, 4)
        with torch.no_grad(), parallel(with_loss, TWO, out_dims=0, reduce="mean") as p:
            assert_same(p(x), with_loss(x))
        options = {"out_dims": 0, "reduce": {"loss": "mean"}}
        with torch.no_grad(), parallel(lambda x: {"loss": model(x).mean()}, TWO, **options) as p:
            torch.testing.assert_close(p(x)["loss"], model(x).mean())
        with torch.no_grad(), parallel(lambda x: model(x).mean(), TWO, reduce="mean") as p:
            torch.testing.assert_close(p(x), model(x).mean())
    refused = pytest.raises(GatherError, match=r"leave out out_dims")
    with parallel(lambda x: model(x).mean(), TWO, out_dims=0, reduce="mean") as p, refused:
        p(torch.randn(2, 4))
