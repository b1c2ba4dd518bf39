"""One kind of device: its devices, their streams, pinned memory, and random state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Stream

from parawrap.backends.cores import share_of_cores, usable_cores
from parawrap.errors import DeviceUnavailableError

# Lanes on the CPU without a number of lanes. More Python threads mostly wait for the interpreter
# lock, so each lane gets several cores instead; a guess that no test has contradicted
_MOST_LANES = 8
# The streams of torch.cpu do nothing, and the functions of torch.mps take no device
_WITHOUT_FEATURES = ("cpu", "mps")


class Backend:
    """One kind of device, with the module that torch registers for it, such as ``torch.cuda``.

    A feature that the module lacks is skipped: a method for it returns None, or does nothing. A
    backend is stateless and thread-safe, and lives as long as the process.

    Attributes:
        type: torch's name for the kind, as in ``torch.device(type)``.
        takes_pageable_at_once: True if a non-blocking copy from pageable memory has finished
            reading it when the copy returns (CUDA Runtime API, "API synchronization behavior").
    """

    def __init__(self, kind: str) -> None:
        self.type = kind
        self.takes_pageable_at_once = kind == "cuda"

    @property
    def module(self) -> Any:
        """The module of torch for this kind; None if it lacks all of these features."""
        return None if self.type in _WITHOUT_FEATURES else torch.get_device_module(self.type)

    def _call(self, name: str, *args: Any) -> Any:
        """Call a function of the device module; return None if the module lacks it."""
        function = getattr(self.module, name, None)
        return None if function is None else function(*args)

    def count(self) -> int:
        """Return the number of devices of this kind that the process sees.

        0 if the kind is not usable here.
        """
        # None if the module has no `is_available`: `device_count` decides. The classes for the CPU
        # and MPS, which have no module, override this method
        if self._call("is_available") is False:
            return 0
        return int(self.module.device_count())

    def device(self, index: int | None) -> torch.device:
        """Return the device with that index, or the current device if `index` is None.

        Raises:
            DeviceUnavailableError: If the process does not see that device.
        """
        count = self.count()
        if index is None and count:
            index = int(self._call("current_device") or 0)  # 0 if the module does not say
        if index is None or not 0 <= index < count:
            raise _not_there(self.type, index, count)
        return torch.device(self.type, index)

    def every_device(self) -> tuple[torch.device, ...]:
        """Return one device per lane for a kind without a number, as in ``devices="cuda"``."""
        return self.first(self.count())

    def first(self, lanes: int) -> tuple[torch.device, ...]:
        """Return one device per lane for a number of lanes, as in ``devices=2``."""
        return tuple(self.device(index) for index in range(lanes))

    def stream(self, device: torch.device) -> Stream | None:
        """Return the stream on which the calling thread queues work.

        None if the kind has no streams.
        """
        stream: Stream | None = self._call("current_stream", device)
        return stream

    def new_stream(self, device: torch.device) -> Stream | None:
        """Return a new stream, which runs in parallel with the current one.

        None if the kind has no streams.
        """
        stream: Stream | None = self._call("Stream", device)
        return stream

    def is_capturing(self) -> bool:
        """True if the calling thread records its work into a graph.

        Other threads cannot add to that graph.
        """
        return bool(self._call("is_current_stream_capturing"))

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a CPU tensor in pinned memory.

        The tensor itself if the kind has none.
        """
        if self.module is None:
            return tensor
        try:
            # Not `Tensor.pin_memory`, which keeps the gaps of a strided view. torch would then make
            # a dense copy in pageable memory
            return torch.empty_like(tensor, pin_memory=True).copy_(tensor)
        # The kind has no pinned memory, or the system's limit is reached
        except (RuntimeError, NotImplementedError):
            return tensor

    @contextlib.contextmanager
    def activate(self, device: torch.device, stream: Stream | None) -> Iterator[None]:
        """Make a device and a stream the current ones of the thread inside the block."""
        with self._call("device", device) or contextlib.nullcontext():
            if stream is None:
                yield
                return
            # Inside the block of the device: the context of a stream reads the current device
            with self.module.stream(stream):
                yield

    def fork_rng(self, devices: Iterable[torch.device]) -> AbstractContextManager[None]:
        """Restore the random state of the CPU and of `devices` at the end of the block."""
        if self.module is None:
            return torch.random.fork_rng(())
        indices = sorted({device.index for device in devices})
        return torch.random.fork_rng(indices, device_type=self.type)

    def rng_state(self, device: torch.device) -> torch.Tensor | None:
        """Return the state of the device's own random generator.

        None if the kind does not offer it.
        """
        state: torch.Tensor | None = self._call("get_rng_state", device)
        return state

    def intra_op_threads(self, lanes: int) -> int:
        """Return the number of CPU threads per operator for this number of lanes.

        Lanes of accelerators share the cores too: they copy into pinned memory at the same time.
        """
        return share_of_cores(lanes)


class CpuBackend(Backend):
    """One device, "cpu". "cpu:1" is refused: torch accepts it, and then copies at every ``.to``."""

    def count(self) -> int:
        return 1

    def device(self, index: int | None) -> torch.device:
        if index not in (None, 0):
            msg = (
                f"device 'cpu:{index}' is not available: the CPU is one device, 'cpu'. "
                'For several lanes on it, repeat the name, as in ["cpu", "cpu"], or pass a number, '
                "as in devices=2"
            )
            raise DeviceUnavailableError(msg)
        return torch.device("cpu")

    def every_device(self) -> tuple[torch.device, ...]:
        return self.first(min(usable_cores(), _MOST_LANES))

    def first(self, lanes: int) -> tuple[torch.device, ...]:
        return (torch.device("cpu"),) * lanes


class MpsBackend(Backend):
    """The GPU of an Apple machine, which torch reports as ``mps:0``.

    Several lanes on it share one command queue.
    """

    def count(self) -> int:
        return int(torch.backends.mps.is_available())


def _not_there(kind: str, index: int | None, count: int) -> DeviceUnavailableError:
    """Return the error for a device that this process does not see, with the devices it sees."""
    name = kind if index is None else f"{kind}:{index}"
    seen = f"no {kind} device"
    if count:
        seen = f"{kind}:0 to {kind}:{count - 1}" if count > 1 else f"only {kind}:0"
    return DeviceUnavailableError(
        f'device {name!r} is not available: this process sees {seen}. device="auto" selects a '
        "device that this machine has"
    )
