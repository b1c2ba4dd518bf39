"""A warm call enters few functions of the package. Counts, not times: the limits hold on every machine."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

import parawrap
from parawrap import parallel
from parawrap.engine.model_state import read_settled_count
from tests.helpers.waiting import eventually

ROOT = f"{Path(parawrap.__file__).parent}/"


class Entries:
    """Records the (file, function) of each entry into the package, in all threads that start after it."""

    def __init__(self):
        self.found = []

    def __call__(self, frame, event, arg):
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            self.found.append((frame.f_code.co_filename.removeprefix(ROOT), frame.f_code.co_qualname))

    def of(self, work):
        """Return the entries of the last of 21 runs of `work`, until the lanes are idle again."""
        for _ in range(20):
            work()
        # For a while after a hook was registered anywhere, calls look for more
        eventually(lambda: read_settled_count() >= 0, "a count of hooks that stays")
        work()
        self.wait_until_idle()
        self.found.clear()
        work()
        self.wait_until_idle()
        return [*self.found], "\n".join(f"{count} {name}" for name, count in Counter(self.found).most_common())

    def wait_until_idle(self):
        count = None
        while count != len(self.found):
            count = len(self.found)
            threading.Event().wait(0.1)


@pytest.fixture
def entries():
    before = sys.getprofile(), threading.getprofile()
    threading.setprofile(recorder := Entries())
    sys.setprofile(recorder)
    yield recorder
    sys.setprofile(before[0])
    threading.setprofile(before[1])


X = torch.randn(64, 64)


def model():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))


@torch.no_grad()
def test_entries_of_a_warm_call(entries):
    """A call on four lanes: at most 45 entries in all threads, into 20 functions in 4 files."""
    with parallel(net := model(), ["cpu"] * 4, out_dims=0):
        found, shown = entries.of(lambda: net(X))
    assert found, "nothing was recorded"
    counts = {"entries": len(found), "functions": len({*found}), "files": len({file for file, _ in found})}
    most = {"entries": 45, "functions": 20, "files": 4}
    assert {name: count for name, count in counts.items() if count > most[name]} == {}, shown


@torch.no_grad()
def test_entries_if_every_lane_runs_its_part(entries):
    """A class of the user's own adds a look at its writes. With the barrier, no thread runs two parts."""
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
