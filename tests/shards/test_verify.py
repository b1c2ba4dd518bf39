"""`check_equal`: compare a parallel output with the plain output."""

from __future__ import annotations

import pytest
import torch
from torch.nn.utils import rnn

from parawrap.errors import VerifyError
from parawrap.shards import check_equal


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (torch.ones(3), torch.ones(3) + 1e-7),
        ({"a": [torch.zeros(2), None]}, {"a": [torch.zeros(2), None]}),
        (torch.tensor([float("nan"), float("inf")]), torch.tensor([float("nan"), float("inf")])),
        (torch.zeros(0, 3), torch.zeros(0, 3)),
        (torch.tensor([True]), torch.tensor([True])),
        (torch.ones(2, dtype=torch.complex64), torch.ones(2, dtype=torch.complex64)),
        (torch.ones(2, requires_grad=True), torch.ones(2)),
    ],
)
def test_values_that_are_equal_up_to_rounding_pass(ours, theirs):
    """Rounding errors and equal NaNs raise nothing."""
    check_equal(ours, theirs)


def test_a_difference_is_reported_with_place_size_and_usual_cause():
    """The error names the place, the absolute and relative difference, and the usual cause."""
    with pytest.raises(VerifyError, match=r'output\["a"\]\[1\].*max abs 0.5, max rel 0.25.*BatchNorm'):
        check_equal({"a": [torch.zeros(2), torch.tensor([2.0, 2.5])]}, {"a": [torch.zeros(2), torch.tensor([2.0, 2.0])]})


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.complex64])
def test_a_difference_of_any_dtype_is_a_verify_error(dtype):
    """Masks, labels, and complex values are compared too."""
    with pytest.raises(VerifyError, match="max abs 1"):
        check_equal(torch.tensor([1, 0]).to(dtype), torch.tensor([0, 0]).to(dtype))


def test_a_difference_of_dtype_is_named():
    """Equal numbers of different dtypes are reported by their dtypes."""
    with pytest.raises(VerifyError, match=r"float32.*float64|float64.*float32"):
        check_equal(torch.ones(2), torch.ones(2, dtype=torch.float64))


def test_a_difference_of_shape_is_named():
    """Missing or repeated rows are reported by both shapes."""
    with pytest.raises(VerifyError, match=r"\(4,\).*\(2,\)"):
        check_equal(torch.zeros(4), torch.zeros(2))


def test_a_difference_of_structure_is_named():
    """Different keys or lengths are reported with their place."""
    with pytest.raises(VerifyError, match=r"output\[0\].*'a'.*'b'"):
        check_equal([{"a": torch.zeros(1)}], [{"b": torch.zeros(1)}])


def test_packed_sequences_are_compared():
    """The tensors of packed sequences are compared."""
    with pytest.raises(VerifyError):
        check_equal(rnn.pack_sequence([torch.ones(2)]), rnn.pack_sequence([torch.zeros(2)]))
