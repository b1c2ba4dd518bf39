"""The task of one shard on another device: copy the shard to the device, and run it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from parawrap.backends import record_use
from parawrap.shards import Piece, Shard
from parawrap.tree import flatten_call

__all__ = ["Placed"]


class Placed:
    """A task that the caller makes and a lane runs once, in one step or in two steps on different streams."""

    __slots__ = ("_call", "_device", "_piece", "shard")

    def __init__(self, call: Callable[..., Any], piece: Piece, device: torch.device) -> None:
        self._call = call
        self._piece = piece
        self._device = device
        self.shard: Shard

    def __call__(self) -> Any:
        self.place()
        return self._run()

    def place(self) -> None:
        """Copy the shard to the lane's device, on the thread's streams."""
        self.shard = self._piece.on(self._device)

    def run_placed(self) -> Any:
        """Run the shard on other streams than `place`. Its memory is kept until these streams have used it."""
        if self._device.type != "cpu":
            record_use(flatten_call(self.shard.args, self.shard.kwargs)[0])
        return self._run()

    def _run(self) -> Any:
        return self._call(*self.shard.args, **self.shard.kwargs)
