"""How the batches of a stream travel: in chunks of measured size, without limits that a slow side
could exceed.
"""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from parawrap import SessionError
from parawrap.workers import chunk_size
from parawrap.workers.worker_lanes import WorkerLanes
from tests.helpers.pools import processes
from tests.helpers.worker_models import Sleeping


@pytest.fixture
def sizes(monkeypatch):
    """The numbers of batches in the messages so far."""
    found, post = [], WorkerLanes.post

    def noting(lanes, request):
        found.append(len(request.calls))
        post(lanes, request)

    monkeypatch.setattr(WorkerLanes, "post", noting)
    return found


def numbers(count, elements=8):
    return [torch.full((elements,), float(number)) for number in range(count)]


def firsts(outputs):
    return [int(output[0]) for output in outputs]


@pytest.mark.parametrize("ordered", [True, False])
def test_small_batches_share_messages(sizes, ordered, monkeypatch):
    """The size grows with the first answers. A later stream starts with it, whatever else runs."""
    monkeypatch.setattr(chunk_size, "TARGET_NS", 10**12)
    with processes(nn.Identity()) as p:
        for _ in range(2):
            sizes.clear()
            assert sorted(firsts(p.map(numbers(800), ordered=ordered))) == [*range(800)]
            assert sum(sizes) == 800
            assert len(sizes) < 200
            assert max(sizes) <= 64
        assert sizes[0] > 1


@pytest.mark.parametrize(
    ("model", "elements", "options", "size"),
    [
        pytest.param(Sleeping, 8, {}, 1, id="slow"),
        pytest.param(nn.Identity, 8, {"retries": 0}, 1, id="no retries"),
        pytest.param(nn.Identity, 8, {"chunksize": 5}, 5, id="given"),
        pytest.param(nn.Identity, 80_000, {}, 1, id="large"),
    ],
)
def test_slow_batches_travel_alone(sizes, model, elements, options, size):
    """Batches that take long, or are large, travel alone; so do those that must not run again if
    another one kills.
    """
    with processes(model(), retries=options.pop("retries", 1)) as p:
        for _ in range(2):
            sizes.clear()
            assert firsts(p.map(numbers(20, elements), **options)) == [*range(20)]
            assert set(sizes) == {size}


def count_ahead(count, *, source_s=0.0, caller_s=0.0, ordered=True):
    """Return how many batches the stream had read at each output, beyond those
    that it had given.
    """
    taken = 0

    def source():
        nonlocal taken
        for batch in numbers(count):
            taken += 1
            time.sleep(source_s)
            yield batch

    ahead = []
    with processes(nn.Identity()) as p:
        list(p.map(numbers(500)))
        for number, output in enumerate(p.map(source(), ordered=ordered)):
            time.sleep(caller_s)
            ahead.append(taken - number)
            assert output[0] == number or not ordered
    assert len(ahead) == count
    return ahead


def test_slow_caller():
    """The source is read at most three chunks per lane ahead of it."""
    assert max(count_ahead(800, caller_s=0.001)) <= 3 * 2 * 64 + 1


@pytest.mark.parametrize("ordered", [True, False])
def test_slow_source(ordered):
    """An output does not wait for the batches after the next one, and the workers do not wait for a
    full chunk.
    """
    assert max(count_ahead(30, source_s=0.02, ordered=ordered)) <= 5


def test_modes_of_the_first_batch():
    """A stream reads the modes at its first `next`, also for batches that are read later."""
    with processes(nn.Linear(3, 2)) as p:
        outputs = p.map([torch.ones(2, 3)] * 9, buffersize=2)
        next(outputs)
        with torch.enable_grad():
            assert not any(output.requires_grad for output in outputs)
        with torch.enable_grad():
            outputs = p.map([torch.ones(2, 3)], return_exceptions=True)
            with pytest.raises(SessionError, match="a parameter"):
                next(outputs)
