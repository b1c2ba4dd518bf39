"""torchmetrics in a block and in a stream: metrics in the caller are right, and one in forward gets a warning."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parawrap import parallel
from tests.helpers.tiers import require_packages

TWO = ["cpu"] * 2


@pytest.fixture
def accuracy():
    """An accuracy over four classes."""
    require_packages("torchmetrics")
    from torchmetrics.classification import MulticlassAccuracy

    return MulticlassAccuracy(4, average="micro")


@pytest.fixture
def data():
    """A model, and batches with labels; the last one is short."""
    x, y = torch.randn(68, 8), torch.randint(0, 4, (68,))
    return nn.Linear(8, 4), list(zip(x.split(8), y.split(8), strict=True))


def expected(model, batches):
    right = [(model(x).argmax(1) == y).float() for x, y in batches]
    return torch.cat(right).mean()


def test_a_metric_of_calls(accuracy, data):
    """A metric that gets the joined outputs counts each row once."""
    model, batches = data
    with torch.no_grad(), parallel(model, TWO, out_dims=0):
        for x, y in batches:
            accuracy.update(model(x), y)
    torch.testing.assert_close(accuracy.compute(), expected(model, batches))


def test_a_metric_of_a_stream(accuracy, data):
    """So does a metric that gets the outputs of map with their batches."""
    model, batches = data
    with torch.no_grad(), parallel(model, TWO) as p:
        for (_, y), scores in p.map(batches, prepare=lambda batch: batch[:1], with_inputs=True):
            accuracy.update(scores, y)
    torch.testing.assert_close(accuracy.compute(), expected(model, batches))


def test_a_metric_in_forward_gets_a_warning(accuracy, data):
    """The lanes count apart, and the counts do not come back: the warning names the metric's state."""

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.model, self.accuracy = data[0], accuracy

        def forward(self, x, y):
            scores = self.model(x)
            self.accuracy.update(scores, y)
            return scores

    counting = Counting()
    with torch.no_grad(), parallel(counting, TWO, out_dims=0), pytest.warns(UserWarning, match=r"accuracy\._update_count"):
        counting(*data[1][0])
    assert accuracy._update_count == 0
