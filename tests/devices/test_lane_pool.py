"""A pool that is collected without close(), and the order of tasks in one lane."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

from parawrap import parallel
from parawrap.backends import backend_of
from parawrap.lanes import LanePool, Modes
from parawrap.lanes import _lane_streams as lane_streams
from tests.helpers.device_models import rows, settle
from tests.helpers.waiting import PATIENCE_S


@torch.no_grad()
def test_collected_while_another_runs(monkeypatch):
    """A pool can be collected, and return its streams, while another pool's lane takes a stream."""
    backend = type(backend_of("sim"))
    make = backend.new_stream

    def collecting(self, device):
        gc.collect()
        return make(self, device)

    monkeypatch.setattr(lane_streams, "_shelf", lane_streams._Shelf())  # a shelf without streams of earlier pools
    monkeypatch.setattr(backend, "new_stream", collecting)
    left, other = (LanePool([torch.device(device)]) for device in ("sim:0", "sim:1"))
    left.itself = left  # so that only the garbage collector can free it
    assert ones_in_a_lane(left).item() == 1
    gc.disable()
    try:
        del left
        assert ones_in_a_lane(other).item() == 1
    finally:
        gc.enable()
        other.close()


def ones_in_a_lane(pool):
    (lane,) = pool.lanes
    return pool.submit(lane, lambda: torch.ones(1, device=lane.device), Modes.capture("sim")).result(PATIENCE_S)


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
