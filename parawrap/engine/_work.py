"""One shard's way through its lane: brought over, run, and what is to be done afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from parawrap.backends import record_use
from parawrap.shards import Piece
from parawrap.tree import flatten_call

__all__ = ["Work"]


class Work:
    """Made by the caller and run once, in a lane.

    `copies` is filled on the way: by id, the tensors that were copied whole to the lane's device, and what of.
    """

    def __init__(
        self, call: Callable[..., Any], piece: Piece, device: torch.device, afterwards: Callable[[], None] | None = None
    ) -> None:
        self.copies: dict[int, torch.Tensor] = {}
        self._call = call
        self._piece = piece
        self._device = device
        self._afterwards = afterwards

    def __call__(self) -> Any:
        self.place()
        return self._run()

    def place(self) -> None:
        """Bring the shard to the lane's device, on the thread's streams."""
        self._shard = self._piece.on(self._device)
        self.copies = self._shard.copies

    def run_placed(self) -> Any:
        """Run it where nobody waits for it, and where another stream took the memory of its input."""
        if self._device.type != "cpu":
            record_use(flatten_call(self._shard.args, self._shard.kwargs)[0])
        return self._run()

    def _run(self) -> Any:
        value = self._call(*self._shard.args, **self._shard.kwargs)
        if self._afterwards is not None:
            self._afterwards()
        return value
