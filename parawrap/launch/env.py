"""Ranks that are there already: this process is one of a world that torchrun, srun or mpirun started.

The function runs here, as the rank that this process is; nothing is started. Every process of the world makes the same
calls in the same order. Results, and the first failure, reach all of them through the store of the world.
"""

from __future__ import annotations

import copy
import logging
import os
import pickle
import sys
import time
import traceback
from dataclasses import replace
from itertools import count
from typing import Any

import torch.distributed as dist

from parawrap.errors import LaunchError, LaunchTimeoutError, PlatformError, RankDiedError
from parawrap.launch import _failures as failures
from parawrap.launch._devices import Device
from parawrap.launch._groups import leave_groups
from parawrap.launch._job import Job, Preview, preview
from parawrap.launch._outcomes import Outcome, Parcel, Raised, Returned, error_of, values_of
from parawrap.launch._packing import memory_file, packed
from parawrap.launch._platform import Platform
from parawrap.launch._rank import IN_RANK, being
from parawrap.launch._results import Launch, RankResults, State
from parawrap.launch._settling import Place, settled
from parawrap.launch._world import World, surrounding_world

__all__ = ["launcher"]

_PIECE = 1 << 22  # the store drops the connection at values of 16 MiB
_LOOK_S = 0.01
_ECHO_WAIT_S = 1.0
_LONGEST_READ_S = 60.0
_FAILED = "failed"
_NOT_OURS = {"max_restarts": 0, "hang_timeout_s": None, "console_logs": None}
_log = logging.getLogger("parawrap.launch")

_calls = count()
_stores: dict[tuple[str, int], dist.Store] = {}


class _Env:
    """The launcher."""

    def launch(self, job: Job) -> Launch[Any]:
        world = _world()
        fitted = replace(job, platform=_fitted(job.platform, world))
        ending = _run(fitted, world)
        if isinstance(ending, RankResults):
            fitted.finish()
        return _Past(fitted.platform, ending)

    def preview(self, job: Job) -> Preview:
        world = _world()
        fitted = replace(job, platform=_fitted(job.platform, world))
        made = preview(fitted, "env", f"in the {world.world_size} processes that {world.name} started")
        return replace(made, meeting=made.meeting and f"tcp {world.master_addr}:{world.master_port}")


launcher = _Env()


def _world() -> World:
    world = surrounding_world()
    if world is None:
        msg = "launcher='env': this process is in no world; start it by torchrun, srun or mpirun, or leave launcher out"
        raise LaunchError(msg)
    return world


def _fitted(platform: Platform, world: World) -> Platform:
    """The platform with the world's counts, where it leaves them open.

    Raises:
        PlatformError: it asks for another number of ranks than there are.
    """
    if not platform.leaves_counts_open and platform.world_size != world.world_size:
        msg = (
            f"the platform asks for {platform.world_size} ranks and {world.name} started {world.world_size}: "
            f"start as many, or leave the counts out of the platform"
        )
        raise PlatformError(msg)
    for name, nothing in _NOT_OURS.items():
        if getattr(platform, name) != nothing:
            _log.warning("%s=%r is left to %s, which started the ranks", name, getattr(platform, name), world.name)
    fitted = copy.copy(platform)
    per_node = world.ranks_per_node or world.world_size
    if world.world_size % per_node:  # unequal nodes
        per_node = world.world_size
    object.__setattr__(fitted, "n_nodes", world.world_size // per_node)
    object.__setattr__(fitted, "n_cpus" if platform.device == Device.CPU else "n_gpus", per_node)
    return fitted


def _run(job: Job, world: World) -> RankResults[Any] | BaseException:
    """Be the rank, make the call, tell the others how it ended, and hear how it ended with them."""
    store = dist.PrefixStore(f"parawrap/{world.restart}/{next(_calls)}", _store_of(world))
    exchange = _Exchange(store, world, job.platform)
    place = Place(world.global_rank, world.local_rank, world.node, world.world_size, world.ranks_per_node, world.restart)
    os.environ[IN_RANK] = str(os.getpid())
    hook = sys.excepthook  # torch.distributed puts its own there with each group, and leaves it
    own_group = job.platform.requires_ipc and not dist.is_initialized()
    group = dist.group.WORLD if job.platform.requires_ipc and not own_group else None
    try:
        exchange.tell_result(_as_rank(place, job, dist.PrefixStore("groups", store) if own_group else None, group))
        return exchange.results()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        msg = f"rank {world.global_rank} of {world.world_size} left by sys.exit({error.code!r}) and returned nothing"
        return exchange.tell_error(RankDiedError(msg, rank=world.global_rank, exit_code=code))
    except BaseException as error:  # noqa: BLE001 (the others have to hear of it)
        told = exchange.tell_error(error)
        # Others may wait for this rank in a collective until it hangs up, which takes the last reference to the group: its
        # process goes on, and the frames of a traceback hold on to the group.
        traceback.clear_frames(error.__traceback__)
        return told
    finally:
        if own_group:
            leave_groups()
            sys.excepthook = hook


def _as_rank(place: Place, job: Job, store: dist.Store | None, group: dist.ProcessGroup | None) -> Any:
    """Make the call as a rank, and end the groups that were made within a world whose own group is the user's."""
    rank = settled(place, job.platform, store, group)
    try:
        with being(rank):
            return job.call()
    finally:
        if group is not None and rank.group not in (None, group):
            dist.destroy_process_group(rank.group)


def _store_of(world: World) -> dist.Store:
    """The world's store; opened once in a process, since its port can be taken once."""
    address = (world.master_addr, world.master_port)
    if address not in _stores:
        _stores[address] = dist.TCPStore(
            *address, world.world_size, is_master=world.hosts_store, wait_for_workers=False, multi_tenant=True
        )
    return _stores[address]


class _Exchange:
    """How one call ended in every rank, written to and read from the store."""

    def __init__(self, store: dist.Store, world: World, platform: Platform) -> None:
        self._store = store
        self._world = world
        limit = platform.timeout_min
        self._deadline = None if limit is None else time.monotonic() + 60 * limit

    def tell_result(self, result: Any) -> None:
        file = packed(result, "result", "the result")
        try:
            self._tell("returned", {"at": time.time()}, file)
        finally:
            os.close(file)

    def tell_error(self, error: BaseException) -> BaseException:
        """Tell the others, unless one of them has failed before: then that is the error."""
        if isinstance(error, _Heard):
            return error.error
        is_echo = failures.is_echo(error)
        if is_echo and self._wait_for_failure(_ECHO_WAIT_S):
            return self._failure()
        file = failures.pack_exception(error)
        try:
            body = {"at": time.time(), "summary": failures.summary_of(error), "traceback": "", "is_echo": is_echo}
            self._tell("raised", body | {"traceback": failures.traceback_of(error, __file__)}, file)
            self._store.compare_set(_FAILED, "", str(self._world.global_rank))
        finally:
            os.close(file)
        failures.add_note(error, f"raised in rank {self._world.global_rank} of {self._world.world_size}, this one")
        return error

    def results(self) -> RankResults[Any] | BaseException:
        """Every rank's result, as soon as the last one is there."""
        outcomes: dict[int, Outcome] = {}
        for rank in range(self._world.world_size):
            self._wait_for(rank)
            outcomes[rank] = self._hear(rank)
        self._forget()
        return values_of(outcomes, self._world.world_size)

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

    def _wait_for_failure(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not self._store.check([_FAILED]) and time.monotonic() < until:
            time.sleep(_LOOK_S)
        return bool(self._store.check([_FAILED]))

    def _failure(self) -> BaseException:
        rank = int(self._store.get(_FAILED))
        return error_of(rank, {rank: self._hear(rank)}, self._world.world_size)

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


class _Past(Launch[Any]):
    """A call that has ended already. What its ranks wrote went where this process writes."""

    def __init__(self, platform: Platform, ending: RankResults[Any] | BaseException) -> None:
        self._platform = platform
        self._ending = ending

    def results(self, timeout: float | None = None) -> RankResults[Any]:
        if isinstance(self._ending, BaseException):
            raise self._ending
        return self._ending

    def done(self) -> bool:
        return True

    def cancel(self) -> None:
        pass

    @property
    def state(self) -> State:
        return "failed" if isinstance(self._ending, BaseException) else "finished"

    def logs(self, rank: int) -> str:
        if not 0 <= rank < self._platform.world_size:
            msg = f"there is no rank {rank} in a world of {self._platform.world_size}"
            raise IndexError(msg)
        return ""

    def stacks(self) -> dict[int, str]:
        return {}
