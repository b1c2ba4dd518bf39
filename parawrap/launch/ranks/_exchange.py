"""How one call ended in every rank of a world that nobody watches: written to and read from the world's store."""

from __future__ import annotations

import os
import pickle
import socket
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from parawrap.errors import LaunchTimeoutError
from parawrap.launch._platform import Platform
from parawrap.launch._results import RankResults
from parawrap.launch._world import World
from parawrap.launch.parcels import _failures as failures
from parawrap.launch.parcels._outcomes import (
    Died,
    Outcome,
    Parcel,
    Raised,
    Requeued,
    Returned,
    error_of,
    returned_already,
    values_of,
)
from parawrap.launch.parcels._packing import memory_file, packed

__all__ = ["Exchange"]

_PIECE = 1 << 22  # the store drops the connection at values of 16 MiB
_LOOK_S = 0.01
_ECHO_WAIT_S = 1.0
_LINGER_S = 1.0
_LONGEST_READ_S = 60.0
_FAILED, _REQUEUED = "failed", "requeued"


class Exchange:
    """One rank's part in it; lives as long as the call.

    Args:
        store: for this call alone.
        world: this process's place in it.
        platform: of the launch.
    """

    def __init__(self, store: dist.Store, world: World, platform: Platform) -> None:
        self._store = store
        self._world = world
        limit = platform.timeout_min
        self._place = f"node {world.node}, {socket.gethostname()}"
        self._deadline = None if limit is None else time.monotonic() + 60 * limit

    def tell_result(self, result: Any) -> None:
        file = packed(result, "result", "the result")
        try:
            self._tell("returned", {"at": time.time()}, file)
        finally:
            os.close(file)

    def tell_error(self, error: BaseException, *own_files: str) -> RankResults[Any] | Requeued | BaseException:
        """Tell the others, unless it comes of what one of them has told before: then that is how the call ended.

        Args:
            error: what this rank raised.
            own_files: the traceback that is told begins below them.
        """
        if isinstance(error, _Heard):
            return error.error
        is_echo = failures.is_echo(error)
        if is_echo and self._wait_for_cause():
            return self._as_others_did()
        if self._store.check([_FAILED]):
            return self._failure()
        if is_echo and (returned := [rank for rank in range(self._world.world_size) if self._store.check([f"{rank}"])]):
            failures.add_note(error, returned_already(returned))
        file = failures.pack_exception(error)
        try:
            body = {"at": time.time(), "summary": failures.summary_of(error), "traceback": "", "is_echo": is_echo}
            self._store.set(f"{self._world.global_rank}/place", self._place)
            self._tell("raised", body | {"traceback": failures.traceback_of(error, *own_files)}, file)
            first = self._store.compare_set(_FAILED, "", str(self._world.global_rank))
        finally:
            os.close(file)
        if int(first) != self._world.global_rank:
            return self._failure()
        failures.add_note(error, f"raised in rank {self._world.global_rank} of {self._world.world_size}, this one")
        return error

    def tell_exit(self, died: Died) -> RankResults[Any] | Requeued | BaseException:
        """Tell the others that this rank has left by ``sys.exit``."""
        rank = self._world.global_rank
        return self.tell_error(error_of(rank, {rank: died}, self._world.world_size, self._place))

    def tell_requeue(self) -> None:
        """Tell the others that all are to start anew."""
        self._store.set(_REQUEUED, "")
        file = packed(None, "result", "nothing")
        try:
            self._tell("requeued", {"at": time.time()}, file)
        finally:
            os.close(file)

    def results(self, hang_up: Callable[[], None]) -> RankResults[Any] | Requeued | BaseException:
        """Every rank's result, as soon as the last one is there; or that all are to start anew, where one of them asks.

        Args:
            hang_up: called when others take long: whoever waits for this rank in a collective hears of it that way.
        """
        self._wait_for_all(_LINGER_S)
        hang_up()
        outcomes: dict[int, Outcome] = {}
        for rank in range(self._world.world_size):
            self._wait_for(rank)
            outcomes[rank] = self._hear(rank)
        self._forget()
        requeued = [each for each in outcomes.values() if isinstance(each, Requeued)]
        return requeued[0] if requeued else values_of(outcomes, self._world.world_size)

    def _tell(self, word: str, body: dict[str, Any], file: int) -> None:
        rank = self._world.global_rank
        size = os.fstat(file).st_size
        pieces = range(0, size, _PIECE)
        store: Any = self._store  # which takes bytes, though its types say str
        for i, start in enumerate(pieces):
            store.set(f"{rank}/{i}", os.pread(file, _PIECE, start))
        store.set(f"{rank}", pickle.dumps((word, body, len(pieces))))

    def _hear(self, rank: int) -> Outcome:
        word, body, pieces = pickle.loads(self._store.get(f"{rank}"))
        file = memory_file("heard")
        with open(file, "wb", closefd=False) as out:
            out.writelines(self._store.get(f"{rank}/{i}") for i in range(pieces))
        if word == "requeued":
            os.close(file)
            return Requeued(body["at"])
        if word == "returned":
            return Returned(body["at"], Parcel(file))
        return Raised(body["at"], Parcel(file), body["summary"], body["traceback"], body["is_echo"])

    def _wait_for(self, rank: int) -> None:
        while not self._store.check([f"{rank}"]):
            if self._store.check([_FAILED]):
                raise _Heard(self._failure())
            if self._deadline is not None and time.monotonic() >= self._deadline:
                msg = f"rank {rank} of {self._world.world_size} has not ended within the platform's timeout_min"
                raise _Heard(LaunchTimeoutError(msg))
            time.sleep(_LOOK_S)
        if self._store.check([_FAILED]):
            raise _Heard(self._failure())

    def _wait_for_all(self, seconds: float) -> None:
        """Until all have ended, or one has failed, but not longer than this."""
        until = time.monotonic() + seconds
        ended = [f"{rank}" for rank in range(self._world.world_size)]
        while not (self._store.check(ended) or self._store.check([_FAILED])) and time.monotonic() < until:
            time.sleep(_LOOK_S)

    def _wait_for_cause(self) -> bool:
        """Whether another rank has told of something that ends the call, or does so soon."""
        until = time.monotonic() + _ECHO_WAIT_S
        while not (told := self._store.check([_FAILED]) or self._store.check([_REQUEUED])) and time.monotonic() < until:
            time.sleep(_LOOK_S)
        return bool(told)

    def _as_others_did(self) -> RankResults[Any] | Requeued | BaseException:
        """The failure of another rank; where there is none, another rank wants all to start anew, and so does this one."""
        if self._store.check([_FAILED]):
            return self._failure()
        self.tell_requeue()
        try:
            return self.results(lambda: None)
        except _Heard as heard:
            return heard.error

    def _failure(self) -> BaseException:
        rank = int(self._store.get(_FAILED))
        place = self._store.get(f"{rank}/place").decode()
        return error_of(rank, {rank: self._hear(rank)}, self._world.world_size, place)

    def _forget(self) -> None:
        """The last to have read everything clears it away; whoever keeps the store stays until then."""
        world = self._world
        readers = self._store.add("readers", 1)
        if readers == world.world_size:
            for rank in range(world.world_size):
                _, _, pieces = pickle.loads(self._store.get(f"{rank}"))
                for key in (f"{rank}", *(f"{rank}/{i}" for i in range(pieces))):
                    self._store.delete_key(key)
        elif world.hosts_store:
            until = time.monotonic() + _LONGEST_READ_S
            while self._store.add("readers", 0) < world.world_size and time.monotonic() < until:
                time.sleep(_LOOK_S)


class _Heard(Exception):  # noqa: N818 (carries an error, is none)
    """Another rank has failed."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error
