"""The agreement on when to save, among ranks that nobody watches: they reach it over their world's store."""

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
_RANKS_A_LOOK = 2000  # in larger worlds each looks less often: one store answers all of them
_ASKED = "asked"


class StoreAgreement:
    """One rank's part in it, from before its function is called until after; a thread looks at the store meanwhile.

    Args:
        open_store: opens a line of its own to the store; a call that waits on a store lets no other through.
        rank: this one.
        world_size: how many there are.
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
        self._thread.join(_JOIN_S)  # where the store is gone, it may take long to find that out

    def ask(self) -> None:
        """Have all ranks save; may be called from a signal's handler, where nothing may be waited for."""
        self._is_wanted = True

    def _look(self) -> None:
        with contextlib.suppress(dist.DistError):  # the world has ended: nobody is left to agree with
            store = self._open_store()
            while not (self._is_wanted or store.check([_ASKED])):
                if self._ended.wait(self._look_s):
                    store.set(self._key(self._rank), "0")  # whoever is asked later has my answer
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
