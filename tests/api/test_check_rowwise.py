"""`check_rowwise`: differences that it finds, and the words that it has for them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parawrap import register_split
from parawrap.errors import VerifyError
from parawrap.testing import check_rowwise
from tests.helpers.calling import Calls


def layer_and(function):
    """Return a layer, followed by a function of its output."""
    return nn.Sequential(nn.Linear(3, 2), Calls(function))


@pytest.mark.parametrize(
    "function",
    [
        lambda y: {"scores": y, "best": y.argmax(1), "finite": y > 0},
        lambda y: (y / 0, (y - y) / 0),
        lambda y: y.half(),
        lambda y: y.detach().to(torch.float8_e5m2),
    ],
    ids=["dict", "infinite", "half", "float8"],
)
def test_row_wise_model_passes(function):
    """Rounding does not count, and infinities and NaNs in the same places are equal."""
    check_rowwise(layer_and(function), torch.randn(11, 3))


@pytest.mark.parametrize(
    ("function", "place"),
    [
        (lambda y: {"a": y, "b": y - y.mean(0)}, 'output["b"] differs by up to '),
        (lambda y: y.cumsum(0) > 0, "output differs by up to 1.0e+00"),
        (lambda y: torch.arange(len(y)) + 2**60, "output differs by up to 1.0e+00"),
        (lambda y: (y - y.mean(0)).detach().numpy()[:, ::-1], "output differs by up to "),
    ],
    ids=["dict", "bools", "large integers", "array"],
)
def test_mixed_rows_are_refused(function, place):
    """The message names the output, the cut, and the greatest difference."""
    with pytest.raises(
        VerifyError, match=r"Sequential mixes rows\. With 11 rows cut as \d"
    ) as caught:
        check_rowwise(layer_and(function), torch.randn(11, 3))
    assert place in str(caught.value)
    assert "of its largest value" in str(caught.value)


def test_tolerance_is_relative():
    """`rtol` allows a difference of that part of the largest value, also of small elements."""
    model = layer_and(lambda y: y + 1e-3 * y.mean())
    with torch.no_grad():
        check_rowwise(model, torch.randn(11, 3), rtol=0.1)
        with pytest.raises(VerifyError):
            check_rowwise(model, torch.randn(11, 3), rtol=1e-9)


def test_gradients_and_buffers_count():
    """Batch normalization in training mode differs in its output, its
    gradients, and its buffers.
    """
    with pytest.raises(
        VerifyError, match=r"output differs.*the gradient of 'weight' differs"
    ) as caught:
        check_rowwise(nn.BatchNorm1d(3), 5 + torch.randn(11, 3))
    assert "buffer 'running_mean' differs" in str(caught.value)


class Mean(torch.autograd.Function):
    """Adds a bias, with the mean of the rows for its gradient."""

    @staticmethod
    def forward(_, x, bias):
        return x + bias

    @staticmethod
    def backward(_, gradient):
        return gradient, gradient.mean(0)


class Shift(nn.Module):
    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(8, 14, 14))

    def forward(self, x):
        return Mean.apply(x, self.shift)


def test_gradients_of_rounding_pass():
    """A normalization removes the bias before it, whose gradient is the rounding of a sum."""
    layers = nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8)
    x = torch.randn(11, 3, 16, 16)
    check_rowwise(nn.Sequential(*layers), x)
    with pytest.raises(VerifyError, match=r"cut as 6 \+ 5, the gradient of '2.shift' differs"):
        check_rowwise(nn.Sequential(*layers, Shift()), x)


def test_functions_are_refused():
    """A function has no parameters to compare: it belongs into a module."""
    with pytest.raises(TypeError, match="model is a builtin_function_or_method, not a "):
        check_rowwise(torch.sigmoid, torch.randn(11, 3))


def test_lists_of_inputs_get_a_cure():
    """The error of a model that got a list says how to pass its items."""
    with pytest.raises(TypeError) as caught:
        check_rowwise(nn.Linear(3, 2), [torch.randn(11, 3), torch.zeros(11)])
    assert "To give each item as an argument, pass tuple(batch)" in caught.value.__notes__[0]


class Rows:
    """Values with a rule of their own for cutting."""

    def __init__(self, values):
        self.values = values


register_split(
    Rows,
    split=lambda rows, sizes: [Rows(part) for part in rows.values.split(sizes)],
    join=lambda parts: Rows(torch.cat([part.values for part in parts])),
    rows=lambda rows: len(rows.values),
)


def test_written_inputs_are_copies():
    """Each call gets the same inputs, and may write them. The caller's own do not change."""
    check_rowwise(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 2)), torch.randn(11, 3))

    def add_one(x, rows):
        rows.values = rows.values + 1
        return x + rows.values

    rows = Rows(torch.zeros(11, 3, requires_grad=True) * 1)
    check_rowwise(Calls(add_one), (torch.randn(11, 3), rows))
    assert not rows.values.any()
