"""What a DEVICE can do: how many there are, how a thread settles on one, and how a list of devices is read.

Knows torch's device types; refuses to know modules, calls and processes. ``_base.py`` is the contract,
``_registry.py`` maps a name to the module that is imported on first use; every other file is a leaf.
"""

from parawrap.backends._base import Backend, Stream, Traits
from parawrap.backends._registry import backend_of, best_backend, register_backend
from parawrap.backends._resolve import DeviceLike, Devices, names_cores, resolve_device, resolve_devices
from parawrap.backends._streams import bring, bring_into, device_of, record_use
from parawrap.backends._warn import warn_caller

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
    "names_cores",
    "record_use",
    "register_backend",
    "resolve_device",
    "resolve_devices",
    "warn_caller",
]
