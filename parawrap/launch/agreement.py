"""The agreement on when to save, of ranks that no pool watches: on Slurm, and in worlds of
torchrun, srun, or mpirun.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Self

import torch.distributed as dist

from parawrap.processes.preemption import Preemption

_LOOK_S = 0.2  # all ranks look at one store; a guess that no test has contradicted
_SHORT_S = 0.01
_JOIN_S = 5.0  # a call to a living store takes milliseconds
_REQUESTED = "requested"


class Agreement:
    """One rank's part in the agreement on when to save, while its function runs.

    A thread looks at the store.

    Args:
        open_store: Opens a connection of the thread's own, since a call that waits blocks its
            connection.
        rank: This rank.
        world_size: The number of ranks.
    """

    def __init__(self, open_store: Callable[[], dist.Store], rank: int, world_size: int) -> None:
        self.preemption = Preemption()
        self._open_store = open_store
        self._rank = rank
        self._answers = [f"answered/{each}" for each in range(world_size)]
        self._is_requested = False
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._look, name="parawrap-rank-agreement", daemon=True
        )

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
            if self._await_request(store):
                store.set(_REQUESTED, "")
                store.set(self._answers[self._rank], f"{self.preemption.hold_back()}")
                while not store.check(self._answers):
                    if self._ended.wait(_SHORT_S):
                        return
                self.preemption.decide(max(int(store.get(key)) for key in self._answers))
            else:
                store.set(
                    self._answers[self._rank], "0"
                )  # a later request must not wait for this rank

    def _await_request(self, store: dist.Store) -> bool:
        """Wait for a request of this rank or of another one.

        Return False if the function has ended before.
        """
        while not self._is_requested:
            if store.check([_REQUESTED]):
                return True
            if self._ended.wait(_LOOK_S):
                return False
        return True
