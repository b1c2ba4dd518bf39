"""Any accelerator with a torch device module (``torch.cuda``, ``torch.xpu``, a PrivateUse1 backend, ...)."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch

from parawrap.backends._base import Backend
from parawrap.backends._registry import not_there

__all__ = ["AcceleratorBackend"]


class AcceleratorBackend(Backend):
    """Asks the device module that torch registers for the kind; what a module does not offer is left out."""

    def __init__(self, kind: str) -> None:
        self.type = kind

    @property
    def module(self) -> Any:
        return torch.get_device_module(self.type)

    def count(self) -> int:
        module = self.module
        return int(module.device_count()) if module.is_available() else 0

    def device(self, index: int | None) -> torch.device:
        count = self.count()
        if index is None and count:
            index = int(self.module.current_device())
        if index is None or not 0 <= index < count:
            raise not_there(self.type, index, count)
        return torch.device(self.type, index)

    def stream(self, device: torch.device) -> object | None:
        current_stream = getattr(self.module, "current_stream", None)
        return current_stream(device) if current_stream is not None else None

    @contextlib.contextmanager
    def _on(self, device: torch.device, stream: Any) -> Any:
        # The caller's stream of this device: what the caller queued before the call is then done before the lane's work,
        # and what it queues after the call comes after, without a single event.
        with self.module.device(device), self.module.stream(stream):
            yield

    def activate(self, device: torch.device, stream: object | None) -> AbstractContextManager[object]:
        if stream is None:
            on: AbstractContextManager[object] = self.module.device(device)
            return on
        return self._on(device, stream)
