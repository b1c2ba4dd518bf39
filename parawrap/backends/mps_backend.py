"""The GPU of an Apple machine. It is a single device; several lanes on it share one command queue."""

from __future__ import annotations

import torch

from parawrap.backends._backend import Backend
from parawrap.backends._backend_registry import not_there


class MpsBackend(Backend):
    """``mps`` and ``mps:0`` are the same device; torch reports it as ``mps:0``."""

    type = "mps"

    def count(self) -> int:
        return 1 if torch.backends.mps.is_available() else 0

    def device(self, index: int | None) -> torch.device:
        if self.count() == 0 or index not in (None, 0):
            raise not_there(self.type, index, self.count())
        return torch.device("mps", 0)


BACKEND = MpsBackend()
