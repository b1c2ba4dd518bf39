"""Device backends: count devices, make one current in a thread, and parse the `devices` argument.

This package handles torch's device types. It has no code for modules, calls, or processes.
``_backend_registry.py`` maps each kind of device to its backend.
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
