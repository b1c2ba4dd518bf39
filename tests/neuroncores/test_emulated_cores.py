"""The double of NeuronCores: refusals, and counts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parawrap import DeviceUnavailableError
from parawrap.neuroncores import CoreStats
from parawrap.testing import NeuronHost
from tests.helpers.neuron_doubles import counts

A = torch.arange(6.0).view(2, 3)


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x + self.calls


def linear():
    torch.manual_seed(0)
    return nn.Linear(3, 2).eval()


@pytest.mark.parametrize(
    ("function", "example", "says"),
    [
        (torch.neg, (), "the example has no tensors"),
        (torch.neg, torch.zeros(2, device="meta"), "the example has a tensor on meta"),
        (lambda x: (x, None), A, "the model returns NoneType"),
        (lambda x: (), A, "the model returns no tensors"),
    ],
    ids=["empty", "device", "output", "no output"],
)
def test_models_that_cannot_be_compiled(host, function, example, says):
    with pytest.raises(TypeError, match=says):
        host.trace(function, example)


def test_inferences_start_from_the_traced_buffers(host):
    """Neither the trace nor an inference changes the buffers of the model, and no inference sees another one."""
    counter = Counter()
    compiled = host.trace(counter, A)
    for _ in range(2):
        assert torch.equal(compiled(A), A + 1)
    assert counter.calls == 0


def test_values_out_of_range():
    for name, value in (("cores", 0), ("latency_s", -0.1)):
        with pytest.raises(ValueError, match=f"{name}={value}"):
            NeuronHost(**{name: value})


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
