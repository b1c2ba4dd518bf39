"""Device backends: count devices, make one current in a thread, and parse the `devices` argument.

This package handles torch's device types. It has no code for modules, calls, or processes. ``_backend.py`` defines the
interface. ``_backend_registry.py`` maps each kind of device to a module, which it imports on first use.
"""

from parawrap.backends._backend import Backend, Stream, Traits
from parawrap.backends._backend_registry import backend_of, best_backend, register_backend
from parawrap.backends._neuron_devices import neuron_is_device
from parawrap.backends._resolve_devices import DeviceLike, Devices, names_cores, resolve_device, resolve_devices
from parawrap.backends._transfer import bring, bring_into, device_of, record_use
from parawrap.backends._warnings import ignore_speed_warnings, warn_caller

__all__ = [
    "Backend",
    "DeviceLike",
    "Devices",
    "Stream",
    "Traits",
    "backend_of",
    "best_backend",
    "bring",
    "bring_into",
    "device_of",
    "ignore_speed_warnings",
    "names_cores",
    "neuron_is_device",
    "record_use",
    "register_backend",
    "resolve_device",
    "resolve_devices",
    "warn_caller",
]
