"""The kinds of device that a rank may run on, and the number of visible devices of each kind.

Counting does not initialize CUDA in the calling process.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from parawrap.backends import (
    EMULATED_CORES,
    backend_of,
    count_listed_cores,
    emulates_cores,
    neuron_is_device,
    read_core_numbers,
    torch_kind,
)
from parawrap.backends.cores import usable_cores
from parawrap.errors import PlatformError

_VISIBLE_CORES = "NEURON_RT_VISIBLE_CORES"


class Device(enum.StrEnum):
    """A kind of device. Members equal their lower-case names.

    ``AUTO`` selects the first of GPU, MPS, and CPU that this machine has. ``SLURM`` and ``RAY``
    name launchers: `Platform` accepts them as ``device=`` and sets ``launcher=`` instead.

    >>> Device("cpu") is Device.CPU, Device.CPU == "cpu", Device.from_str("GPU")
    (True, True, <Device.GPU: 'gpu'>)
    """

    AUTO = "auto"
    CPU = "cpu"
    GPU = "gpu"
    MPS = "mps"
    NEURON = "neuron"
    SLURM = "slurm"
    RAY = "ray"

    @classmethod
    def from_str(cls, name: str) -> Device:
        """Return the kind with this name. Case does not matter; ``cuda`` and ``gpu`` mean the same.

        Raises:
            ValueError: If `name` is not a known kind.

        >>> Device.from_str("cuda")
        <Device.GPU: 'gpu'>
        """
        kind = torch_kind(name)
        return cls("gpu" if kind == "cuda" else kind)


def count_visible(kind: str) -> int:
    """Return the number of devices of this kind that a new process would see."""
    if kind == Device.GPU:
        return torch.cuda.device_count()
    if kind == Device.MPS:
        return int(torch.backends.mps.is_available())
    if kind == Device.NEURON:
        return backend_of("neuron").count() if neuron_is_device() else len(_neuron_cores())
    return usable_cores()


def rank_device(kind: str, index: int) -> torch.device:
    """Return the device with that index for a rank's tensors.

    It is the CPU on NeuronCores that are not torch devices.
    """
    if kind == Device.GPU:
        return torch.device("cuda", index)
    if kind == Device.NEURON and neuron_is_device():
        return torch.device("neuron", index)
    return torch.device("mps" if kind == Device.MPS else "cpu")


def variables_for(
    kind: str, numbers: Sequence[int], environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the variables with which a new process sees only these devices of this process.

    The process numbers them from 0. Such a variable may limit this process already: then `numbers`
    count the devices that it lists. Empty for devices that no variable selects.

    Raises:
        PlatformError: If the variable lists fewer devices than when the platform was made.

    >>> variables_for(Device.GPU, [2, 3], {})
    {'CUDA_VISIBLE_DEVICES': '2,3'}
    >>> variables_for(Device.GPU, [2, 3], {"CUDA_VISIBLE_DEVICES": "4,5,6,7"})
    {'CUDA_VISIBLE_DEVICES': '6,7'}
    """
    if kind == Device.GPU:
        name = "CUDA_VISIBLE_DEVICES"
        # ROCm reads both variables, and prefers its own one
        if torch.version.hip is not None and "HIP_VISIBLE_DEVICES" in environ:
            name = "HIP_VISIBLE_DEVICES"
        # Numbers, or the UUIDs of GPUs and of their MIG parts
        listed = [each.strip() for each in environ.get(name, "").split(",") if each.strip()]
        if not listed:  # all devices are visible, under their own numbers
            listed = [str(number) for number in range(max(numbers) + 1)]
    elif selects_cores(kind):
        name = _VISIBLE_CORES
        listed = [str(core) for core in _neuron_cores()]
    else:
        return {}
    if max(numbers) >= len(listed):
        msg = (
            f"device_ids: device {max(numbers)} was visible when the platform was made, but {name} "
            f"lists only {', '.join(listed)} now. Set the variable before you make the platform"
        )
        raise PlatformError(msg)
    return {name: ",".join(listed[number] for number in numbers)}


def is_chosen_by_variable(kind: str) -> bool:
    """True if `variables_for` selects devices of this kind."""
    return kind == Device.GPU or selects_cores(kind)


def selects_cores(kind: str) -> bool:
    """True for NeuronCores that are not torch devices: a variable gives each process its cores."""
    return kind == Device.NEURON and not neuron_is_device()


def make_current(device: torch.device) -> None:
    """Make this the current device of its kind. The CPU and MPS have a single device."""
    if device.type in ("cuda", "neuron"):
        torch.get_device_module(device).set_device(device)


def take_core(local_rank: int) -> None:
    """Let this process see only the NeuronCore of its local rank.

    Raises:
        PlatformError: If this machine has fewer NeuronCores than ranks.
    """
    # The numbers of this machine, which are not 0 to n - 1 if the script was given some of them
    found = _neuron_cores()
    if local_rank >= len(found):
        msg = (
            f"n_gpus: local rank {local_rank} has no NeuronCore, as this node has {len(found)}; "
            f"give at most {len(found)}"
        )
        raise PlatformError(msg)
    os.environ[_VISIBLE_CORES] = str(found[local_rank])


def _neuron_cores() -> list[int]:
    """Return the numbers of the NeuronCores that this process may use; empty without a device.

    PARAWRAP_NEURON_RUNTIME=host emulates NeuronCores: 2 by default, or those that the environment
    names.
    """
    emulated = emulates_cores()
    if not emulated and not any(Path("/dev").glob("neuron*")):
        return []
    given = read_core_numbers()
    if given is not None:
        return given
    return list(range(EMULATED_CORES if emulated else count_listed_cores()))
