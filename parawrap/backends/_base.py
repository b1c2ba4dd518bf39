"""The contract: what the rooms above may ask of a kind of device."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch

__all__ = ["Backend", "Stream", "Traits"]


class Traits(NamedTuple):
    """What decides whether devices are a match for each other: memory in bytes, and the count of cores."""

    memory: int
    cores: int


class Stream(Protocol):
    """A queue of work on one device: torch.cuda.Stream, torch.xpu.Stream, torch.Stream."""

    def record_event(self) -> Any: ...
    def wait_event(self, event: Any) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def synchronize(self) -> None: ...


class Backend(ABC):
    """One kind of device. Stateless and safe to share between threads; one instance lives as long as the process."""

    type: str
    """torch's name of the kind, as in ``torch.device(type)``."""

    compiles_each_shape: bool = False
    """Whether a call of a new shape costs a compilation."""

    takes_pageable_at_once: bool = False
    """Whether a copy from pageable memory has read it when it returns, however early that is."""

    @abstractmethod
    def count(self) -> int:
        """How many devices of this kind the process sees; 0 when the kind is not usable here."""

    @abstractmethod
    def device(self, index: int | None) -> torch.device:
        """The device with that index (None: the current one); DeviceUnavailableError when there is none."""

    def every_device(self) -> tuple[torch.device, ...]:
        """One entry a lane when a user names the kind alone, as in ``devices="cuda"``."""
        return tuple(self.device(index) for index in range(self.count()))

    def first(self, lanes: int) -> tuple[torch.device, ...]:
        """The devices for that many lanes, when a user gives a number."""
        return tuple(self.device(index) for index in range(lanes))

    def stream(self, device: torch.device) -> Stream | None:
        """The stream that the calling thread is queueing work on; None when the kind has no streams."""
        return None

    def new_stream(self, device: torch.device) -> Stream | None:
        """Another stream, which runs beside the current one; None when the kind has no streams."""
        return None

    def is_capturing(self) -> bool:
        """Whether what the calling thread queues is recorded, not run: a graph that other threads cannot add to."""
        return False

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """The host's tensor in memory that the devices read by themselves; as it is, where there is no such memory."""
        return tensor

    def activate(self, device: torch.device, stream: Stream | None) -> AbstractContextManager[object]:
        """Make `device` the thread's current one, and queue its work on `stream`, inside the block."""
        return contextlib.nullcontext()

    def flush(self, value: object) -> None:
        """Have the devices begin to compute the tensors in `value`, where the kind waits to be told."""
        return

    def forked_rng(self, devices: Iterable[torch.device]) -> AbstractContextManager[None]:
        """What is drawn at random inside the block, on the CPU and on these devices, is drawn again after it."""
        return torch.random.fork_rng(())

    def rng_state(self, device: torch.device) -> torch.Tensor | None:
        """The state of the device's own random generator; None if the kind does not offer it."""
        return None

    def intra_op_threads(self, lanes: int) -> int | None:
        """How many of the CPU's threads an operator may use in each of so many lanes; None when that is not limited."""
        return None

    def traits(self, device: torch.device) -> Traits | None:
        """Memory and cores, for the warning about unequal devices; None when the kind does not tell."""
        return None
