"""Ranks on NeuronCores: each rank has one core, nc:0."""

from __future__ import annotations

import os

import pytest
import torch

from parawrap import Platform, PlatformError, current_rank, neuron, wrapper


@pytest.fixture(autouse=True)
def _emulated(monkeypatch):
    """Emulate cores in this process and in its child processes."""
    monkeypatch.setenv("PARAWRAP_NEURON_RUNTIME", "host")


@pytest.mark.parametrize(
    ("variable", "value", "cores"),
    [("NEURON_RT_NUM_CORES", "2", ["0", "1"]), ("NEURON_RT_VISIBLE_CORES", "4,6", ["4", "6"])],
)
def test_each_rank_has_its_own_core(monkeypatch, variable, value, cores):
    """A rank gets one core of the process, and its models see only that core."""
    monkeypatch.setenv(variable, value)

    @wrapper(Platform(device="neuron", verbose=False))
    def serve(x):
        net = neuron.DataParallel(neuron.trace(torch.nn.ReLU(), torch.zeros(1, 3)))
        device = str(current_rank().device)
        return os.environ["NEURON_RT_VISIBLE_CORES"], neuron.core_count(), net.device_ids, device, net(x)

    x = torch.randn(4, 3)
    results = list(serve(x))
    assert [result[:4] for result in results] == [(core, 1, [0], "cpu") for core in cores]
    assert all(torch.equal(result[4], x.relu()) for result in results)


def test_more_ranks_than_cores_are_refused(monkeypatch):
    """The platform never starts fewer ranks than the user asked for."""
    monkeypatch.setenv("NEURON_RT_NUM_CORES", "3")
    with pytest.raises(PlatformError, match=r"n_gpus=8: 3 are visible"):
        Platform(device="neuron", n_gpus=8)


def test_a_malformed_list_of_cores_is_an_error(monkeypatch):
    """The error shows the variable and valid values."""
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0-a")
    with pytest.raises(PlatformError, match=r"NEURON_RT_VISIBLE_CORES='0-a'.*'0-6', '3' or '0,2-4'"):
        Platform(device="neuron")
