"""Pools that are collected without close(), the order of tasks in one lane, and its bounded queue on the device."""

from __future__ import annotations

import copy
import gc
import threading

import pytest
import torch
from torch import nn

from parawrap import parallel
from parawrap.backends import backend_of
from parawrap.lanes import LanePool, Modes
from parawrap.lanes import _lane_streams as lane_streams
from tests.helpers.device_models import mlp, rows, settle
from tests.helpers.waiting import PATIENCE_S


@pytest.fixture
def collected_where_streams_are_made(monkeypatch):
    """Collect garbage only when a lane makes a stream, after the test has set the yielded event."""
    backend = type(backend_of("sim"))
    make = backend.new_stream
    let_go = threading.Event()

    def collecting(self, device):
        assert let_go.wait(PATIENCE_S)
        gc.collect()
        return make(self, device)

    monkeypatch.setattr(lane_streams, "_shelf", lane_streams._Shelf())  # a shelf without streams of earlier pools
    monkeypatch.setattr(backend, "new_stream", collecting)
    gc.disable()
    yield let_go
    let_go.set()
    gc.enable()


def pool_on(device):
    """Return a pool of one lane that only the garbage collector can free, because it refers to itself."""
    pool = LanePool([torch.device(device)])
    pool.itself = pool
    return pool


def send_ones(pool, device):
    return pool.submit(pool.lanes[0], lambda: torch.ones(1, device=device), Modes.capture("sim"))


@torch.no_grad()
def test_collected_while_another_runs(collected_where_streams_are_made):
    """A pool can be collected, and return its streams, while another pool's lane takes a stream."""
    collected_where_streams_are_made.set()
    left = pool_on("sim:0")
    send_ones(left, "sim:0").result(PATIENCE_S)
    del left
    other = LanePool([torch.device("sim:1")])
    assert send_ones(other, "sim:1").result(PATIENCE_S).item() == 1
    other.close()


@torch.no_grad()
def test_collected_in_its_own_lane(collected_where_streams_are_made):
    """A pool without references can be collected in its own lane's thread. The lane still finishes its task."""
    pool = pool_on("sim:0")
    future = send_ones(pool, "sim:0")
    del pool
    collected_where_streams_are_made.set()
    assert future.result(PATIENCE_S).item() == 1


@pytest.mark.parametrize("device", ["sim:0", "sim:1"])
def test_order_of_tasks_in_a_lane(device):
    """A task with gradients uses the caller's stream, and the next one without the lane's own: they run in order."""

    class Average(nn.Linear):
        def __init__(self):
            super().__init__(5, 5, dtype=torch.float64)
            self.register_buffer("mean", torch.zeros(5, dtype=torch.float64))

        def forward(self, x):
            output = super().forward(x) - self.mean
            self.mean.mul_(0.5).add_(x.mean(0), alpha=0.5)
            return output

    model = Average().to("sim:0")
    plain = copy.deepcopy(model)
    x = rows(7).to("sim:0")
    expected = [plain(x), plain(x)]
    settle()
    with parallel(model, [device]) as p:
        futures = [p.submit(x)]
        with torch.no_grad():
            futures.append(p.submit(x))
        torch.testing.assert_close([future.result() for future in futures], expected)


def test_lanes_do_not_run_far_ahead(monkeypatch):
    """A lane starts a submitted call only when the device has finished the call before the previous one."""
    waited = []

    class RecordingEvent:
        def __init__(self, inner):
            self.query = inner.query
            self.inner = inner

        def synchronize(self):
            waited.append(threading.current_thread().name)
            self.inner.synchronize()

    run_staged = lane_streams.LaneStreams.run_staged

    def record_waits(self, *given):
        value, reached = run_staged(self, *given)
        self._ahead[-1] = [(device, RecordingEvent(event)) for device, event in reached]
        return value, reached

    monkeypatch.setattr(lane_streams.LaneStreams, "run_staged", record_waits)
    with torch.no_grad(), parallel(mlp().to("sim:0"), ["sim:1"]) as p:
        for future in [p.submit(rows()) for _ in range(6)]:
            future.result()
    assert len(waited) >= 4
    assert set(waited) == {"parawrap-lane 0 on sim:1"}
