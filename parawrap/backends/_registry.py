"""Which module serves which kind of device. A leaf is imported when its kind is first named, never before."""

from __future__ import annotations

import importlib
import threading

import torch

from parawrap.backends._base import Backend
from parawrap.errors import DeviceUnavailableError

__all__ = ["CORE_KINDS", "backend_of", "best_backend", "not_there", "register_backend"]

_MODULES = {
    "cpu": "parawrap.backends.cpu",
    "cuda": "parawrap.backends.cuda",
    "mps": "parawrap.backends.mps",
    "xla": "parawrap.backends.xla",
}
CORE_KINDS = ("nc", "neuron")
"""How NeuronCores are named. They are no devices of torch's, and have no backend here."""

_ANY_ACCELERATOR = "parawrap.backends.accelerator"
_loaded: dict[str, Backend] = {}
_loading = threading.Lock()


def register_backend(kind: str, module: str) -> None:
    """Have `module` (an import path with a ``BACKEND`` in it) serve the devices of that kind."""
    with _loading:
        _MODULES[kind] = module
        _loaded.pop(kind, None)


def backend_of(kind: str) -> Backend:
    """The backend of a kind such as "cpu"; kinds that only torch knows get the general accelerator backend."""
    backend = _loaded.get(kind)
    if backend is not None:
        return backend
    with _loading:
        if kind not in _loaded:
            _loaded[kind] = _load(kind)
        return _loaded[kind]


def best_backend() -> Backend:
    """The accelerator that torch sees here, else the CPU."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None:
        return backend_of(accelerator.type)
    return backend_of("cpu")


def not_there(kind: str, index: int | None, count: int) -> DeviceUnavailableError:
    """The error for a device that this process does not see: it says which it sees."""
    asked = kind if index is None else f"{kind}:{index}"
    seen = f"this process sees {kind}:0 to {kind}:{count - 1}" if count > 1 else f"there is only {kind}:0"
    here = seen if count else f"no {kind} is visible"
    return DeviceUnavailableError(
        f'device {asked!r} is not there: {here}; device="auto" takes the best there is, {best_backend().type!r}'
    )


def _load(kind: str) -> Backend:
    if kind in _MODULES:
        backend = importlib.import_module(_MODULES[kind]).BACKEND
        assert isinstance(backend, Backend)
        return backend
    if kind in CORE_KINDS:
        msg = (
            f"{kind!r}: NeuronCores are no devices of torch's. parallel(model, ['nc:0', 'nc:1']) and neuron.DataParallel "
            "take them, for a model that parawrap.neuron.trace compiled"
        )
        raise DeviceUnavailableError(msg)
    try:
        # Asked with an index: torch.device takes "nn" for a device module otherwise, and so does get_device_module.
        module = torch.get_device_module(torch.device(kind, 0))
    except RuntimeError as error:
        raise DeviceUnavailableError(_unknown(kind)) from error
    if not hasattr(module, "device_count"):
        raise DeviceUnavailableError(_unknown(kind))
    accelerator: Backend = importlib.import_module(_ANY_ACCELERATOR).AcceleratorBackend(kind)
    return accelerator


def _unknown(kind: str) -> str:
    return f"{kind!r} is no kind of device that parawrap or this torch knows; known are {', '.join(sorted(_MODULES))}"
