"""Tracing leaves the warning filters of the process and the user's module unchanged."""

from __future__ import annotations

import io
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from parawrap import neuron


def test_concurrent_traces_leave_the_warning_filters_unchanged(host):
    """Warning filters are per process, so two threads must not restore each other's."""
    before, ready = list(warnings.filters), threading.Barrier(4)

    def trace(_):
        ready.wait(30)
        for _ in range(5):
            neuron.trace(nn.Linear(3, 2), torch.zeros(1, 3))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(trace, range(4)))
    assert warnings.filters == before


def test_saving_and_loading_hide_the_torchscript_deprecation(host):
    """torch.jit is deprecated, but users of NeuronCores cannot avoid it."""
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        neuron.save(neuron.trace(nn.ReLU(), torch.zeros(1, 3)), file)
        model = neuron.load(io.BytesIO(file.getvalue()))
    assert torch.equal(model(-torch.ones(1, 3)), torch.zeros(1, 3))
