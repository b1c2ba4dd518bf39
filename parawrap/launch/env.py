"""The env launcher, for a world that torchrun, srun, or mpirun started: this process is one of its ranks already.

The function runs in this process; no process is started. All processes of the world must make the same calls in the same
order. The ranks gather their results. An exception is raised here, and the launcher of the world ends the other ranks.
"""

from __future__ import annotations

import atexit
import copy
import logging
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from parawrap.errors import LaunchError, PlatformError, add_note
from parawrap.launch._devices import Device, rank_device
from parawrap.launch._job import Job
from parawrap.launch._platform import Platform
from parawrap.launch._rank import IN_RANK, Rank, being
from parawrap.launch._rank_results import RankResults
from parawrap.launch._seeds import preserved_generators
from parawrap.launch._world import World, find_world
from parawrap.launch.launch import Launch, make_ended_launch
from parawrap.launch.meeting import Agreement, Meeting, check_calls, is_requeued, note_requeue
from parawrap.launch.set_up import Place, groups_of, set_up
from parawrap.launch.slurm.commands import requeue_job
from parawrap.processes.groups import leave_groups, stay_on_loopback
from parawrap.processes.outcomes import (
    Died,
    Ending,
    Requeued,
    Returned,
    error_of,
    exit_of,
    is_echo,
    pack_exception,
    values_of,
)
from parawrap.processes.pickling import pack
from parawrap.processes.preemption import RequeueRequested, at_signal

_REQUEUE_WAIT_S = 60.0  # Slurm ends the processes of a requeued job well before this
_NOT_OURS = {"max_restarts": 0, "hang_timeout_s": None, "console_logs": None}
_log = logging.getLogger("parawrap.launch")

_Address = tuple[str, int]
_Outcome = RankResults[Any] | Requeued | BaseException

_calls = count()
_generations = count()  # of meetings: a failed call ends the meeting in all ranks
_stores: dict[_Address, dist.Store] = {}
_meetings: dict[_Address, Meeting] = {}


def launch_here(job: Job) -> Launch[Any]:
    """Call the function as this process's rank."""
    world = require_world()
    fitted = fit_job(job, world)
    with at_signal(lambda: None):  # ignore a signal that arrives between two calls, or after the last one
        outcome = _run(fitted, world)
        while isinstance(outcome, Requeued):
            _requeue_batch_job(world)
            world = world._replace(restart=world.restart + 1)
            outcome = _run(fitted, world)
    if isinstance(outcome, RankResults) and world.global_rank == 0:
        fitted.finish()
    return make_ended_launch(fitted, outcome)


def require_world() -> World:
    """Return this process's place in its world.

    Raises:
        LaunchError: If there is no such world, or its ranks could not meet.
    """
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


def fit_job(job: Job, world: World) -> Job:
    """Return the job with the node and rank counts of the world in its platform.

    Raises:
        PlatformError: If the platform specifies a different number of ranks.
    """
    platform = job.platform
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
    return replace(job, platform=fitted)


def _requeue_batch_job(world: World) -> None:
    """Requeue the Slurm job and wait for its end. Outside of Slurm, return at once: the caller then runs again in place."""
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        return
    reason = requeue_job(job) if world.global_rank == 0 else None
    (reason, *_) = _meetings[_address_of(world)].gather(reason)
    if reason is None:
        time.sleep(_REQUEUE_WAIT_S)
    elif world.global_rank == 0:
        _log.warning("Slurm did not requeue job %s: %s; its ranks restart in place", job, reason)


def _run(job: Job, world: World) -> _Outcome:
    """Call the function as this process's rank. Return the results of all ranks, or the failure of this one."""
    place = Place(world.global_rank, world.local_rank, world.node, world.world_size, world.ranks_per_node, world.restart)
    if place.is_on_one_machine:
        stay_on_loopback()
    number, meeting = next(_calls), _meeting_of(world, job.platform)
    calls, seeds = zip(*meeting.gather(((number, job.name), torch.initial_seed())), strict=True)
    check_calls(calls)
    prefix = f"parawrap/{world.restart}/call/{number}"  # the store of torchrun outlives a restart
    store = dist.PrefixStore(prefix, _store_of(world))
    agreement = Agreement(
        lambda: dist.PrefixStore(prefix, _connection_to_store(world)), world.global_rank, world.world_size
    )
    hook = sys.excepthook  # init_process_group replaces it and does not restore it
    has_own_groups = job.platform.requires_ipc and not dist.is_initialized()
    hang_up = leave_groups if has_own_groups else _keep_groups
    try:
        report = _call(job, place, agreement, store, seeds[0], has_own_groups=has_own_groups)
        if isinstance(report, BaseException):
            meeting.leave()
            return report
        if report.word == "requeued":
            note_requeue(store)
            hang_up()
        reports = meeting.gather(report, hang_up)
    except LaunchError as error:  # another rank has failed
        return error
    finally:
        hang_up()
        if has_own_groups:
            sys.excepthook = hook
    return _outcome_of(job, reports)


class _Report(NamedTuple):
    """How the function ended in a rank: with a value, a request to restart, or a value that cannot be sent."""

    word: str
    block: bytes = b""


def _call(
    job: Job, place: Place, agreement: Agreement, store: dist.Store, script_seed: int, *, has_own_groups: bool
) -> _Report | BaseException:
    """Call the function, and return what to tell the other ranks, or the exception to raise here.

    Other ranks may wait in a collective until this rank leaves its groups. A group closes with its last reference, and a
    traceback keeps the variables of its frames. So no variable here refers to the rank.
    """
    os.environ[IN_RANK] = str(os.getpid())
    where = f"node {place.node}, {os.uname().nodename}"
    given = dist.group.WORLD if job.platform.requires_ipc and not has_own_groups else None
    try:
        with agreement, at_signal(agreement.request), preserved_generators(rank_device(_kind(job), place.local_rank)):
            if job.platform.seed == "script":
                torch.manual_seed(script_seed)
            result = _call_as(_enter(place, job, agreement, store if has_own_groups else None, given), job, given)
        try:
            return _Report("returned", pack(result, "the result").to_bytes())
        except Exception as error:  # noqa: BLE001 (raised in all ranks)
            return _Report("unsendable", pack_exception(error).to_bytes())
    except RequeueRequested as error:
        traceback.clear_frames(error.__traceback__)
        return _Report("requeued")
    except SystemExit as error:
        code, said = exit_of(error)
        died = Died(time.time(), os.getpid(), code, by_sys_exit=True, last_words=said)
        return error_of(place.global_rank, {place.global_rank: died}, place.world_size, where)
    except BaseException as error:  # noqa: BLE001 (raised by the handle)
        traceback.clear_frames(error.__traceback__)
        if is_echo(error) and is_requeued(store):
            return _Report("requeued")
        add_note(error, f"raised in rank {place.global_rank} of {place.world_size} ({where})")
        if is_echo(error):
            add_note(error, "a connection to another rank broke: the output of that rank has the reason")
        return error


def _outcome_of(job: Job, reports: Sequence[_Report]) -> _Outcome:
    """Return the results of all ranks, the error of a result that cannot be sent, or the restart that a rank requests."""
    if "requeued" in [report.word for report in reports]:
        return Requeued(time.time())
    outcomes = {rank: Returned(0.0, memoryview(bytearray(report.block))) for rank, report in enumerate(reports)}
    try:
        values = values_of(job.name, Ending(outcomes), outcomes, len(reports))
    except Exception as error:  # noqa: BLE001 (the user's classes may fail here)
        return error
    for rank, report in enumerate(reports):
        if report.word == "unsendable":
            refused: BaseException = values[rank]
            add_note(refused, f"raised in rank {rank} of {len(reports)}")
            return refused
    return RankResults(values)


def _kind(job: Job) -> Device:
    return Device(job.platform.device)


def _enter(place: Place, job: Job, agreement: Agreement, store: dist.Store | None, group: dist.ProcessGroup | None) -> Rank:
    """Make this process the rank, in new process groups that meet at the store, or in those of the user."""
    rank = set_up(place, job.platform, agreement.preemption)
    groups = groups_of(job.platform, is_on_one_machine=place.is_on_one_machine)
    if store is not None:
        return replace(rank, group=groups.join(store, rank.global_rank, rank.world_size, rank.device))
    if group is not None and job.platform.ipc_groups:
        return replace(rank, group=groups.make_own(rank.global_rank))
    return replace(rank, group=group)


def _keep_groups() -> None:
    """Keep the process groups that the user created."""


def _call_as(rank: Rank, job: Job, group: dist.ProcessGroup | None) -> Any:
    """Call the function as this rank. If the user created `group`, destroy the groups of ``ipc_groups`` afterwards."""
    try:
        with being(rank):
            return job.call()
    finally:
        if group is not None and rank.group not in (None, group):
            dist.destroy_process_group(rank.group)


def _meeting_of(world: World, platform: Platform) -> Meeting:
    """Return the meeting of the world's ranks. A new one begins after a failed call."""
    address = _address_of(world)
    limit = None if platform.timeout_min is None else timedelta(minutes=platform.timeout_min)
    if not _meetings:
        atexit.register(_leave_world, os.getpid())
    if address not in _meetings or not _meetings[address].is_open:
        store = dist.PrefixStore(f"parawrap/{world.restart}/meeting/{next(_generations)}", _store_of(world))
        _meetings[address] = Meeting(store, world.global_rank, world.world_size, limit)
    _meetings[address].limit = limit
    return _meetings[address]


def _leave_world(process: int) -> None:
    """End the threads of gloo and of the store while the interpreter is whole.

    A thread of gloo that frees a tensor later finds no interpreter, and aborts the process.
    """
    if os.getpid() != process:  # a forked child, which has no such threads
        return
    for meeting in _meetings.values():
        meeting.leave()
    _meetings.clear()
    _stores.clear()


def _store_of(world: World) -> dist.Store:
    """Return the world's store. It is opened once per process, because its port can be bound only once."""
    address = _address_of(world)
    if address not in _stores:
        _stores[address] = dist.TCPStore(
            *address, world.world_size, is_master=world.hosts_store, wait_for_workers=False, multi_tenant=True
        )
    return _stores[address]


def _connection_to_store(world: World) -> dist.Store:
    """Open another connection to the same store."""
    return dist.TCPStore(*_address_of(world), is_master=False, wait_for_workers=False)


def _address_of(world: World) -> _Address:
    assert world.master_addr is not None
    assert world.master_port is not None
    return world.master_addr, world.master_port
