"""The double of NeuronCores: refusals, and counts."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from torch import nn

from parawrap import DeviceUnavailableError
from parawrap.neuroncores import CoreStats
from parawrap.testing import NeuronHost
from tests.helpers.neuron_doubles import counts
from tests.helpers.waiting import PATIENCE_S

A = torch.arange(6.0).view(2, 3)


def linear():
    torch.manual_seed(0)
    return nn.Linear(3, 2).eval()


@pytest.mark.parametrize(
    ("function", "example", "says"),
    [
        (torch.neg, (), "the example has no tensors"),
        (torch.neg, torch.zeros(2, device="meta"), r"the example has a tensor on meta at args\[0\]"),
        (lambda x: (x, None), A, r"the model returns a NoneType at output\[1\]"),
        (lambda x: (), A, "the model returns no tensors"),
        (lambda x: {"a": x, "b": (x, x)}, A, "one of the containers dict, tuple. .* dicts with values of one type"),
    ],
    ids=["empty", "device", "output", "no output", "mixed dict"],
)
def test_models_that_cannot_be_compiled(host, function, example, says):
    with pytest.raises(TypeError, match=says):
        host.trace(function, example)


def test_parts_that_cannot_be_compiled(host):
    norm = nn.BatchNorm1d(3).eval()
    norm.running_var = norm.running_mean
    with pytest.raises(TypeError, match=r"two names of a module hold one buffer.* Give each name a clone\(\)"):
        host.trace(norm, A)
    with pytest.raises(TypeError, match="a part of the model is already compiled for NeuronCores"):
        host.trace(nn.Sequential(host.trace(linear(), A)), A)


@pytest.mark.parametrize("given", [{"cores": 0}, {"latency_s": -0.1}], ids=str)
def test_values_out_of_range(given):
    ((name, value),) = given.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        NeuronHost(**given)


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


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of os.fork in a process with threads
def test_forked_child_finds_cores_free(host):
    """Also a core that a thread of the parent uses during the fork."""
    placed, plain = host.place(host.trace(linear(), A), 0, 1), linear()(A)
    with host._cores()[0]._lock:
        child = os.fork()
        if child == 0:
            try:
                signal.alarm(int(PATIENCE_S))
                os._exit(0 if torch.equal(placed(A), plain) else 3)
            finally:
                os._exit(4)
        assert os.waitpid(child, 0)[1] == 0
