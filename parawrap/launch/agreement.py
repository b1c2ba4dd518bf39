"""The agreement on when to save, for ranks that no pool watches.

These are the ranks of a Slurm job, and of worlds of torchrun, srun, or mpirun. On Slurm, the thread
of the agreement also answers requests for stacks.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Self

import torch.distributed as dist

from parawrap.processes.main_thread import stacks
from parawrap.processes.preemption import Preemption

# Between two looks at the store, which all ranks share. A guess that no test has contradicted
_POLL_S = 0.2
_SHORT_S = 0.01  # between two looks during the agreement, for which ranks wait
_JOIN_S = 5.0  # a call to a living store takes milliseconds
# Between two looks for requests of stacks. Rank 0 lists a folder that many nodes share
_STACKS_POLL_S = 1.0
# Keys of the store
_REQUESTED = "requested"  # some rank has a request to save
_STACKS = "stacks"  # has the number of the last request for stacks


class StacksRequests(NamedTuple):
    """The requests for the stacks of all ranks, each with a number, as one rank sees them.

    Attributes:
        last: Returns the number of the last request, and 0 before the first. For rank 0 alone.
        answer: Writes the stacks of this rank, with the number of the request.
    """

    last: Callable[[], int]
    answer: Callable[[int, str], None]


class Agreement:
    """One rank's part in the agreement on when to save, while its function runs.

    A thread looks at the store. After a request to save, each rank writes there how many calls of
    `should_checkpoint` it has answered with False, and blocks further calls until all ranks have
    written. Calls count from 0, so the highest number is the first call that no rank has answered.
    This call returns True in all ranks.

    Args:
        open_store: Opens a connection for the thread alone, since a call that waits blocks its
            connection.
        rank: This rank.
        world_size: The number of ranks.
        requests: The source of requests for stacks; None without one. The thread answers them until
            the process ends, because other ranks may wait for this one after its function has
            returned.

    Attributes:
        preemption: Counts the calls of `should_checkpoint`, and answers them.
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
        self._count_keys = [f"answered/{each}" for each in range(world_size)]
        self._requests = requests
        self._stacks_due_at = 0.0  # when to look for a request for stacks
        self._answered_request = 0  # the number of the last request for stacks
        self._is_requested = False  # to save
        self._function_ended = threading.Event()
        # Set once the other ranks do not wait for the count of this one
        self._has_counted = threading.Event()
        self._thread = threading.Thread(
            target=self._serve, name="parawrap-rank-agreement", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._function_ended.set()
        # With limits, because a call to a store that is gone may block for long
        self._has_counted.wait(_JOIN_S)
        if self._requests is None:
            self._thread.join(_JOIN_S)

    def request(self) -> None:
        """Make all ranks save. Safe in a signal handler: it takes no lock."""
        self._is_requested = True

    def _serve(self) -> None:
        with contextlib.suppress(dist.DistError):  # the world has ended
            try:
                store = self._open_store()
                self._agree(store)
            finally:
                self._has_counted.set()
            # Until the process exits, also after the function has returned
            while self._requests is not None:
                self._serve_stacks(store)
                time.sleep(_POLL_S)

    def _agree(self, store: dist.Store) -> None:
        """Wait for a request to save, and agree on the call that returns True."""
        own_key = self._count_keys[self._rank]
        if not self._await_request(store):
            # Ranks that still run may agree without this one: 0 does not change the highest number
            store.set(own_key, "0")
            return
        store.set(_REQUESTED, "")  # for the other ranks, if the request came to this one
        answered = self.preemption.hold_back()
        store.set(own_key, f"{answered}")
        while not store.check(self._count_keys):
            self._serve_stacks(store)
            if self._function_ended.wait(_SHORT_S):
                return
        counts = [int(store.get(key)) for key in self._count_keys]
        self.preemption.decide(max(counts))

    def _await_request(self, store: dist.Store) -> bool:
        """Wait for a request to save, of this rank or of another one.

        Return False if the function ends before.
        """
        while not self._is_requested:
            if store.check([_REQUESTED]):
                return True
            self._serve_stacks(store)
            if self._function_ended.wait(_POLL_S):
                return False
        return True

    def _serve_stacks(self, store: dist.Store) -> None:
        """Answer a new request for stacks, if it is time to look for one.

        Rank 0 finds the request, and passes its number to the other ranks in the store.
        """
        if self._requests is None or time.monotonic() < self._stacks_due_at:
            return
        self._stacks_due_at = time.monotonic() + _STACKS_POLL_S
        # The file system may fail for a moment, and the launch may have removed its folder. Neither
        # may end this thread, which the agreement needs
        with contextlib.suppress(OSError):
            if self._rank == 0:
                last = self._requests.last()
                if last > self._answered_request:
                    store.set(_STACKS, f"{last}")
            # A `get` of a missing key would wait for it
            if not store.check([_STACKS]):
                return
            number = int(store.get(_STACKS))
            if number > self._answered_request:
                self._requests.answer(number, stacks())
                self._answered_request = number
