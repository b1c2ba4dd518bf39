"""`check_rowwise`: differences that it finds, and the words that it has for them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parawrap.errors import ShardError, VerifyError
from parawrap.testing import check_rowwise


class Calls(nn.Module):
    """A layer, and then any function of its output."""

    def __init__(self, function):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.function = function

    def forward(self, x):
        return self.function(self.linear(x))


@pytest.mark.parametrize(
    "function",
    [
        lambda y: y,
        lambda y: {"scores": y, "best": y.argmax(1), "finite": y > 0},
        lambda y: y / 0,
        lambda y: (y - y) / 0,
        lambda y: y.to(torch.complex64),
        lambda y: y.half(),
    ],
    ids=["tensor", "dict", "inf", "nan", "complex", "half"],
)
def test_a_row_wise_model_passes(function):
    """Rounding does not count, and infinities and NaNs in the same places are equal."""
    check_rowwise(Calls(function), torch.randn(11, 3))


@pytest.mark.parametrize(
    ("function", "place"),
    [
        (lambda y: y.softmax(0), "output differs by up to "),
        (lambda y: {"a": y, "b": y - y.mean(0)}, 'output["b"] differs by up to '),
        (lambda y: y.argsort(0), "output differs by up to "),
        (lambda y: y.cumsum(0) > 0, "output differs by up to 1.0e+00"),
    ],
    ids=["softmax", "dict", "integers", "bools"],
)
def test_a_model_that_mixes_rows_is_refused(function, place):
    """The message names the output, the cut, and the greatest difference."""
    torch.manual_seed(0)
    with pytest.raises(VerifyError, match=r"Calls mixes rows\. With 11 rows cut as \d") as caught:
        check_rowwise(Calls(function), torch.randn(11, 3))
    assert place in str(caught.value)
    assert "of its largest value" in str(caught.value)


def test_the_tolerance_is_relative_to_the_largest_value():
    """`rtol` allows a difference of that part of the largest value, also of small elements."""
    model = Calls(lambda y: y + 1e-3 * y.mean())
    with torch.no_grad():
        check_rowwise(model, torch.randn(11, 3), rtol=0.1)
        with pytest.raises(VerifyError):
            check_rowwise(model, torch.randn(11, 3), rtol=1e-9)


def test_gradients_and_buffers_are_compared():
    """Batch normalization in training mode differs in its output, its gradients, and its buffers."""
    with pytest.raises(VerifyError, match=r"output differs.*the gradient of 'weight' differs") as caught:
        check_rowwise(nn.BatchNorm1d(3), 5 + torch.randn(11, 3))
    assert "buffer 'running_mean' differs" in str(caught.value)


def test_random_numbers_are_named():
    """The message says that a model draws random numbers, because these differ between cuts."""
    with pytest.raises(VerifyError, match="It draws random numbers"):
        check_rowwise(nn.Dropout(), torch.randn(11, 3))


def test_a_batch_that_is_not_cut_is_refused():
    """A batch of two rows proves nothing."""
    with pytest.raises(ShardError, match="the batch was not cut"):
        check_rowwise(nn.Linear(3, 2), torch.randn(2, 3))
