"""Shared fixture of the NeuronCore tests: emulated cores, which a test must leave empty."""

from __future__ import annotations

import gc

import pytest
import torch

from parawrap.testing import neuron_host


@pytest.fixture
def host():
    """Use four emulated cores in the process. A model that the test places must be freed when it ends."""
    torch.manual_seed(0)
    with neuron_host(cores=4) as host:
        yield host
        gc.collect()
        assert [core.models for core in host.stats()] == [0] * 4
