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
    """Return torch's name for a kind of device.

    Case does not matter; "gpu" is another name for "cuda", also on AMD GPUs.

    Blocks and launches both use this rule.
    """
    lowered = name.lower()
    return "cuda" if lowered == "gpu" else lowered


def backend_of(kind: str) -> Backend:
    """Return the backend of a kind such as "cpu". Other kinds that torch knows get one too.

    The kind may be any name that `torch_kind` accepts.

    Raises:
        DeviceUnavailableError: If neither parawrap nor torch knows the kind, or if it names
            NeuronCores that are not torch devices.
    """
    # First as it is given: each call looks up torch's own names
    backend = _backends.get(kind) or _backends.get(torch_kind(kind))
    if backend is not None:
        return backend
    name = torch_kind(kind)
    if is_torch_device(name):
        # In one step: threads that come at the same time share one backend
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
    # `current_accelerator` alone also names one that torch is built for, but has no device of
    if not torch.accelerator.is_available():
        return backend_of("cpu")
    accelerator = torch.accelerator.current_accelerator()
    return backend_of("cpu" if accelerator is None else accelerator.type)


def is_torch_device(kind: str) -> bool:
    """True if this process has a device module of torch that can count the devices of this kind."""
    if kind == "xla":  # torch_xla delays operators: lanes would build, and run, each other's graphs
        return False
    try:
        # With an index, so that a kind with an index of its own, "cuda:0", is refused as well
        module: ModuleType = torch.get_device_module(torch.device(kind, 0))
    except RuntimeError:
        return False
    return hasattr(module, "device_count")
