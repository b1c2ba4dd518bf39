"""The kinds of device that a rank may run on, and how many of each this machine shows.

Counting does not start CUDA in the calling process.
"""

from __future__ import annotations

import enum
import os
from pathlib import Path

import torch

from parawrap.backends.cpu import usable_cores
from parawrap.errors import DeviceListError, PlatformError

__all__ = ["Device", "core_of", "rank_device", "visible"]


class Device(enum.StrEnum):
    """The kind of device that each rank gets one of; also equal to its lower-case name.

    ``AUTO`` stands for the best kind that this machine shows. ``SLURM`` and ``RAY`` name launchers: a ``Platform`` takes
    them where a device is asked for and turns them into ``launcher=`` at once.

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
        """Return the kind with this name, in any case; ``cuda`` is ``gpu``.

        Raises:
            ValueError: If there is no such kind.

        >>> Device.from_str("cuda")
        <Device.GPU: 'gpu'>
        """
        lowered = name.lower()
        return cls("gpu" if lowered == "cuda" else lowered)


def visible(kind: Device) -> int:
    """Return how many devices of this kind a new process would see."""
    if kind is Device.GPU:
        return torch.cuda.device_count()
    if kind is Device.MPS:
        return int(torch.backends.mps.is_available())
    if kind is Device.NEURON:
        return len(_neuron_cores())
    return usable_cores()


def rank_device(kind: Device, local_rank: int) -> torch.device:
    """Return the device of a rank's tensors. A rank on a NeuronCore keeps them on the host."""
    if kind is Device.GPU:
        return torch.device("cuda", local_rank)
    return torch.device("mps" if kind is Device.MPS else "cpu")


def core_of(local_rank: int) -> str:
    """Return NEURON_RT_VISIBLE_CORES for the process with this local rank.

    Raises:
        PlatformError: If this machine has fewer cores than ranks.
    """
    found = _neuron_cores()
    if local_rank >= len(found):
        msg = f"n_gpus: this node shows {len(found)} NeuronCore(s), and local rank {local_rank} needs one: give fewer"
        raise PlatformError(msg)
    return str(found[local_rank])


def _neuron_cores() -> list[int]:
    """Return the NeuronCores that this process may use; none without a Neuron device.

    With PARAWRAP_NEURON_RUNTIME=host they are emulated, and 2 unless the environment says otherwise.
    """
    emulated = os.environ.get("PARAWRAP_NEURON_RUNTIME", "").strip() == "host"
    if not emulated and not any(Path("/dev").glob("neuron*")):
        return []
    from parawrap.backends.neuron import core_numbers_given, cores_listed  # loaded only where NeuronCores are used

    try:
        given = core_numbers_given()
    except DeviceListError as error:
        raise PlatformError(str(error)) from error
    return list(range(2 if emulated else cores_listed())) if given is None else given
