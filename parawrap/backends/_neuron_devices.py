"""Tell the two generations of torch_neuronx apart. They share one package name, and offer different names in it.

The newer generation (trn2, trn3) registers a torch device of kind "neuron", which the accelerator backend uses. The older
generation (inf2, trn1, trn2) builds on torch_xla and offers ``trace``. `parawrap.neuroncores` uses its compiled models.
"""

from __future__ import annotations

import os
from typing import Any

from parawrap.backends._backend_registry import is_torch_device

overriding_runtimes: list[Any] = []
"""The NeuronCore runtimes of active blocks, for tests and emulated cores; the last one is in effect."""


def neuron_is_device() -> bool:
    """True if "neuron" names torch devices; False if it names the cores of compiled models.

    Emulated cores take precedence, because PARAWRAP_NEURON_RUNTIME=host and `parawrap.testing.neuron_host` ask for them.
    """
    return is_torch_device("neuron") and not emulates_cores()


def neuron_runtime_name() -> str:
    """Return the value of PARAWRAP_NEURON_RUNTIME, empty if it is not set."""
    return os.environ.get("PARAWRAP_NEURON_RUNTIME", "").strip()


def emulates_cores() -> bool:
    """True if PARAWRAP_NEURON_RUNTIME=host or a block of `parawrap.testing.neuron_host` selects emulated NeuronCores."""
    return bool(overriding_runtimes) or neuron_runtime_name() == "host"
