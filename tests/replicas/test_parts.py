"""Models with an unusual structure: outputs and gradients in lanes are those of a plain copy."""

from __future__ import annotations

import copy
import functools
import operator

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import parallel
from tests.helpers.odd_models import BEHIND, CASES, MODELS, check, quiet

TWO = ["cpu", "cpu"]
X = torch.randn(9, 4)
LANES = ((2, 17, {}), (3, 5, {}), (4, 2, {"out_dims": 0}))


@quiet
@pytest.mark.parametrize(("event", "grad"), CASES)
@pytest.mark.parametrize("index", range(len(MODELS)), ids=MODELS)
def test_odd_models_equal_a_plain_copy(index, event, grad):
    """With 2 to 4 lanes and 2 to 17 rows, each of them for a third of the models."""
    lanes, rows, options = LANES[index % 3]
    check(
        [*MODELS.values()][index], event, functools.partial(parallel, devices=["cpu"] * lanes, **options), rows, grad=grad
    )


@pytest.mark.parametrize("behind", BEHIND)
def test_models_behind_a_callable(behind):
    model = MODELS["extractor"]()
    plain, x = copy.deepcopy(model), torch.randn(10, 4, dtype=torch.float64)
    with parallel(behind(model), ["cpu"] * 3) as p:
        for _ in range(2):
            output, expected = p(x), plain(x)
            assert_close(output, expected)
            output["2"].sum().backward()
            expected["2"].sum().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(mine.grad, theirs.grad)


class AttrDict(dict):
    """A dict with its items as attributes."""

    def __init__(self, **items):
        super().__init__(items)
        self.__dict__ = self


class Tagged(tuple):
    """A tuple subclass with its own constructor."""

    __slots__ = ()

    def __new__(cls, first, second):
        return super().__new__(cls, (first, second))


class Unusual(nn.Linear):
    def forward(self, x):
        first, second = self.tagged
        return {"y": self.run(first(x)) * self.config.scale * self.config["scale"] + second, "empty": [(), [], {}]}


def test_containers_of_unusual_classes():
    """They lead to the lane's own modules and follow changes; empty containers in outputs stay empty."""
    model = Unusual(4, 4)
    model.config, model.tagged = AttrDict(scale=2.0), Tagged(nn.Linear(4, 4), 1.0)
    model.run = functools.partial(operator.call, nn.Tanh())
    with torch.no_grad(), parallel(model, TWO):
        for model.config.scale in (2.0, 5.0):
            output = model(X)
            assert_close(output["y"], model.tagged[0](X).tanh() * model.config.scale**2 + 1.0)
            assert output["empty"] == [(), [], {}]
