"""What kinds of device a rank may run on, and how many of each this machine shows.

Counting must leave the parent as it was: nothing here starts CUDA in the calling process.
"""

from __future__ import annotations

import enum
import os
from pathlib import Path

import torch

from parawrap.errors import PlatformError

__all__ = ["Device", "core_of", "cores", "rank_device", "visible"]


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
        """The kind with this name, in whatever case; ``cuda`` is ``gpu``.

        Raises:
            ValueError: no such kind.

        >>> Device.from_str("cuda")
        <Device.GPU: 'gpu'>
        """
        lowered = name.lower()
        return cls("gpu" if lowered == "cuda" else lowered)


def visible(kind: Device) -> int:
    """How many devices of this kind a process started now would see; 0 where there are none."""
    if kind is Device.GPU:
        return torch.cuda.device_count()
    if kind is Device.MPS:
        return int(torch.backends.mps.is_available())
    if kind is Device.NEURON:
        return len(_neuron_cores())
    return cores()


def cores() -> int:
    """The CPU cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def rank_device(kind: Device, local_rank: int) -> torch.device:
    """Where a rank puts its tensors. Those of a Neuron rank lie on the host: its one core is all that the process sees."""
    if kind is Device.GPU:
        return torch.device("cuda", local_rank)
    return torch.device("mps" if kind is Device.MPS else "cpu")


def core_of(local_rank: int) -> str:
    """The NEURON_RT_VISIBLE_CORES of the process with this local rank.

    Raises:
        PlatformError: there are fewer cores here than ranks, which cannot be seen from another machine.
    """
    found = _neuron_cores()
    if local_rank >= len(found):
        msg = f"n_gpus: this node shows {len(found)} NeuronCore(s), and local rank {local_rank} wants one: give fewer"
        raise PlatformError(msg)
    return str(found[local_rank])


def _neuron_cores() -> list[int]:
    """The NeuronCores that the environment gives to this process; none where there is no Neuron device.

    With PARAWRAP_NEURON_RUNTIME=host they are emulated, and 2 unless the environment says otherwise.
    """
    emulated = os.environ.get("PARAWRAP_NEURON_RUNTIME", "").strip() == "host"
    if not emulated and not any(Path("/dev").glob("neuron*")):
        return []
    listed = os.environ.get("NEURON_RT_VISIBLE_CORES", "")
    number = os.environ.get("NEURON_RT_NUM_CORES", "2" if emulated else "0")
    try:
        return [core for part in listed.split(",") for core in _span(part)] if listed else list(range(int(number)))
    except ValueError as error:
        msg = (
            f"NEURON_RT_VISIBLE_CORES={listed!r}, NEURON_RT_NUM_CORES={number!r}: {error}; give cores and ranges to the "
            "first, as in '0-6' or '0,2-4', or a number to the second"
        )
        raise PlatformError(msg) from error


def _span(part: str) -> range:
    first, _, last = part.partition("-")
    return range(int(first), int(last or first) + 1)
