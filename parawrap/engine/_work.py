"""One shard's way through its lane: brought over, run, and what is to be done afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from parawrap.backends import record_use
from parawrap.engine._stats import Tally
from parawrap.lanes import Lane
from parawrap.shards import Piece, Shard
from parawrap.tree import flatten_call

__all__ = ["UncutWork", "Work"]


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


class UncutWork:
    """A whole call of what lies on the CPU, run once, by the lane that comes to it first.

    `ways` has each lane's way into its replica; `write_back` is for lane 0 alone.
    """

    __slots__ = ("_shard", "_tally", "_ways", "_write_back")

    def __init__(
        self, ways: Sequence[Callable[..., Any]], shard: Shard, write_back: Callable[[], None] | None, tally: Tally
    ) -> None:
        self._ways = ways
        self._shard = shard
        self._write_back = write_back
        self._tally = tally

    def __call__(self, lane: Lane) -> Any:
        args, kwargs, rows = self._shard[:3]
        self._tally.rows(lane.index, rows)
        value = self._ways[lane.index](*args, **kwargs)
        if self._write_back is not None and lane.index == 0:
            self._write_back()
        return value
