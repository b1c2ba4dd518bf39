"""What the tests of NeuronCores share: emulated cores, on which a test leaves nothing behind."""

from __future__ import annotations

import gc

import pytest
import torch

from parawrap.testing import neuron_host


@pytest.fixture
def host():
    """Four emulated cores that serve the process; what a test loaded onto them has to be gone with the test."""
    torch.manual_seed(0)
    with neuron_host(cores=4) as host:
        yield host
        gc.collect()
        assert [core.memory_bytes for core in host.stats()] == [0] * 4
