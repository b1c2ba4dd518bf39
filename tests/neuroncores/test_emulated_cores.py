"""The double of NeuronCores: refusals, and counts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parawrap import DeviceUnavailableError
from parawrap.neuroncores import CoreStats
from tests.helpers.neuron_doubles import counts

A = torch.arange(6.0).view(2, 3)


def linear():
    torch.manual_seed(0)
    return nn.Linear(3, 2).eval()


def test_placed_model_takes_turns(host):
    """Each placed model counts its own turns, and ignores autocast. A core is free when the last reference goes."""
    compiled = host.trace(linear(), A)
    placed, other, plain = host.place(compiled, 1, 3), host.place(compiled, 2, 2), linear()(A)
    for _ in range(4):
        with torch.autocast("cpu"):
            assert torch.equal(placed(A), plain)
        other(A)
    compiled(A)  # not placed: it uses no core
    assert counts(host, "inferences") == [0, 2, 3, 3]
    assert counts(host, "loads") == [0, 1, 2, 2]
    del placed
    assert [core.models for core in host.stats()] == [0, 0, 1, 1]
    host.reset_stats()
    assert host.stats()[2] == CoreStats(0, 0, 1)
    for start, count in ((0, 0), (-1, 2), (3, 2)):
        with pytest.raises(DeviceUnavailableError, match=f"start={start}, count={count}: this process has 4 cores"):
            host.place(compiled, start, count)
