"""Device backends: count devices, make one current in a thread, and parse the `devices` argument.

This package handles torch's device types. It has no code for modules, calls, or processes.

A kind is a word such as "cuda", for all devices of a type. NeuronCores are cores of an AWS
accelerator. An older package of their vendor runs compiled models on them, and torch does not know
the cores as devices.

file                 | contents                                   | tests
-------------------- | ------------------------------------------ | --------------------------------
_backend.py          | one kind of device: count, streams, pinned | devices/test_lane_streams.py
                     | memory, random state, captures             | backends/test_resolve_devices.py
_backend_registry.py | from a kind of device to its backend; the  | backends/test_resolve_devices.py
                     | best kind for "auto"                       |
_neuron_devices.py   | two packages named torch_neuronx, and the  | neuron_devices/test_parallel.py
                     | NeuronCores that variables list            | neuroncores/test_neuron_cores.py
_resolve_devices.py  | the `devices` argument: one torch device   | backends/test_resolve_devices.py
                     | per lane                                   | backends/test_cores.py
_transfer.py         | copies between devices that do not block;  | devices/test_transfer.py
                     | memory kept until streams have read it     | cuda/test_memory.py
_warnings.py         | warnings and tracebacks that point at the  | backends/test_warnings.py
                     | user's line                                | api/parallel/test_errors.py
cores.py             | cores of the CPU that this process may     | backends/test_cores.py
                     | use; the share of each lane                |
"""

from torch import Stream

from parawrap.backends._backend import Backend
from parawrap.backends._backend_registry import (
    CORE_KINDS,
    backend_of,
    best_backend,
    is_torch_device,
    torch_kind,
)
from parawrap.backends._neuron_devices import (
    EMULATED_CORES,
    count_listed_cores,
    emulates_cores,
    neuron_is_device,
    neuron_runtime_name,
    overriding_runtimes,
    read_core_numbers,
)
from parawrap.backends._resolve_devices import (
    DeviceLike,
    Devices,
    names_cores,
    resolve_device,
    resolve_devices,
)
from parawrap.backends._transfer import device_of, record_use, transfer, transfer_into
from parawrap.backends._warnings import (
    drop_own_frames,
    ignore_speed_warnings,
    user_frames,
    warn_caller,
)

__all__ = [
    "CORE_KINDS",
    "EMULATED_CORES",
    "Backend",
    "DeviceLike",
    "Devices",
    "Stream",
    "backend_of",
    "best_backend",
    "count_listed_cores",
    "device_of",
    "drop_own_frames",
    "emulates_cores",
    "ignore_speed_warnings",
    "is_torch_device",
    "names_cores",
    "neuron_is_device",
    "neuron_runtime_name",
    "overriding_runtimes",
    "read_core_numbers",
    "record_use",
    "resolve_device",
    "resolve_devices",
    "torch_kind",
    "transfer",
    "transfer_into",
    "user_frames",
    "warn_caller",
]
