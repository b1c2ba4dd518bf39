"""`reduce`: one number per lane becomes a mean over rows, a sum, a vector, or a function of it."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.shards import joined, refusal

numpy = pytest.importorskip("numpy")


def scalar(value, dtype=torch.float32):
    return torch.tensor(value, dtype=dtype)


def test_reduced_tensors_and_arrays():
    """With `reduce` for a whole output, a tensor with the rows is joined; others are reduced."""
    assert joined(torch.ones(2), torch.ones(2), reduce="sum").tolist() == [2, 2]
    assert joined(torch.ones(2), torch.ones(2), reduce="stack").shape == (2, 2)
    assert joined(torch.ones(3), torch.ones(1), reduce="sum").shape == (4,)
    assert "which reduce cannot put together" in refusal(torch.ones(2), torch.ones(3), reduce="sum")
    assert "have no dim in common" in refusal(torch.tensor(1.0), torch.ones(1))
    for one in (torch.ones(2), numpy.ones(2), 2):
        message = refusal({"m": one}, {"m": one}, out_dims={"m": None}, reduce={"m": "sum"})
        assert "says that every lane returned the same value" in message
    tables = [{"t": numpy.ones(2)}, {"t": numpy.ones(2)}, {"t": numpy.ones(3)}]
    assert "which has no mean" in refusal(*tables[:2], reduce={"t": "mean"})
    assert "which reduce cannot put together" in refusal(*tables[1:], reduce={"t": "sum"})
    assert joined(numpy.float64(2), numpy.float64(10), reduce="mean") == pytest.approx(4)
    assert "has no mean" in refusal(numpy.int64(2), numpy.int64(10), reduce="mean")
    assert "has no sum" in refusal(numpy.bool_(1), numpy.bool_(1), reduce="sum")


def test_numbers_of_one_lane():
    """In a call that was not cut, a number is reduced all the same."""
    for make in (scalar, float):
        assert joined(make(1.5), sizes=(1,), reduce="stack").tolist() == [1.5]
        assert joined((torch.zeros(1), make(1.5)), sizes=(1,), reduce=torch.sum)[1].item() == 1.5


@pytest.mark.parametrize(("reduce", "right"), [("mean", 1.5), ("sum", 3.0)])
def test_one_row_per_lane(reduce, right):
    """A 0-d tensor may be a row without its dim.

    It is a number if `reduce` names it, or if another output of the call kept its rows.
    """
    one, other = scalar(1.0), scalar(2.0)
    assert joined(1.0, 2.0, sizes=(1, 1), reduce=reduce) == right
    row, loss = torch.ones(1, 4), {"loss": reduce}
    for outputs, options in (
        (({"loss": one}, {"loss": other}), {"reduce": loss}),
        (({"y": row, "loss": one}, {"y": row, "loss": other}), {"reduce": reduce, "out_dims": 0}),
        (
            ({"y": [row], "loss": one}, {"y": [row], "loss": other}),
            {"reduce": reduce, "out_dims": 0},
        ),
    ):
        assert joined(*outputs, sizes=(1, 1), **options)["loss"].item() == right
    found = joined((row.T, one), (row.T, other), sizes=(1, 1), out_dims=(1, 0), reduce=reduce)
    assert (found[0].shape, found[1].item()) == ((4, 2), right)
    for outputs in ((one, other), ((one, one), (other, other))):
        message = refusal(*outputs, sizes=(1, 1), reduce=reduce, out_dims=0)
        assert "each lane had one row and returned a 0-d tensor" in message
