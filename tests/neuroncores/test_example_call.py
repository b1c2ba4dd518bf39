"""Example inputs of a trace: by position, by name, and wrong ones."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import ShapeError, neuron
from tests.helpers.neuron_doubles import saved_and_loaded


class Weighed(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 5)

    def forward(self, x, mask=None, *, bias=None):
        y = self.fc(x)
        y = y if mask is None else y * mask
        return {"y": y if bias is None else y + bias}


def inputs(rows):
    """Return all inputs of `Weighed`, with different shapes and in another order."""
    return {"bias": torch.randn(rows, 5), "x": torch.randn(rows, 3), "mask": torch.rand(rows, 1)}


@pytest.mark.parametrize("through", [copy.deepcopy, saved_and_loaded], ids=["copied", "loaded"])
def test_inputs_are_given_by_name(host, through):
    """A compiled model takes its inputs by name, alone and for any number of rows over the cores,
    and also by position.

    Copied and loaded models keep the names.
    """
    weighed = Weighed().eval()
    compiled = through(neuron.trace(weighed, example_kwarg_inputs=inputs(2)))
    given = inputs(2)
    assert_close(compiled(**given), weighed(**given))
    net = neuron.DataParallel(compiled)
    for rows in (2, 9, 1):
        given = inputs(rows)
        assert_close(net(**given), weighed(**given))
        assert_close(net(given["x"], given["mask"], given["bias"]), weighed(**given))
    few = {"bias": torch.ones(2, 5), "x": torch.ones(2, 3)}  # mask keeps its default
    assert_close(neuron.trace(weighed, example_kwarg_inputs=few)(**few), weighed(**few))
    with pytest.raises(
        ShapeError, match=r"input 1 is \[2, 2\], but the model is compiled for \[2, 1\]"
    ):
        net(**{**inputs(8), "mask": torch.zeros(8, 2)})
    net.close()


def test_examples_by_position(host):
    """A tensor is the only argument; a tuple or list holds all arguments, as in torch.jit.trace."""
    x = torch.ones(2, 3)
    for example in (x, (x,), [x]):
        assert torch.equal(neuron.trace(torch.neg, example)(x), -x)
    compiled = neuron.trace(
        lambda batch: batch["x"] * 2, ({"x": x},), compiler_args=["--auto-cast", "none"]
    )
    assert torch.equal(compiled({"x": x}), x * 2)


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        (
            ({"x": torch.zeros(2, 3)},),
            {},
            r"is a dict\. .* example_kwarg_inputs=\. .* one dict, .*\(inputs,\)",
        ),
        ((), {}, "the example has NoneType"),
        ((), {"example_kwarg_inputs": {"z": torch.zeros(2, 3)}}, "unexpected keyword argument 'z'"),
    ],
    ids=["dict", "neither", "unknown"],
)
def test_wrong_examples_are_refused(host, args, kwargs, words):
    with pytest.raises(TypeError, match=words):
        neuron.trace(Weighed(), *args, **kwargs)
