"""Map each kind of device to its backend. A backend is imported when its kind is first named."""

from __future__ import annotations

import importlib
import threading
from types import ModuleType

import torch

from parawrap.backends._backend import Backend
from parawrap.errors import DeviceUnavailableError

_MODULES = {
    "cpu": "parawrap.backends.cpu_backend",
    "cuda": "parawrap.backends.cuda_backend",
    "mps": "parawrap.backends.mps_backend",
}
CORE_KINDS = ("nc", "neuron")
"""The names of NeuronCores. "neuron" is also a torch device if torch_neuronx registers one."""

_ANY_ACCELERATOR = "parawrap.backends.accelerator_backend"
_loaded: dict[str, Backend] = {}
_loading = threading.Lock()


def torch_kind(name: str) -> str:
    """Return torch's name for a kind of device. Case does not matter; "gpu" is another name for "cuda", also on AMD GPUs.

    Blocks and launches both use this rule.
    """
    lowered = name.lower()
    return "cuda" if lowered == "gpu" else lowered


def backend_of(kind: str) -> Backend:
    """Return the backend of a kind such as "cpu". Kinds that only torch knows get the general accelerator backend.

    The kind may be any name that `torch_kind` accepts.

    Raises:
        DeviceUnavailableError: If neither parawrap nor torch knows the kind, or if it names NeuronCores that are not torch
            devices.
    """
    backend = _loaded.get(kind)
    if backend is not None:
        return backend
    name = torch_kind(kind)
    with _loading:
        if name not in _loaded:
            _loaded[name] = _load(name, kind)
        return _loaded[name]


def best_backend() -> Backend:
    """Return the backend of the accelerator that torch sees, or of the CPU if torch sees none."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None:
        return backend_of(accelerator.type)
    return backend_of("cpu")


def is_torch_device(kind: str) -> bool:
    """True if this process has a device module of torch that can count the devices of this kind."""
    return _device_module(kind) is not None


def not_there(kind: str, index: int | None, count: int, named: str | None = None) -> DeviceUnavailableError:
    """Return the error for a device that this process does not see. It lists the devices that the process sees.

    `named` is the device as the user wrote it, if that is not `kind` and `index`.
    """
    named = named or (kind if index is None else f"{kind}:{index}")
    several = f"{kind}:0 to {kind}:{count - 1}" if count > 1 else f"only {kind}:0"
    seen = f"this process sees {several}" if count else f"this process sees no {kind} device"
    return DeviceUnavailableError(
        f'device {named!r} is not available: {seen}. device="auto" selects {best_backend().type!r} on this machine'
    )


def _load(kind: str, given: str) -> Backend:
    if kind in _MODULES:
        backend = importlib.import_module(_MODULES[kind]).BACKEND
        assert isinstance(backend, Backend)
        return backend
    if not is_torch_device(kind):
        raise DeviceUnavailableError(_cores(given) if kind in CORE_KINDS else _unknown(given))
    accelerator: Backend = importlib.import_module(_ANY_ACCELERATOR).AcceleratorBackend(kind)
    return accelerator


def _device_module(kind: str) -> ModuleType | None:
    """Return torch's device module of this kind; None if there is none, or if it cannot count devices."""
    if kind == "xla":  # torch_xla delays operators: lanes would build, and run, each other's graphs
        return None
    try:
        # With an index: without one, torch can mistake "nn" for a kind of device, because torch.nn is a module.
        module: ModuleType = torch.get_device_module(torch.device(kind, 0))
    except RuntimeError:
        return None
    return module if hasattr(module, "device_count") else None


def _cores(kind: str) -> str:
    return (
        f"{kind!r} names NeuronCores, which are not torch devices in this process. Compile the model with "
        "parawrap.neuron.trace, then pass the cores to parallel(model, ['nc:0', 'nc:1']) or to neuron.DataParallel"
    )


def _unknown(kind: str) -> str:
    known = ", ".join(sorted(_MODULES))
    return f"{kind!r} is not a kind of device that parawrap or this release of torch knows. Known kinds: {known}"
