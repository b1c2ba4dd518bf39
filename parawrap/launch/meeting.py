"""Messages between the ranks of a torchrun, srun, or mpirun world, where no process watches all ranks.

    function ──► Meeting ── gather ──► the values of all ranks, in order of ranks
    SIGUSR2  ──► Agreement ── store ──► the loop iteration to save in

A meeting is a gloo group next to those of the function. If a rank leaves it, or its process ends, `gather` raises in all
others.
"""

from __future__ import annotations

import contextlib
import pickle
import re
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from parawrap.errors import LaunchError, LaunchTimeoutError
from parawrap.processes.preemption import Preemption

_LONG = timedelta(days=365)  # a rank may take any time for the function
LINGER_S = 1.0
"""Seconds for ranks that wait in a collective of the function to end it before this one, which has returned, leaves it."""

_LOOK_S = 0.2  # all ranks look at one store; a guess that no test has contradicted
_SHORT_S = 0.01
_RANKS_A_LOOK = 2000  # in larger worlds, each rank looks less often to limit the load on the store
_JOIN_S = 5.0  # a call to a living store takes milliseconds
_TIMED_OUT = re.compile(r"time[d ]*out", re.IGNORECASE)
_REQUESTED, _REQUEUED = "requested", "requeued"


class Meeting:
    """A group of all ranks of a world. Used by one thread.

    Args:
        store: Where the ranks meet. No other meeting has used it.
        rank: This rank.
        world_size: The number of ranks.
        limit: The longest wait for other ranks; None sets no limit.

    Raises:
        LaunchTimeoutError: If a rank does not arrive in time.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, limit: timedelta | None) -> None:
        self.limit = limit
        self._world_size = world_size
        self._group: Any = None  # torch types its methods only in part
        store.set_timeout(limit or _LONG)
        try:
            self._group = dist.ProcessGroupGloo(store, rank, world_size, timeout=limit or _LONG)
        except RuntimeError as error:  # of the store, or of a connection
            raise _explain(error, "begin the call") from error

    @property
    def is_open(self) -> bool:
        """False after `leave`."""
        return self._group is not None

    def gather(self, value: Any, while_waiting: Callable[[], None] | None = None) -> list[Any]:
        """Return the values of all ranks.

        Args:
            value: A value that plain pickle accepts.
            while_waiting: Called once if other ranks let this one wait for a second.

        Raises:
            LaunchError: If another rank has left the meeting, or its process has ended.
            LaunchTimeoutError: If a rank does not arrive in time.
        """
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self._world_size)]
        try:
            self._allgather(sizes, torch.tensor([len(data)]), while_waiting)
            longest = max(int(size) for size in sizes)
            parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self._world_size)]
            self._allgather(parts, torch.nn.functional.pad(data, (0, longest - len(data))))
        except RuntimeError as error:
            self.leave()
            raise _explain(error, "end the call") from error
        return [pickle.loads(part[: int(size)].numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]

    def leave(self) -> None:
        """Leave the group. Ranks that wait for this one raise an error."""
        self._group = None

    def _allgather(
        self, outputs: list[torch.Tensor], value: torch.Tensor, while_waiting: Callable[[], None] | None = None
    ) -> None:
        options = distributed_c10d.AllgatherOptions()  # type: ignore[attr-defined]
        options.timeout = self.limit or _LONG
        work = self._group.allgather([outputs], [value], options)
        if while_waiting is not None:
            until = time.monotonic() + LINGER_S
            while not work.is_completed() and time.monotonic() < until:
                time.sleep(_SHORT_S)
            while_waiting()
        work.wait()


def _explain(error: RuntimeError, what: str) -> LaunchError:
    if _TIMED_OUT.search(str(error)):
        return LaunchTimeoutError(f"the other ranks of this world did not {what} within the platform's timeout_min")
    return LaunchError(
        f"another rank of this world did not {what}: its function raised an exception, or its process ended. Its output "
        "has the reason"
    )


class Agreement:
    """One rank's part in the agreement on when to save, while its function runs. A thread looks at the store.

    Args:
        open_store: Opens a connection of the thread's own, since a call that waits blocks its connection.
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
            if self._await_request(store):
                store.set(_REQUESTED, "")
                store.set(self._answers[self._rank], f"{self.preemption.hold_back()}")
                while not store.check(self._answers):
                    if self._ended.wait(_SHORT_S):
                        return
                self.preemption.decide(max(int(store.get(key)) for key in self._answers))
            else:
                store.set(self._answers[self._rank], "0")  # a later request must not wait for this rank

    def _await_request(self, store: dist.Store) -> bool:
        """Wait for a request of this rank or of another one. Return False if the function has ended before."""
        while not self._is_requested:
            if store.check([_REQUESTED]):
                return True
            if self._ended.wait(self._look_s):
                return False
        return True


def note_requeue(store: dist.Store) -> None:
    """Note that a rank requests a restart, so that broken connections to it do not count as failures."""
    store.set(_REQUEUED, "")


def is_requeued(store: dist.Store, wait_s: float = LINGER_S) -> bool:
    """True if another rank requests a restart, at most this many seconds after a connection to it broke."""
    until = time.monotonic() + wait_s
    while not (found := store.check([_REQUEUED])) and time.monotonic() < until:
        time.sleep(_SHORT_S)
    return bool(found)


def check_calls(calls: Sequence[tuple[int, str]]) -> None:
    """Raise LaunchError if the ranks make different calls. A call is its number and the name of its function."""
    other = next((rank for rank, call in enumerate(calls) if call != calls[0]), None)
    if other is not None:
        (first, name), (second, other_name) = calls[0], calls[other]
        msg = (
            f"the ranks of this world make different calls: rank 0 calls {name} as its call {first}, and rank {other} "
            f"{other_name} as its call {second}. All ranks must make the same calls in the same order"
        )
        raise LaunchError(msg)
