"""How the batches of a stream travel: in chunks of measured size, without limits that a slow side could exceed."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from parawrap.workers.lanes import Lanes
from tests.helpers.pools import processes


class Sleeping(nn.Module):
    def forward(self, x):
        time.sleep(0.02)
        return x


@pytest.fixture
def sizes(monkeypatch):
    """The numbers of batches in the messages so far."""
    found, post = [], Lanes.post

    def noting(lanes, request):
        found.append(len(request.calls))
        post(lanes, request)

    monkeypatch.setattr(Lanes, "post", noting)
    return found


def numbers(count):
    return [torch.full((8,), float(number)) for number in range(count)]


def firsts(outputs):
    return [int(output[0]) for output in outputs]


@pytest.mark.parametrize("ordered", [True, False])
def test_small_batches_share_messages(sizes, ordered):
    """The size grows with the first answers. A later stream starts with it."""
    with processes(nn.Identity()) as p:
        for _ in range(2):
            sizes.clear()
            assert sorted(firsts(p.map(numbers(2000), ordered=ordered))) == [*range(2000)]
            assert sum(sizes) == 2000
            assert len(sizes) < 500
            assert max(sizes) <= 64
        assert sizes[0] > 1


@pytest.mark.parametrize(
    ("model", "options", "size"),
    [
        pytest.param(Sleeping, {}, 1, id="slow"),
        pytest.param(nn.Identity, {"retries": 0}, 1, id="no retries"),
        pytest.param(nn.Identity, {"chunksize": 5}, 5, id="given"),
    ],
)
def test_other_sizes(sizes, model, options, size):
    """Batches that take long travel alone; so do those that must not run again if another batch kills their worker."""
    batches = numbers(20)
    with processes(model(), retries=options.pop("retries", 1)) as p:
        assert firsts(p.map(batches, **options)) == [*range(20)]
    assert set(sizes) == {size}


def test_large_batches_travel_alone(sizes):
    """A chunk has 256 KiB of tensors, and the batch that exceeds them."""
    with processes(nn.Identity()) as p:
        for _ in range(2):
            sizes.clear()
            assert firsts(p.map([batch.repeat(10_000) for batch in numbers(40)])) == [*range(40)]
    assert set(sizes) == {1}


def test_slow_caller(sizes):
    """The source is read at most three chunks per lane ahead of it."""
    taken = 0

    def source():
        nonlocal taken
        for batch in numbers(1500):
            taken += 1
            yield batch

    with processes(nn.Identity()) as p:
        list(p.map(numbers(500)))
        ahead = []
        for number, output in enumerate(p.map(source())):
            if number < 300:
                time.sleep(0.001)
            ahead.append(taken - number)
            assert output[0] == number
    assert max(ahead) <= 3 * 2 * 64 + 1


@pytest.mark.parametrize("ordered", [True, False])
def test_slow_source(ordered):
    """An output does not wait for the batches after the next one, and the workers do not wait for a full chunk."""
    taken = 0

    def source():
        nonlocal taken
        for batch in numbers(30):
            taken += 1
            time.sleep(0.02)
            yield batch

    with processes(nn.Identity()) as p:
        list(p.map(numbers(500)))
        ahead = [taken - number for number, _ in enumerate(p.map(source(), ordered=ordered))]
    assert len(ahead) == 30
    assert max(ahead) <= 5
