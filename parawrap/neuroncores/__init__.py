"""NeuronCores: the vendor's runtimes, a double, and the session that feeds cores.

word             | meaning
---------------- | -------------------------------------------------------------------------------
NeuronCore       | a processor of an accelerator by AWS. A process numbers its cores from 0
compiled model   | a ScriptModule that the vendor's `trace` returns. It takes and returns tensors on
                 | the CPU, of the shapes and dtypes of the example inputs
inference        | one call of a compiled model, with the compiled number of rows
dynamic batching | a call of a compiled model takes any number of rows: its runtime cuts them into
                 | inferences, and fills the last one up
placement        | a copy of a model is loaded onto some consecutive cores, and uses them in turn
part             | a compiled model, which may be one of several inside of a target

These NeuronCores are not torch devices. A vendor's package is imported when a runtime is first
needed. The newer torch_neuronx, with torch devices, uses ``backends/_backend.py``. This package
does not know ranks or launches: `launch/_devices.py` gives each rank its core.

file                | contents                                 | tests
------------------- | ---------------------------------------- | -----------------------------------
_choose_runtime.py  | choose the runtime of this process;      | neuroncores/test_choose_runtime.py
                    | `neuron_host`                            |
_core_session.py    | the session of a block on NeuronCores:   | neuroncores/test_core_session.py
                    | two lanes per core                       |
_emulated_cores.py  | `NeuronHost`: a double of the vendor's   | neuroncores/test_runtime.py
                    | runtime, on the CPU                      |
_neuron_cores.py    | names of NeuronCores, and how many this  | neuroncores/test_neuron_cores.py
                    | process has                              |
_runtime.py         | the base class of runtimes; compiled     | neuroncores/test_runtime.py
                    | shapes, example inputs of `trace`        | neuroncores/test_example_call.py
_vendor_runtimes.py | adapters of torch_neuronx and            | neuroncores/test_vendor_runtimes.py
                    | torch_neuron                             |
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
