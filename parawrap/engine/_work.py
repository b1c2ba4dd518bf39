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
        self._shard: Shard | None = None

    def __call__(self) -> Any:
        # The caller waits for the lane, so its input lives long enough; but a graph may hold it, and let go of it while the
        # lane's part of the backward pass is still queued.
        return self._run(keep=torch.is_grad_enabled())

    def place(self) -> Shard:
        """The shard on the lane's device. It is brought there when first asked for, on the streams of who asks."""
        if self._shard is None:
            self._shard = self._piece.on(self._device)
            self.copies = self._shard.copies
        return self._shard

    def run_placed(self) -> Any:
        """Run it, where nobody waits for it and its input was taken by another stream."""
        return self._run(keep=True)

    def _run(self, *, keep: bool) -> Any:
        shard = self.place()
        if keep and self._device.type != "cpu":
            record_use(flatten_call(shard.args, shard.kwargs)[0])
        value = self._call(*shard.args, **shard.kwargs)
        if self._afterwards is not None:
            self._afterwards()
        return value
