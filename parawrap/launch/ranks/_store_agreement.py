"""The agreement on when to save, reached over a world's store by ranks without a supervisor."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Self

import torch.distributed as dist

from parawrap.launch.ranks._preemption import Preemption

__all__ = ["StoreAgreement"]

_LOOK_S = 0.2
_JOIN_S = 5.0
_RANKS_A_LOOK = 2000  # in larger worlds each polls less often: one store answers all of them
_ASKED = "asked"


class StoreAgreement:
    """One rank's side of it while its function runs. A thread polls the store.

    Args:
        open_store: opens another connection to the store, as a call that waits blocks its connection.
        rank: this rank.
        world_size: the number of ranks.
    """

    def __init__(self, open_store: Callable[[], dist.Store], rank: int, world_size: int) -> None:
        self.preemption = Preemption()
        self._open_store = open_store
        self._rank = rank
        self._world_size = world_size
        self._is_wanted = False
        self._ended = threading.Event()
        self._look_s = _LOOK_S * max(1.0, world_size / _RANKS_A_LOOK)
        self._thread = threading.Thread(target=self._look, name="parawrap-rank-agreement", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(_JOIN_S)  # if the store is gone, its calls may block for long

    def ask(self) -> None:
        """Make all ranks save. Safe in a signal handler: it does not block."""
        self._is_wanted = True

    def _look(self) -> None:
        with contextlib.suppress(dist.DistError):  # the world has ended
            store = self._open_store()
            while not (self._is_wanted or store.check([_ASKED])):
                if self._ended.wait(self._look_s):
                    store.set(self._key(self._rank), "0")  # for ranks that ask later
                    return
            store.set(_ASKED, "")
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
