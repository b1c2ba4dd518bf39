"""NeuronCores: the vendor's runtimes, a double, and the session that feeds cores.

These NeuronCores are not torch devices: a model compiled for a core takes and returns tensors on
the CPU. A vendor's package is imported when a runtime is first needed. The newer torch_neuronx,
with torch devices, uses ``backends/_backend.py``.
"""

from parawrap.neuroncores._choose_runtime import neuron_host, runtime, using
from parawrap.neuroncores._core_session import LANES_PER_CORE, CoreSession, Placement
from parawrap.neuroncores._emulated_cores import CoreStats, NeuronHost
from parawrap.neuroncores._neuron_cores import NeuronCore, resolve_cores
from parawrap.neuroncores._runtime import NeuronRuntime, quiet_about_torchscript

__all__ = [
    "LANES_PER_CORE",
    "CoreSession",
    "CoreStats",
    "NeuronCore",
    "NeuronHost",
    "NeuronRuntime",
    "Placement",
    "neuron_host",
    "quiet_about_torchscript",
    "resolve_cores",
    "runtime",
    "using",
]
