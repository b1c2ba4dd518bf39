"""The double of NeuronCores: what it refuses, and what it counts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parawrap import DeviceUnavailableError
from parawrap.neuroncores import CoreStats
from tests.helpers.neuron_doubles import counts

A = torch.arange(6.0).view(2, 3)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        return x + self.calls


def linear():
    torch.manual_seed(0)
    return nn.Linear(3, 2).eval()


def test_no_state_between_inferences(host):
    """A trace leaves the model as it was, and its weights become constants."""
    counting = Counting()
    placed = host.place(host.trace(counting, A), 0, 1)
    assert [placed(A).tolist() for _ in range(2)] == [(A + 1).tolist()] * 2
    assert counting.calls == 0
    model = linear()
    compiled, expected = host.trace(model, A), model(A)
    with torch.no_grad():
        model.weight.zero_()
    assert torch.equal(compiled(A), expected)
    assert model.weight.requires_grad


@pytest.mark.parametrize(
    ("function", "example", "says"),
    [
        (torch.neg, (), "the example has no tensors"),
        (torch.add, (A, {"mask": None}), r'the example has a NoneType at args\[1\]\["mask"\]'),
        (torch.neg, torch.zeros(2, device="meta"), r"the example has a tensor on meta at args\[0\]"),
        (lambda x: (x, None), A, r"the model returns a NoneType at output\[1\]"),
        (lambda x: (), A, "the model returns no tensors"),
        (lambda x: {"a": x, "b": (x, x)}, A, "one of the containers dict, tuple. .* dicts with values of one type"),
    ],
    ids=["empty", "None", "device", "output", "no output", "mixed dict"],
)
def test_models_that_cannot_be_compiled(host, function, example, says):
    with pytest.raises(TypeError, match=says):
        host.trace(function, example)


def test_placed_model_takes_turns(host):
    """Each placed model counts its own turns. A core is free when the last reference goes."""
    compiled = host.trace(linear(), A)
    placed, other = host.place(compiled, 1, 3), host.place(compiled, 2, 2)
    for _ in range(4):
        placed(A)
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
