"""What tracing leaves as it was: the process's warnings, and the user's module."""

from __future__ import annotations

import io
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from parawrap import neuron


def test_threads_that_trace_leave_the_filters_of_warnings_as_they_were(host):
    """The filters are the process's: two threads must not restore each other's."""
    before, ready = list(warnings.filters), threading.Barrier(4)

    def trace(_):
        ready.wait(30)
        for _ in range(5):
            neuron.trace(nn.Linear(3, 2), torch.zeros(1, 3))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(trace, range(4)))
    assert warnings.filters == before


def test_a_saved_model_is_loaded_without_a_word_of_deprecations(host):
    """torch.jit is deprecated, and no user of NeuronCores can do anything about that."""
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        neuron.save(neuron.trace(nn.ReLU(), torch.zeros(1, 3)), file)
        model = neuron.load(io.BytesIO(file.getvalue()))
    assert torch.equal(model(-torch.ones(1, 3)), torch.zeros(1, 3))
