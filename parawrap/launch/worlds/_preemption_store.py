"""The agreement on when to save for ranks without a coordinator. They reach it through their world's store."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from typing import Self

import torch.distributed as dist

from parawrap.errors import LaunchError
from parawrap.launch.worlds._signed_values import SignedStore
from parawrap.processes.preemption import Preemption

__all__ = ["StoreAgreement"]

_LOOK_S = 0.2  # all ranks look at one store; a guess that no test has contradicted
_JOIN_S = 5.0  # a call to a living store takes milliseconds
_RANKS_A_LOOK = 2000  # in larger worlds, each rank polls less often to limit the load on the store
_REQUESTED = "requested"
_log = logging.getLogger("parawrap.launch")


class StoreAgreement:
    """One rank's part in the agreement while its function runs. A thread polls the store.

    Args:
        open_store: Opens a separate connection to the store, because a waiting call blocks its connection. The store's
            values are signed, so another program cannot make the ranks save.
        rank: This rank's number.
        world_size: The number of ranks.
    """

    def __init__(self, open_store: Callable[[], SignedStore], rank: int, world_size: int) -> None:
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
        try:
            store = self._open_store()
            if self._await_request(store):
                store.set(_REQUESTED, b"")
                store.set(self._key(self._rank), b"%d" % self.preemption.hold_back())
                self._decide(store)
            else:
                store.set(self._key(self._rank), b"0")  # a later request must not wait for this rank
        except LaunchError:  # another program wrote to the store
            _log.exception("the ranks cannot agree on when to save, so should_checkpoint() stays False")
            self.preemption.decide(sys.maxsize)
        except dist.DistError:  # the world has ended
            pass

    def _await_request(self, store: SignedStore) -> bool:
        """Wait for a request, of this rank or of another one. Return False if the function has ended before."""
        while not self._is_requested:
            if store.check([_REQUESTED]):
                store.get(_REQUESTED, "another rank")
                return True
            if self._ended.wait(self._look_s):
                return False
        return True

    def _decide(self, store: SignedStore) -> None:
        keys = [self._key(rank) for rank in range(self._world_size)]
        while not store.check(keys):
            if self._ended.wait(_LOOK_S):
                return
        self.preemption.decide(max(int(store.get(self._key(rank), f"rank {rank}")) for rank in range(self._world_size)))

    @staticmethod
    def keys(world_size: int) -> list[str]:
        """Return all keys of the agreement in the store."""
        return [_REQUESTED, *(f"answered/{rank}" for rank in range(world_size))]

    def _key(self, rank: int) -> str:
        return f"answered/{rank}"
