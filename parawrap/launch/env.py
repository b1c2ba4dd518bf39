"""The env launcher, for a world that torchrun, srun, or mpirun started: this process is one of its ranks already.

The function runs in this process; no process is started. All processes of the world must make the same calls in the same
order. The world's store distributes the results, or the first failure, to all of them.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import sys
import time
import traceback
from dataclasses import replace
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from parawrap.errors import LaunchError, PlatformError
from parawrap.launch._devices import Device, rank_device
from parawrap.launch._job import Job, Preview, preview
from parawrap.launch._platform import Platform
from parawrap.launch._rank import IN_RANK, Rank, being
from parawrap.launch._rank_results import RankResults
from parawrap.launch._seeds import preserved_generators
from parawrap.launch._world import World, find_world
from parawrap.launch.launch import Launch, make_ended_launch
from parawrap.launch.set_up import Place, groups_of, set_up
from parawrap.launch.slurm._job_commands import requeue_job
from parawrap.launch.worlds._exchange_outcomes import Exchange, agree_on_session
from parawrap.launch.worlds._preemption_store import StoreAgreement
from parawrap.launch.worlds._signed_values import SignedStore, Signer
from parawrap.processes.groups import leave_groups
from parawrap.processes.outcomes import Died, Requeued, exit_of
from parawrap.processes.preemption import RequeueRequested, at_signal

__all__ = ["launcher"]

_REQUEUE_WAIT_S = 60.0  # Slurm ends the processes of a requeued job well before this
_NOT_OURS = {"max_restarts": 0, "hang_timeout_s": None, "console_logs": None}
_log = logging.getLogger("parawrap.launch")

_calls = count()
_stores: dict[tuple[str, int], dist.Store] = {}
_sessions: dict[tuple[str, int], str] = {}


class _Env:
    """Launches in the processes of the surrounding world."""

    def launch(self, job: Job) -> Launch[Any]:
        world = _world()
        fitted = replace(job, platform=_fit_platform(job.platform, world))
        session = _session_of(world, fitted.platform)
        with at_signal(lambda: None):  # ignore a signal that arrives between two calls, or after the last one
            ending = _run(fitted, world, session)
            while isinstance(ending, Requeued):
                _requeue_batch_job(world, _sign_store(_store_of(world), session, next(_calls)))
                world = world._replace(restart=world.restart + 1)
                ending = _run(fitted, world, session)
        if isinstance(ending, RankResults) and world.global_rank == 0:
            fitted.finish()
        return make_ended_launch(fitted, ending)

    def preview(self, job: Job) -> Preview:
        world = _world()
        fitted = replace(job, platform=_fit_platform(job.platform, world))
        meeting = f"tcp {world.master_addr}:{world.master_port}" if fitted.platform.requires_ipc else None
        return preview(fitted, "env", f"in the {world.world_size} processes that {world.name} started", meeting=meeting)


launcher = _Env()


def _world() -> World:
    world = find_world()
    if world is None:
        msg = (
            "launcher='env' needs a process that torchrun, srun, or mpirun started, and this process was started without "
            "them: start it with one of them, or leave launcher out"
        )
        raise LaunchError(msg)
    if world.master_addr is None or world.master_port is None:
        msg = (
            f"{world.name} started {world.world_size} ranks, maybe on several machines, and did not say where they meet: "
            "set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there, the same in all ranks"
        )
        raise LaunchError(msg)
    return world


def _fit_platform(platform: Platform, world: World) -> Platform:
    """Return the platform with the node and rank counts of the world.

    Raises:
        PlatformError: If the platform specifies a different number of ranks.
    """
    if not platform.leaves_counts_open and platform.world_size != world.world_size:
        msg = (
            f"the platform specifies {platform.world_size} ranks, but {world.name} started {world.world_size}: "
            f"start {platform.world_size}, or leave n_nodes, n_cpus, and n_gpus out of the platform"
        )
        raise PlatformError(msg)
    for name, nothing in _NOT_OURS.items():
        if getattr(platform, name) != nothing:
            _log.warning("%s=%r has no effect here: %s controls the ranks", name, getattr(platform, name), world.name)
    fitted = copy.copy(platform)
    per_node = world.ranks_per_node or world.world_size
    if world.world_size % per_node:  # unequal nodes
        per_node = world.world_size
    object.__setattr__(fitted, "n_nodes", world.world_size // per_node)
    object.__setattr__(fitted, "n_cpus" if platform.device == Device.CPU else "n_gpus", per_node)
    return fitted


def _requeue_batch_job(world: World, store: SignedStore) -> None:
    """Requeue the Slurm job and wait for its end. Outside of Slurm, return at once: the caller then runs again in place."""
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        return
    if world.global_rank == 0:
        reason = requeue_job(job)
        if reason is not None:
            _log.warning("Slurm did not requeue job %s: %s; its ranks restart in place", job, reason)
        store.set("refused", (reason or "").encode())
    if not store.get("refused", "rank 0"):
        time.sleep(_REQUEUE_WAIT_S)
    if store.add("readers", 1) == world.world_size:
        store.delete("refused", "readers")


def _run(job: Job, world: World, session: str) -> RankResults[Any] | Requeued | BaseException:
    """Call the function as this process's rank, and remove the traces of the call from the store.

    Return the outcome that all ranks agree on.
    """
    store, call = _store_of(world), next(_calls)
    exchange = Exchange(_sign_store(store, session, call), world, job.platform)
    agreement = StoreAgreement(
        lambda: _sign_store(_connection_to_store(world), session, call), world.global_rank, world.world_size
    )
    meeting = dist.PrefixStore(f"parawrap/{session}/{call}/groups", store)
    has_failed = True
    try:
        ending = _run_rank(job, world, exchange, agreement, meeting)
        has_failed = not isinstance(ending, (RankResults, Requeued))
        return ending
    finally:
        with contextlib.suppress(dist.DistError):  # the world has ended, and this rank has its ending
            exchange.forget(failed=has_failed)


def _run_rank(
    job: Job, world: World, exchange: Exchange, agreement: StoreAgreement, meeting: dist.Store
) -> RankResults[Any] | Requeued | BaseException:
    place = Place(world.global_rank, world.local_rank, world.node, world.world_size, world.ranks_per_node, world.restart)
    os.environ[IN_RANK] = str(os.getpid())
    hook = sys.excepthook  # init_process_group replaces it and does not restore it
    own_group = job.platform.requires_ipc and not dist.is_initialized()
    group = dist.group.WORLD if job.platform.requires_ipc and not own_group else None
    hang_up = leave_groups if own_group else _keep_group
    device = rank_device(Device(job.platform.device), world.local_rank)
    try:
        # Other ranks may wait in a collective until this rank leaves the group. The group closes with its last reference,
        # and a traceback keeps the variables of its frames alive. So no variable here refers to the rank.
        try:
            with agreement, at_signal(agreement.request), preserved_generators(device):
                if job.platform.seed == "script":
                    torch.manual_seed(exchange.share_seed(torch.initial_seed()))
                result = _call(job, exchange, _enter(place, job, agreement, meeting if own_group else None, group), group)
            exchange.report_result(result)
        except RequeueRequested as wanted:
            traceback.clear_frames(wanted.__traceback__)
            hang_up()
            exchange.report_requeue()
        return exchange.results(hang_up)
    except SystemExit as error:
        code, said = exit_of(error)
        return exchange.report_exit(Died(time.time(), os.getpid(), code, by_sys_exit=True, last_words=said))
    except BaseException as error:  # noqa: BLE001 (reported to the other ranks)
        outcome = exchange.report_error(error)
        traceback.clear_frames(error.__traceback__)
        return outcome
    finally:
        hang_up()
        if own_group:
            sys.excepthook = hook


def _enter(
    place: Place, job: Job, agreement: StoreAgreement, store: dist.Store | None, group: dist.ProcessGroup | None
) -> Rank:
    """Make this process the rank, in new process groups that meet at the store, or in those of the user."""
    rank = set_up(place, job.platform, agreement.preemption)
    groups = groups_of(job.platform, is_on_one_machine=place.is_on_one_machine)
    if store is not None:
        return replace(rank, group=groups.join(store, rank.global_rank, rank.world_size, rank.device))
    if group is not None and job.platform.ipc_groups:
        return replace(rank, group=groups.make_own(rank.global_rank))
    return replace(rank, group=group)


def _keep_group() -> None:
    """Keep a process group that the user created."""


def _call(job: Job, exchange: Exchange, rank: Rank, group: dist.ProcessGroup | None) -> Any:
    """Call the function as this rank. If the user created `group`, destroy the groups of ``ipc_groups`` afterwards."""
    exchange.report_joined()
    try:
        with being(rank):
            return job.call()
    finally:
        if group is not None and rank.group not in (None, group):
            dist.destroy_process_group(rank.group)


def _store_of(world: World) -> dist.Store:
    """Return the world's store. It is opened once per process, because its port can be bound only once."""
    address = _address_of(world)
    if address not in _stores:
        _stores[address] = dist.TCPStore(
            *address, world.world_size, is_master=world.hosts_store, wait_for_workers=False, multi_tenant=True
        )
    return _stores[address]


def _session_of(world: World, platform: Platform) -> str:
    """Return the name under which this world's values are signed. The ranks agree on it in the first call."""
    address = _address_of(world)
    if address not in _sessions:
        limit_s = None if platform.timeout_min is None else 60 * platform.timeout_min
        _sessions[address] = agree_on_session(_store_of(world), world, Signer(), limit_s)
    return _sessions[address]


def _sign_store(store: dist.Store, session: str, call: int) -> SignedStore:
    """Return the part of the store for one call of a session."""
    return SignedStore(store, f"parawrap/{session}/{call}", Signer())


def _connection_to_store(world: World) -> dist.Store:
    """Open another connection to the same store."""
    return dist.TCPStore(*_address_of(world), is_master=False, wait_for_workers=False)


def _address_of(world: World) -> tuple[str, int]:
    assert world.master_addr is not None
    assert world.master_port is not None
    return world.master_addr, world.master_port
