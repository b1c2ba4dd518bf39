"""The interface that each kind of device implements."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch
from torch import Stream

from parawrap.errors import DeviceUnavailableError


class Backend(ABC):
    """One kind of device. Stateless and thread-safe; one instance lives as long as the process."""

    type: str
    """torch's name for the kind, as in ``torch.device(type)``."""

    takes_pageable_at_once: bool = False
    """True if a non-blocking copy from pageable memory has finished reading it when the copy returns."""

    @abstractmethod
    def count(self) -> int:
        """Return the number of devices of this kind that the process sees; 0 if the kind is not usable here."""

    @abstractmethod
    def device(self, index: int | None) -> torch.device:
        """Return the device with that index, or the current device if `index` is None.

        Raises:
            DeviceUnavailableError: If the process does not see that device.
        """

    def every_device(self) -> tuple[torch.device, ...]:
        """Return one device per lane for a kind without a number, as in ``devices="cuda"``."""
        return tuple(self.device(index) for index in range(self.count()))

    def first(self, lanes: int) -> tuple[torch.device, ...]:
        """Return one device per lane for a number of lanes, as in ``devices=2``."""
        return tuple(self.device(index) for index in range(lanes))

    def stream(self, device: torch.device) -> Stream | None:
        """Return the stream on which the calling thread queues work; None if the kind has no streams."""
        return None

    def new_stream(self, device: torch.device) -> Stream | None:
        """Return a new stream, which runs in parallel with the current one; None if the kind has no streams."""
        return None

    def is_capturing(self) -> bool:
        """True if the calling thread records its work into a graph. Other threads cannot add to that graph."""
        return False

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a CPU tensor in pinned memory, or the tensor itself if the kind has none."""
        return tensor

    def activate(self, device: torch.device, stream: Stream | None) -> AbstractContextManager[object]:
        """Make `device` the thread's current device, and `stream` its current stream, inside the block."""
        return contextlib.nullcontext()

    def fork_rng(self, devices: Iterable[torch.device]) -> AbstractContextManager[None]:
        """Restore the random state of the CPU and of `devices` at the end of the block."""
        return torch.random.fork_rng(())

    def rng_state(self, device: torch.device) -> torch.Tensor | None:
        """Return the state of the device's own random generator; None if the kind does not offer it."""
        return None

    def intra_op_threads(self, lanes: int) -> int | None:
        """Return the number of CPU threads per operator for this number of lanes; None means no limit."""
        return None


def not_there(kind: str, index: int | None, count: int) -> DeviceUnavailableError:
    """Return the error for a device that this process does not see. It lists the devices that the process sees."""
    named = kind if index is None else f"{kind}:{index}"
    several = f"{kind}:0 to {kind}:{count - 1}" if count > 1 else f"only {kind}:0"
    seen = f"this process sees {several}" if count else f"this process sees no {kind} device"
    return DeviceUnavailableError(
        f'device {named!r} is not available: {seen}. device="auto" selects a device that this machine has'
    )
