"""The agreement of ranks that no pool watches on when to save.

These are the ranks of a Slurm job, and of worlds of torchrun, srun, or mpirun. On Slurm, its thread
also answers requests for stacks.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Protocol, Self

import torch.distributed as dist

from parawrap.processes.main_thread import stacks
from parawrap.processes.preemption import Preemption

_POLL_S = 0.2  # all ranks look at one store; a guess that no test has contradicted
_SHORT_S = 0.01  # ranks block until the agreement, which all of them make at this moment
_JOIN_S = 5.0  # a call to a living store takes milliseconds
_STORE_STACKS_S = 1.0  # rank 0 lists a folder on a file system that many nodes share
_REQUESTED = "requested"
_STACKS = "stacks"  # the number of the last request


class StacksRequests(Protocol):
    """Requests for the stacks of all ranks, each with a number, and the answers of one rank."""

    def last(self) -> int:
        """Return the number of the last request, and 0 before the first. Only rank 0 calls this."""
        ...

    def answer(self, number: int, text: str) -> None:
        """Write the stacks of this rank."""


class Agreement:
    """One rank's part in the agreement on when to save, while its function runs.

    A thread looks at the store. After a request to save, each rank writes there how many calls of
    `should_checkpoint` it has answered with False, and blocks further ones until all have written.
    The highest number is the first call that returns True, in all ranks.

    Args:
        open_store: Opens a connection of the thread's own, since a call that waits blocks its
            connection.
        rank: This rank.
        world_size: The number of ranks.
        requests: Where requests for stacks come from. The thread answers them until the process
            ends, because the other ranks may need this one after its function has returned.
    """

    def __init__(
        self,
        open_store: Callable[[], dist.Store],
        rank: int,
        world_size: int,
        requests: StacksRequests | None = None,
    ) -> None:
        self.preemption = Preemption()
        self._open_store = open_store
        self._rank = rank
        self._answers = [f"answered/{each}" for each in range(world_size)]
        self._requests = requests
        self._next_stacks = 0.0  # when to look for a request for stacks
        self._answered_stacks = 0
        self._is_requested = False
        self._function_ended = threading.Event()
        # Set once the store has the answer of this rank: the other ranks do not wait for it
        self._has_answered = threading.Event()
        self._thread = threading.Thread(
            target=self._serve, name="parawrap-rank-agreement", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._function_ended.set()
        # Limits, because calls to a store that is gone may block for long.
        self._has_answered.wait(_JOIN_S)
        if self._requests is None:
            self._thread.join(_JOIN_S)

    def request(self) -> None:
        """Make all ranks save. Does not block, so it is safe in a signal handler."""
        self._is_requested = True

    def _serve(self) -> None:
        with contextlib.suppress(dist.DistError):  # the world has ended
            try:
                store = self._open_store()
                self._agree(store)
            finally:
                self._has_answered.set()
            # Until the process exits, also after the function has returned
            while self._requests is not None:
                self._pass_stacks(store)
                time.sleep(_POLL_S)

    def _agree(self, store: dist.Store) -> None:
        """Wait for a request to save, and agree on the step."""
        if not self._await_request(store):
            # A later request must not wait for this rank. With 0, it does not change the highest
            store.set(self._answers[self._rank], "0")
            return
        store.set(_REQUESTED, "")  # for the other ranks, if the request came to this one
        answered = self.preemption.hold_back()
        store.set(self._answers[self._rank], f"{answered}")
        while not store.check(self._answers):
            self._pass_stacks(store)
            if self._function_ended.wait(_SHORT_S):
                return
        self.preemption.decide(max(int(store.get(key)) for key in self._answers))

    def _await_request(self, store: dist.Store) -> bool:
        """Wait for a request of this rank or of another one.

        Return False if the function has ended before.
        """
        while not self._is_requested:
            if store.check([_REQUESTED]):
                return True
            self._pass_stacks(store)
            if self._function_ended.wait(_POLL_S):
                return False
        return True

    def _pass_stacks(self, store: dist.Store) -> None:
        """Answer a request for stacks, about once per second. Rank 0 passes it to the others."""
        if self._requests is None or time.monotonic() < self._next_stacks:
            return
        self._next_stacks = time.monotonic() + _STORE_STACKS_S
        # The file system may fail for a moment, and the launch may have removed its folder. Neither
        # may end the thread that the agreement needs.
        with contextlib.suppress(OSError):
            if self._rank == 0:
                last = self._requests.last()
                if last > self._answered_stacks:
                    store.set(_STACKS, f"{last}")
            # A `get` of a missing key would wait for it
            if not store.check([_STACKS]):
                return
            number = int(store.get(_STACKS))
            if number > self._answered_stacks:
                self._requests.answer(number, stacks())
                self._answered_stacks = number
