"""One shard's way through its lane: brought over, run, and what is to be done afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from parawrap.backends import record_use
from parawrap.shards import Piece, Shard
from parawrap.tree import flatten_call

__all__ = ["Work"]


class Work:
    """Made by the caller and run once, in a lane: in one go, or in two, between which the streams change."""

    __slots__ = ("_afterwards", "_call", "_device", "_piece", "_shard", "copies")

    def __init__(
        self, call: Callable[..., Any], piece: Piece, device: torch.device, afterwards: Callable[[], None] | None = None
    ) -> None:
        self._call = call
        self._piece = piece
        self._device = device
        self._afterwards = afterwards
        self._shard: Shard
        self.copies: dict[int, torch.Tensor]  # by id, what was copied whole to the lane's device, and what of

    def __call__(self) -> Any:
        self.place()
        return self._run()

    def place(self) -> None:
        """The first half: bring the shard to the lane's device, on the thread's streams."""
        self._shard = shard = self._piece.on(self._device)
        self.copies = shard.copies

    def run_placed(self) -> Any:
        """The second half, on other streams than the first; nobody waits for it, so nobody else keeps its input."""
        if self._device.type != "cpu":
            record_use(flatten_call(self._shard.args, self._shard.kwargs)[0])
        return self._run()

    def _run(self) -> Any:
        shard = self._shard
        value = self._call(*shard.args, **shard.kwargs)
        if self._afterwards is not None:
            self._afterwards()
        return value
