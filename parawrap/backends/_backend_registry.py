"""Map each kind of device to its backend."""

from __future__ import annotations

from types import ModuleType

import torch

from parawrap.backends._backend import Backend, CpuBackend, MpsBackend
from parawrap.errors import DeviceUnavailableError

CORE_KINDS = ("nc", "neuron")
"""The names of NeuronCores. "neuron" is also a torch device if torch_neuronx registers one."""

_backends: dict[str, Backend] = {
    "cpu": CpuBackend("cpu"),
    "cuda": Backend("cuda"),
    "mps": MpsBackend("mps"),
}


def torch_kind(name: str) -> str:
    """Return torch's name for a kind of device. Blocks and launches both use this rule.

    Case does not matter; "gpu" is another name for "cuda", also on AMD GPUs.
    """
    lowered = name.lower()
    return "cuda" if lowered == "gpu" else lowered


def backend_of(kind: str) -> Backend:
    """Return the backend of a kind, such as "cpu". It may be any kind that torch knows.

    Raises:
        DeviceUnavailableError: If neither parawrap nor torch knows the kind, or if it names
            NeuronCores that are not torch devices.
    """
    # First as it is given: calls of models look up torch's own names, and this is faster
    backend = _backends.get(kind)
    if backend is not None:
        return backend
    name = torch_kind(kind)
    if name in _backends:
        return _backends[name]
    if is_torch_device(name):
        # In one step: two threads that make one at the same time get the same one
        return _backends.setdefault(name, Backend(name))
    msg = (
        f"{kind!r} is not a kind of device that parawrap or this release of torch knows. Known "
        "kinds: cpu, cuda, mps"
    )
    if name in CORE_KINDS:
        msg = (
            f"{kind!r} names NeuronCores, which are not torch devices in this process. Compile "
            "the model with parawrap.neuron.trace, then pass the cores to parallel(model, "
            "['nc:0', 'nc:1']) or to neuron.DataParallel"
        )
    raise DeviceUnavailableError(msg)


def best_backend() -> Backend:
    """Return the backend of the accelerator that torch sees, or of the CPU if torch sees none."""
    # `current_accelerator` also names an accelerator that torch is built for, without a device here
    if not torch.accelerator.is_available():
        return backend_of("cpu")
    accelerator = torch.accelerator.current_accelerator()
    return backend_of("cpu" if accelerator is None else accelerator.type)


def is_torch_device(kind: str) -> bool:
    """True if torch has a device module for this kind that can count its devices."""
    if kind == "xla":  # torch_xla delays operators: a lane could run the operators of another lane
        return False
    try:
        # `torch.device` refuses an index if the kind has one already, such as "cuda:0"
        module: ModuleType = torch.get_device_module(torch.device(kind, 0))
    except RuntimeError:
        return False
    return hasattr(module, "device_count")
