"""The table of docs/losses.md: the value and the gradient of each kind of loss under each `reduce`."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from parawrap import parallel

SIZES = {2: (6, 5), 3: (4, 4, 3), 4: (3, 3, 3, 2)}


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
    torch.manual_seed(0)
    labels = torch.randint(0, 4, (11, 5))
    labels[:3, 1:] = -100
    return torch.randn(11, 4, requires_grad=True), labels


def by_hand(loss, batch, lanes):
    """Return the loss of each shard."""
    return torch.stack([loss(*shard) for shard in zip(*(part.split(SIZES[lanes]) for part in batch), strict=True)])


def in_lanes(loss, batch, lanes, reduce):
    with parallel(loss, ["cpu"] * lanes, reduce=reduce) as p:
        values = [p(*batch) for _ in range(2)]
        assert p.stats().shards == SIZES[lanes]
    return values[-1]


def assert_same(value, expected, batch):
    torch.testing.assert_close(value, expected)
    (gradient,), (other,) = (torch.autograd.grad(each.sum(), batch[0]) for each in (value, expected))
    torch.testing.assert_close(gradient, other)


@pytest.mark.parametrize("lanes", SIZES)
@pytest.mark.parametrize(("loss", "reduce"), [(row_mean, "mean"), (row_sum, "sum")])
def test_the_reduction_of_the_loss_has_the_plain_value_and_gradient(loss, reduce, lanes, batch):
    """A row mean is exact under "mean", and a sum under "sum"."""
    assert_same(in_lanes(loss, batch, lanes, reduce), loss(*batch), batch)


@pytest.mark.parametrize("lanes", SIZES)
@pytest.mark.parametrize("loss", [row_mean, row_sum, token_mean])
def test_other_reductions_are_what_the_table_says(loss, lanes, batch):
    """The option "mean" weighs each lane's value by its rows, "sum" adds, "stack" lists, and a function gets the vector."""
    expected = {
        "mean": lambda values: (values * torch.tensor(SIZES[lanes])).sum() / 11,
        "sum": torch.sum,
        "stack": lambda values: values,
        torch.amax: torch.amax,
    }
    for reduce, by in expected.items():
        assert_same(in_lanes(loss, batch, lanes, reduce), by(by_hand(loss, batch, lanes)), batch)


@pytest.mark.parametrize("lanes", SIZES)
def test_a_token_mean_needs_its_sum_and_its_count(lanes, batch):
    """Sum and count under "sum" give the plain token mean and its gradient; the mean of means is another number."""
    plain = token_mean(*batch)
    total, count = in_lanes(token_sum_and_count, batch, lanes, "sum")
    assert_same(total / count, plain, batch)
    assert not torch.allclose(in_lanes(token_mean, batch, lanes, "mean"), plain)
