"""A warm call enters few functions of the package.

Counts, not times: the limits hold on every machine.
"""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from parawrap import parallel
from tests.helpers.entries import recorded_entries


@pytest.fixture
def entries():
    with recorded_entries() as recorder:
        yield recorder


X = torch.randn(64, 64)


def model():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))


@torch.no_grad()
def test_entries_of_a_warm_call(entries):
    """A call on four lanes: at most 45 entries in all threads, into 20 functions in 4 files."""
    with parallel(net := model(), ["cpu"] * 4, out_dims=0):
        found, shown = entries.of(lambda: net(X))
    assert found, "nothing was recorded"
    counts = {
        "entries": len(found),
        "functions": len({*found}),
        "files": len({file for file, _ in found}),
    }
    most = {"entries": 45, "functions": 20, "files": 4}
    assert {name: count for name, count in counts.items() if count > most[name]} == {}, shown


@torch.no_grad()
def test_entries_if_every_lane_runs_its_part(entries):
    """A class of the user's own adds a look at its writes.

    With the barrier, no thread runs two parts.
    """
    together = threading.Barrier(4)

    class Meeting(nn.Module):
        def forward(self, x):
            together.wait(60)
            return x

    with parallel(net := Meeting(), ["cpu"] * 4, out_dims=0):
        found, shown = entries.of(lambda: net(X))
    assert 0 < len(found) <= 45, shown


@torch.no_grad()
def test_entries_of_a_warm_stream(entries):
    """`map` of 32 batches on two lanes: at most 450 entries in all threads."""
    with parallel(model(), ["cpu"] * 2) as p:
        found, shown = entries.of(lambda: list(p.map([X] * 32)))
    assert 0 < len(found) <= 450, shown


@torch.no_grad()
def test_entries_of_batch_norms(entries):
    """A call in training mode enters at most 8 functions more per batch norm, whose statistics it
    renews.
    """
    counts = []
    for count in (10, 60):
        with parallel(
            net := nn.Sequential(*(nn.BatchNorm1d(64) for _ in range(count))),
            ["cpu"] * 2,
            out_dims=0,
        ):
            found, shown = entries.of(lambda net=net: net(X))
        counts.append(len(found))
    assert counts[1] - counts[0] <= 8 * 50, shown
