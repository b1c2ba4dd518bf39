"""The table of docs/losses.md: the value and the gradient of each kind of loss under each `reduce`."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from parawrap import parallel

SIZES = {2: (6, 5), 4: (3, 3, 3, 2)}


def row_mean(scores, labels):
    return cross_entropy(scores, labels[:, 0])


def row_sum(scores, labels):
    return cross_entropy(scores, labels[:, 0], reduction="sum")


def token_mean(scores, labels):
    scores = scores[:, None].expand(-1, labels.shape[1], -1).flatten(0, 1)
    return cross_entropy(scores, labels.flatten(), ignore_index=-100)


def token_sum_and_count(scores, labels):
    count = (labels != -100).sum()
    return token_mean(scores, labels) * count, count


@pytest.fixture
def batch():
    labels = torch.randint(0, 4, (11, 5))
    labels[:3, 1:] = -100
    return torch.randn(11, 4, requires_grad=True), labels


def in_lanes(loss, batch, lanes, reduce):
    with parallel(loss, ["cpu"] * lanes, reduce=reduce) as p:
        value = p(*batch)
        assert p.stats().shards == SIZES[lanes]
    return value


def assert_same(value, expected, batch):
    torch.testing.assert_close(value, expected)
    (gradient,), (other,) = (torch.autograd.grad(each.sum(), batch[0], retain_graph=True) for each in (value, expected))
    torch.testing.assert_close(gradient, other)


@pytest.mark.parametrize("lanes", SIZES)
@pytest.mark.parametrize("loss", [row_mean, row_sum, token_mean])
def test_values_of_the_table(loss, lanes, batch):
    """The option "mean" weighs each lane's value by its rows, "sum" adds, "stack" lists, and a function gets the vector."""
    shards = zip(*(part.split(SIZES[lanes]) for part in batch), strict=True)
    values = torch.stack([loss(*shard) for shard in shards])
    mean = (values * torch.tensor(SIZES[lanes])).sum() / 11
    for reduce, expected in (("mean", mean), ("sum", values.sum()), ("stack", values), (torch.amax, values.amax())):
        assert_same(in_lanes(loss, batch, lanes, reduce), expected, batch)


@pytest.mark.parametrize("lanes", SIZES)
def test_exact_reductions(lanes, batch):
    """A row mean is exact under "mean", a sum under "sum", and a token mean as a sum and its count."""
    for loss, reduce in ((row_mean, "mean"), (row_sum, "sum")):
        assert_same(in_lanes(loss, batch, lanes, reduce), loss(*batch), batch)
    plain = token_mean(*batch)
    total, count = in_lanes(token_sum_and_count, batch, lanes, "sum")
    assert_same(total / count, plain, batch)
    assert not torch.allclose(in_lanes(token_mean, batch, lanes, "mean"), plain)
