"""Exchange the ranks' outcomes of one call through a world's store, where no process watches all ranks."""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from parawrap.errors import LaunchError, LaunchTimeoutError, add_note
from parawrap.launch._platform import Platform
from parawrap.launch._rank_results import RankResults
from parawrap.launch._world import World
from parawrap.launch.worlds._preemption_store import StoreAgreement
from parawrap.launch.worlds._signed_values import REFUSAL, SignedStore, Signer
from parawrap.processes.outcomes import (
    Died,
    Ending,
    Outcome,
    Raised,
    Requeued,
    Returned,
    description_of,
    error_of,
    is_echo,
    make_collective_error,
    pack_exception,
    values_of,
)
from parawrap.processes.pickling import Packed, pack

__all__ = ["Exchange", "agree_on_session"]

_PIECE = 1 << 22  # the store drops the connection at values of 16 MiB
_LOOK_S = 0.01  # short against a call; a guess that no test has contradicted
_ECHO_WAIT_S = 1.0  # for the rank that failed first to report it
_LINGER_S = 1.0  # for ranks that wait in a collective to notice that this one has ended
_LONGEST_READ_S = 60.0  # for all ranks to read a large result; a guess that no test has contradicted
_NONCE_BYTES = 16  # so many that two calls never share one
_SEED, _FAILED, _REQUEUED, _JOINED, _READERS = "seed", "failed", "requeued", "joined", "readers"


def agree_on_session(store: dist.Store, world: World, signer: Signer, limit_s: float | None) -> str:
    """Return a name that this world has, and no earlier one had. All values of the world are signed for it.

    The name depends on a random number of each rank, and rank 0 signs the list of these numbers. A rank that finds its own
    number in the list knows that the list is not older than this process. So values of earlier worlds are invalid, although
    all worlds of a user have the same key, and job numbers may repeat.

    Args:
        store: The world's store.
        world: This process's place in the world.
        signer: Signs with the user's key.
        limit_s: The longest time to wait for the other ranks. None sets no limit.

    Raises:
        LaunchError: If a rank has another key, or another program wrote to the store.
        LaunchTimeoutError: If a rank does not arrive in time.
    """
    shared = SignedStore(store, f"parawrap/{world.restart}/session", signer)
    own, rank = secrets.token_bytes(_NONCE_BYTES), world.global_rank
    until = None if limit_s is None else time.monotonic() + limit_s

    def await_key(key: str, writer: int) -> None:
        while not shared.check([key]):
            if until is not None and time.monotonic() >= until:
                msg = f"rank {writer} of {world.world_size} did not begin the call within the platform's timeout_min"
                raise LaunchTimeoutError(msg)
            time.sleep(_LOOK_S)

    shared.set(f"{rank}", own)
    numbers: dict[int, bytes] = {}
    if rank == 0:
        for other in range(world.world_size):
            await_key(f"{other}", other)
            with contextlib.suppress(LaunchError):
                numbers[other] = shared.get(f"{other}", f"rank {other}")
        shared.set("all", pickle.dumps(numbers))
    await_key("all", 0)
    numbers = pickle.loads(shared.get("all", "rank 0"))
    if shared.add(_READERS, 1) == world.world_size:
        shared.delete("all", _READERS, *(f"{other}" for other in range(world.world_size)))
    for other in range(world.world_size):
        if other not in numbers or (other == rank and numbers[other] != own):
            msg = f"the value of rank {other} in the world's store is {REFUSAL}"
            raise LaunchError(msg)
    return hashlib.sha256(b"".join(number for _, number in sorted(numbers.items()))).hexdigest()


class Exchange:
    """One rank's part in the exchange for one call.

    Args:
        store: The call's part of the world's store.
        world: This process's place in the world.
        platform: The launch's platform.
    """

    def __init__(self, store: SignedStore, world: World, platform: Platform) -> None:
        self._store = store
        self._world = world
        limit = platform.timeout_min
        self._place = f"node {world.node}, {socket.gethostname()}"
        self._deadline = None if limit is None else time.monotonic() + 60 * limit

    def share_seed(self, own: int) -> int:
        """Return the seed of rank 0, which gives its own."""
        if self._world.global_rank == 0:
            self._store.set(_SEED, b"%d" % own)
            return own
        self._wait_for(_SEED, f"rank 0 of {self._world.world_size} did not begin the call")
        return int(self._store.get(_SEED, "rank 0"))

    def report_joined(self) -> None:
        """Report that this rank has joined the process groups. Until all ranks have, none leaves them after a success."""
        self._store.add(_JOINED, 1)

    def report_result(self, result: Any) -> None:
        self._report("returned", (time.time(),), pack(result, "the result"))

    def report_error(self, error: BaseException) -> RankResults[Any] | Requeued | BaseException:
        """Report this rank's error. If it follows from another rank's outcome, return that outcome instead.

        Args:
            error: The exception that this rank raised.
        """
        if isinstance(error, _FailedElsewhere):
            return error.error
        follows = is_echo(error)
        if follows and self._wait_for_cause():
            return self._as_others_did()
        if self._store.check([_FAILED]):
            return self._failure()
        if follows and (returned := [rank for rank in range(self._world.world_size) if self._store.check([f"{rank}"])]):
            error = make_collective_error(self._world.global_rank, returned, error)
        self._store.set(f"{self._world.global_rank}/place", self._place.encode())
        self._report("raised", (*description_of(error)[:3], follows), pack_exception(error))
        first = self._store.set_first(_FAILED, b"%d" % self._world.global_rank, "the rank that failed first")
        if int(first) != self._world.global_rank:
            return self._failure()
        add_note(error, f"raised in rank {self._world.global_rank} of {self._world.world_size} (this process)")
        return error

    def report_exit(self, died: Died) -> RankResults[Any] | Requeued | BaseException:
        """Report that this rank called ``sys.exit``."""
        rank = self._world.global_rank
        return self.report_error(error_of(rank, {rank: died}, self._world.world_size, self._place))

    def report_requeue(self) -> None:
        """Request a restart of all ranks."""
        self._store.set(_REQUEUED, b"")
        self._report("requeued", (time.time(),), pack(None))

    def results(self, hang_up: Callable[[], None]) -> RankResults[Any] | Requeued | BaseException:
        """Wait for the outcomes of all ranks. Return their results, or the restart request of one of them.

        Args:
            hang_up: Leaves the process group. Called a short time after all ranks have joined it, so that ranks that
                wait for this one in a collective fail.
        """
        self._wait_for_all(_LINGER_S)
        hang_up()
        outcomes: dict[int, Outcome] = {}
        for rank in range(self._world.world_size):
            self._wait_for(f"{rank}", f"rank {rank} of {self._world.world_size} did not end")
            if self._store.check([_FAILED]):
                raise _FailedElsewhere(self._failure())
            outcomes[rank] = self._outcome_of(rank)
        requeued = [each for each in outcomes.values() if isinstance(each, Requeued)]
        if requeued:
            return requeued[0]
        world_size = self._world.world_size
        try:
            return RankResults(values_of("the function", Ending(outcomes), range(world_size), world_size))
        except Exception as error:  # noqa: BLE001 (the user's classes may fail here)
            return error

    def _report(self, word: str, body: tuple[Any, ...], packed: Packed) -> None:
        rank, block = self._world.global_rank, packed.to_bytes()
        pieces = range(0, packed.size, _PIECE)
        for i, start in enumerate(pieces):
            self._store.set(f"{rank}/{i}", block[start : start + _PIECE])
        self._store.set(f"{rank}", pickle.dumps((word, body, len(pieces))))

    def _outcome_of(self, rank: int) -> Outcome:
        word, body, pieces = pickle.loads(self._store.get(f"{rank}", f"rank {rank}"))
        block = b"".join(self._store.get(f"{rank}/{i}", f"rank {rank}") for i in range(pieces))
        value = memoryview(bytearray(block))
        if word == "raised":
            at, summary, traceback, follows = body
            return Raised(at, summary, traceback, follows, value)
        (at,) = body
        return Requeued(at) if word == "requeued" else Returned(at, value)

    def _wait_for(self, key: str, missing: str) -> None:
        """Wait for another rank to write a key. `missing` says what is missing without it."""
        while not self._store.check([key]):
            if self._store.check([_FAILED]):
                raise _FailedElsewhere(self._failure())
            if self._deadline is not None and time.monotonic() >= self._deadline:
                msg = f"{missing} within the platform's timeout_min"
                raise _FailedElsewhere(LaunchTimeoutError(msg))
            time.sleep(_LOOK_S)

    def _wait_for_all(self, seconds: float) -> None:
        """Wait until all ranks have ended or one has failed, for at most `seconds` after all have joined the groups."""
        until = self._deadline
        has_met = False
        ended = [f"{rank}" for rank in range(self._world.world_size)]
        while not (self._store.check(ended) or self._store.check([_FAILED])):
            if not has_met and self._store.add(_JOINED, 0) == self._world.world_size:
                has_met, until = True, time.monotonic() + seconds
            if until is not None and time.monotonic() >= until:
                break
            time.sleep(_LOOK_S)

    def _wait_for_cause(self) -> bool:
        """True if another rank reports a failure or a restart request within `_ECHO_WAIT_S`."""
        until = time.monotonic() + _ECHO_WAIT_S
        while (
            not (is_reported := self._store.check([_FAILED]) or self._store.check([_REQUEUED])) and time.monotonic() < until
        ):
            time.sleep(_LOOK_S)
        return bool(is_reported)

    def _as_others_did(self) -> RankResults[Any] | Requeued | BaseException:
        """Return the failure of another rank, or else join its restart request."""
        if self._store.check([_FAILED]):
            return self._failure()
        self.report_requeue()
        try:
            return self.results(lambda: None)
        except _FailedElsewhere as failed:
            return failed.error

    def _failure(self) -> BaseException:
        rank = int(self._store.get(_FAILED, "the rank that failed first"))
        place = self._store.get(f"{rank}/place", f"rank {rank}").decode()
        return error_of(rank, {rank: self._outcome_of(rank)}, self._world.world_size, place)

    def forget(self, *, failed: bool) -> None:
        """Delete all keys of the call after the last rank has read them. The rank that hosts the store waits for that."""
        world = self._world
        if self._store.add(_READERS, 1) == world.world_size:
            for rank in range(world.world_size):
                pieces = 0
                if self._store.check([f"{rank}"]):
                    with contextlib.suppress(LaunchError):
                        pieces = pickle.loads(self._store.get(f"{rank}", f"rank {rank}"))[2]
                self._store.delete(f"{rank}", f"{rank}/place", *(f"{rank}/{i}" for i in range(pieces)))
            agreement = StoreAgreement.keys(world.world_size)
            self._store.delete(_SEED, _FAILED, _REQUEUED, _JOINED, *agreement, _READERS)  # the host waits for the last one
        elif world.hosts_store:
            until = time.monotonic() + (_LINGER_S if failed else _LONGEST_READ_S)
            while self._store.check([_READERS]) and time.monotonic() < until:
                time.sleep(_LOOK_S)


class _FailedElsewhere(Exception):  # noqa: N818 (carries an error)
    """Carries the failure of another rank."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error
