"""Accelerators: any with a torch device module (``torch.cuda``, ``torch.xpu``, a PrivateUse1 backend, ...), and MPS."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Stream

from parawrap.backends._backend import Backend, not_there
from parawrap.backends.cpu_backend import share_of_cores


class AcceleratorBackend(Backend):
    """Backend on the device module that torch registers for the kind. Features that the module lacks are skipped."""

    def __init__(self, kind: str) -> None:
        self.type = kind

    @property
    def module(self) -> Any:
        return torch.get_device_module(self.type)

    def count(self) -> int:
        is_available = getattr(self.module, "is_available", None)
        return int(self.module.device_count()) if is_available is None or is_available() else 0

    def device(self, index: int | None) -> torch.device:
        count = self.count()
        if index is None and count:
            index = int(self.module.current_device())
        if index is None or not 0 <= index < count:
            raise not_there(self.type, index, count)
        return torch.device(self.type, index)

    def stream(self, device: torch.device) -> Stream | None:
        current_stream = getattr(self.module, "current_stream", None)
        return None if current_stream is None else cast("Stream", current_stream(device))

    def new_stream(self, device: torch.device) -> Stream | None:
        stream = getattr(self.module, "Stream", None)
        return None if stream is None else cast("Stream", stream(device))

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        try:
            # Tensor.pin_memory keeps the gaps of a strided view, and torch then makes a dense copy in pageable memory.
            return torch.empty_like(tensor, pin_memory=True).copy_(tensor)
        except (RuntimeError, NotImplementedError):  # no pinned memory for this kind, or the system's limit is reached
            return tensor

    def is_capturing(self) -> bool:
        capturing = getattr(self.module, "is_current_stream_capturing", None)
        return capturing is not None and bool(capturing())

    def rng_state(self, device: torch.device) -> torch.Tensor | None:
        get = getattr(self.module, "get_rng_state", None)
        return None if get is None else cast("torch.Tensor", get(device))

    def intra_op_threads(self, lanes: int) -> int | None:
        return share_of_cores(lanes)  # all lanes copy into pinned memory at the same time, which uses CPU threads

    @contextlib.contextmanager
    def _on(self, device: torch.device, stream: Stream) -> Iterator[None]:
        with self.module.device(device), self.module.stream(stream):
            yield

    def activate(self, device: torch.device, stream: Stream | None) -> AbstractContextManager[object]:
        if stream is None:
            on: AbstractContextManager[object] = self.module.device(device)
            return on
        return self._on(device, stream)

    def fork_rng(self, devices: Iterable[torch.device]) -> AbstractContextManager[None]:
        return torch.random.fork_rng(sorted({device.index for device in devices}), device_type=self.type)


class CudaBackend(AcceleratorBackend):
    """NVIDIA and, through ROCm, AMD GPUs: ``cuda:0`` to ``cuda:N-1``, numbered as CUDA_VISIBLE_DEVICES lists them."""

    takes_pageable_at_once = True  # CUDA Runtime API, "API synchronization behavior"


class MpsBackend(Backend):
    """The GPU of an Apple machine, which torch reports as ``mps:0``. Several lanes on it share one command queue."""

    type = "mps"

    def count(self) -> int:
        return 1 if torch.backends.mps.is_available() else 0

    def device(self, index: int | None) -> torch.device:
        if self.count() == 0 or index not in (None, 0):
            raise not_there(self.type, index, self.count())
        return torch.device("mps", 0)
