"""NeuronCores: runtimes of the vendor, a double for machines without cores, and the pool that feeds cores.

These NeuronCores are not torch devices: a model compiled for a core takes and returns tensors on the CPU. A vendor's
package is imported when a runtime is first needed. The newer torch_neuronx, with torch devices, uses
``backends/accelerator_backend.py``.
"""

from parawrap.neuroncores._choose_runtime import runtime, using
from parawrap.neuroncores._example_call import quiet_about_torchscript
from parawrap.neuroncores._neuron_cores import (
    EMULATED_CORES,
    NeuronCore,
    count_listed_cores,
    read_core_numbers,
    resolve_cores,
)
from parawrap.neuroncores._neuron_host import CoreStats, NeuronHost, neuron_host
from parawrap.neuroncores._neuron_pool import LANES_PER_CORE, open_session
from parawrap.neuroncores._placed_model import Batching, PlacedModel, place
from parawrap.neuroncores._runtime import NeuronRuntime
from parawrap.neuroncores._signature import Signature, TensorSpec

__all__ = [
    "EMULATED_CORES",
    "LANES_PER_CORE",
    "Batching",
    "CoreStats",
    "NeuronCore",
    "NeuronHost",
    "NeuronRuntime",
    "PlacedModel",
    "Signature",
    "TensorSpec",
    "count_listed_cores",
    "neuron_host",
    "open_session",
    "place",
    "quiet_about_torchscript",
    "read_core_numbers",
    "resolve_cores",
    "runtime",
    "using",
]
