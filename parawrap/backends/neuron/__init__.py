"""NeuronCores: list the cores of this process, and choose the runtime that loads compiled models onto them.

This package handles runtimes and the names of cores. It has no code for calls, batches, or lanes. A vendor package is
imported when a runtime is first needed. These NeuronCores are not torch devices: a model compiled for a core takes tensors
on the CPU and returns tensors on the CPU. The newer torch_neuronx, with torch devices, uses ``accelerator_backend.py``.
"""

from parawrap.backends.neuron._choose_runtime import emulates_cores, runtime, using
from parawrap.backends.neuron._compiled_submodules import copy_around, modules_around
from parawrap.backends.neuron._dynamic_batching import in_chunks
from parawrap.backends.neuron._neuron_cores import NeuronCore, core_numbers_given, cores_given, resolve_cores
from parawrap.backends.neuron._neuron_ls import cores_listed
from parawrap.backends.neuron._runtime import (
    NeuronRuntime,
    Signature,
    TensorSpec,
    consecutive,
    no_dynamic_batching,
    not_traced,
)
from parawrap.backends.neuron._tracing import ExampleCall, buffers_kept, parameters_of, quiet_about_torchscript

__all__ = [
    "ExampleCall",
    "NeuronCore",
    "NeuronRuntime",
    "Signature",
    "TensorSpec",
    "buffers_kept",
    "consecutive",
    "copy_around",
    "core_numbers_given",
    "cores_given",
    "cores_listed",
    "emulates_cores",
    "in_chunks",
    "modules_around",
    "no_dynamic_batching",
    "not_traced",
    "parameters_of",
    "quiet_about_torchscript",
    "resolve_cores",
    "runtime",
    "using",
]
