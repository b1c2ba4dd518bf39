"""`reduce`: a number per lane becomes a mean over rows, a sum, a vector, or a function of it; nothing is guessed."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.properties import assume, given, st
from tests.helpers.shards import joined, refusal

numpy = pytest.importorskip("numpy")


def scalar(value, dtype=torch.float32):
    return torch.tensor(value, dtype=dtype)


@given(st.lists(st.tuples(st.floats(-100, 100), st.integers(1, 9)), min_size=1, max_size=5), st.booleans())
def test_a_mean_is_weighted_by_rows(shards, is_tensor):
    values, sizes = zip(*shards, strict=True)
    assume(max(sizes) > 1 or len(sizes) == 1)  # a 0-d tensor of one row may be that row without its dim
    make = torch.tensor if is_tensor else float
    expected = sum(value * size for value, size in shards) / sum(sizes)
    assert float(joined(*map(make, values), sizes=sizes, reduce="mean")) == pytest.approx(expected, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("make", [scalar, float])
def test_sum_stack_and_a_function(make):
    values = [make(1.0), make(4.0), make(7.0)]
    sizes = (3, 1, 1)
    assert joined(*values, sizes=sizes, reduce="sum") == 12
    assert joined(*values, sizes=sizes, reduce="stack").tolist() == [1, 4, 7]
    assert joined(*values, sizes=sizes, reduce=torch.max).item() == 7
    assert joined(make(1.5), sizes=(1,), reduce="stack").tolist() == [1.5]  # of a call that was not cut
    assert joined(make(1.5), sizes=(1,), reduce=torch.sum).item() == 1.5
    assert joined((torch.zeros(1), make(1.5)), sizes=(1,), reduce="stack")[1].tolist() == [1.5]


@pytest.mark.parametrize("values", [(1.0, 2.0), (True, True), (scalar(1.0), scalar(1.0)), (scalar(1.0), 2.0)], ids=range(4))
def test_numbers_without_a_reduction(values):
    """Even equal numbers. The error names every option."""
    message = refusal({"loss": values[0]}, {"loss": values[1]})
    for part in ('output["loss"]', 'reduce="mean"', '"sum"', '"stack"', "a function", "out_dims=None"):
        assert part in message
    assert f"({values[0]!r}, {values[1]!r})" in message


def test_counts_and_flags_have_no_mean():
    """The error names the other reductions. A flag has no sum either."""
    for make in (int, lambda value: scalar(value, torch.int64), lambda value: scalar(value, torch.bool)):
        message = refusal(make(1), make(0), reduce="mean")
        for part in (str(getattr(make(1), "dtype", "int")), "has no mean", 'reduce="sum"', 'reduce="stack"', "a function"):
            assert part in message
        assert joined(make(1), make(0), reduce="stack").tolist() == [1, 0]
    for make in (bool, lambda value: scalar(value, torch.bool)):
        assert "torch.any" in refusal(make(1), make(0), reduce="sum")
        assert joined(make(1), make(0), reduce=torch.any).item() is True
    assert "float64" in refusal(numpy.float64(1), numpy.float64(2))
    assert joined(numpy.float64(2), numpy.float64(10), reduce="mean") == pytest.approx(4)
    assert joined(numpy.int64(2), numpy.int64(10), reduce="sum") == 12
    assert "has no mean" in refusal(numpy.int64(2), numpy.int64(10), reduce="mean")
    assert "has no sum" in refusal(numpy.bool_(1), numpy.bool_(1), reduce="sum")


@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_squeezed_rows_are_refused(reduce):
    """A 0-d tensor of a shard of one row may be that row without its dim."""
    message = refusal(scalar(1.0), scalar(2.0), sizes=(1, 1), reduce=reduce)
    assert "each lane had one row and returned a 0-d tensor" in message
    assert joined(1.0, 2.0, sizes=(1, 1), reduce="sum") == 3
    assert joined(scalar(1.0), scalar(2.0), sizes=(1, 1), reduce="stack").tolist() == [1, 2]
    assert joined(scalar(1.0), scalar(2.0), sizes=(2, 1), reduce="sum") == 3
    assert joined(scalar(1.0), sizes=(1,), reduce=reduce) == 1


def test_named_tables_are_summed():
    """A confusion matrix, say. The rows of other outputs are joined as usual."""
    for make in (torch.tensor, numpy.array):
        outputs = [{"y": torch.zeros(rows), "t": make([[rows, 0], [0, 1]])} for rows in (3, 1)]
        found = joined(*outputs, reduce={"t": "sum"})
        assert (found["y"].shape, found["t"].tolist()) == ((4,), [[4, 0], [0, 2]])
        assert 'output["t"]' in refusal(*outputs)


def test_reduced_tensors_and_arrays():
    """With `reduce` for a whole output, a tensor with the rows is joined, and any other is reduced."""
    assert joined(torch.ones(2), torch.ones(2), reduce="sum").tolist() == [2, 2]
    assert joined(torch.ones(2), torch.ones(2), reduce="stack").shape == (2, 2)
    assert joined(torch.ones(3), torch.ones(1), reduce="sum").shape == (4,)
    assert "which reduce cannot put together" in refusal(torch.ones(2), torch.ones(3), reduce="sum")
    tables = [{"t": numpy.ones(2)}, {"t": numpy.ones(2)}, {"t": numpy.ones(3)}]
    assert 'an array can only be reduced by "sum"' in refusal(*tables[:2], reduce={"t": "mean"})
    assert "which reduce cannot put together" in refusal(*tables[1:], reduce={"t": "sum"})
