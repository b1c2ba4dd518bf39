"""The agreement on when to save for ranks without a supervisor. They reach it through their world's store."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Self

import torch.distributed as dist

from parawrap.launch.rank._preemption import Preemption

__all__ = ["StoreAgreement"]

_LOOK_S = 0.2
_JOIN_S = 5.0
_RANKS_A_LOOK = 2000  # in larger worlds, each rank polls less often to limit the load on the store
_REQUESTED = "requested"


class StoreAgreement:
    """One rank's part in the agreement while its function runs. A thread polls the store.

    Args:
        open_store: Opens a separate connection to the store, because a waiting call blocks its connection.
        rank: This rank's number.
        world_size: The number of ranks.
    """

    def __init__(self, open_store: Callable[[], dist.Store], rank: int, world_size: int) -> None:
        self.preemption = Preemption()
        self._open_store = open_store
        self._rank = rank
        self._world_size = world_size
        self._is_requested = False
        self._ended = threading.Event()
        self._look_s = _LOOK_S * max(1.0, world_size / _RANKS_A_LOOK)
        self._thread = threading.Thread(target=self._look, name="parawrap-rank-agreement", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(_JOIN_S)  # calls to a store that is gone may block for long

    def request(self) -> None:
        """Make all ranks save. Does not block, so it is safe in a signal handler."""
        self._is_requested = True

    def _look(self) -> None:
        with contextlib.suppress(dist.DistError):  # the world has ended
            store = self._open_store()
            while not (self._is_requested or store.check([_REQUESTED])):
                if self._ended.wait(self._look_s):
                    store.set(self._key(self._rank), "0")  # a later request must not wait for this rank
                    return
            store.set(_REQUESTED, "")
            store.set(self._key(self._rank), str(self.preemption.hold_back()))
            self._decide(store)

    def _decide(self, store: dist.Store) -> None:
        keys = [self._key(rank) for rank in range(self._world_size)]
        while not store.check(keys):
            if self._ended.wait(_LOOK_S):
                return
        self.preemption.decide(max(int(store.get(key)) for key in keys))

    def _key(self, rank: int) -> str:
        return f"answered/{rank}"
