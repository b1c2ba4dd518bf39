"""The env launcher, for a world that torchrun, srun, or mpirun started.

This process is one of its ranks already.

    call and seed ── gather ──► function ──► value ── gather ──► the values of all ranks

The ranks gather the call to check that all of them make the same one, and to take the seed of rank
0. The function runs in this process; no process is started. All processes of the world must make
the same calls in the same order. An exception is raised here, and the launcher of the world ends
the other ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from parawrap.displays import spell_count
from parawrap.errors import LaunchError, PlatformError, add_note
from parawrap.launch._job import Job
from parawrap.launch._rank import Rank, acting_as
from parawrap.launch._rank_results import RankResults
from parawrap.launch._seeds import preserved_generators
from parawrap.launch._world import World, find_world
from parawrap.launch.agreement import Agreement
from parawrap.launch.inheritance import restored_variables
from parawrap.launch.run import FinishedRun
from parawrap.launch.set_up import groups_of, set_up
from parawrap.processes.outcomes import error_of, is_echo, outcome_of
from parawrap.processes.pickling import pack, unpack
from parawrap.processes.preemption import RequeueRequested, at_signal
from parawrap.processes.torch_groups import (
    INTERFACE_VARIABLES,
    LINGER_S,
    NO_LIMIT,
    break_links,
    leave_groups,
    stay_on_loopback,
)

_POLL_S = 0.01  # of ranks that wait for others at the end of a call
# torchrun looks at its processes every 0.1 s, but may be late on a busy machine
_LAUNCHER_NOTICE_S = 2.0
# Fields of a platform that have no effect here, and their defaults
_WITHOUT_EFFECT = {
    "max_restarts": 0,
    "timeout_min": None,
    "hang_timeout_s": None,
    "console_logs": None,
}
_log = logging.getLogger("parawrap.launch")


def run_here(job: Job) -> FinishedRun:
    """Call the function as this process's rank. A request to restart calls it again."""
    world = require_world()
    fitted = fit_job(job, world)
    # Ignore a signal that arrives between two attempts, or after the last one. Variables that gloo
    # reads are set for the attempts only. The loop is in a function: Ctrl-C in the jump of a loop
    # in this block could skip the end of the block
    with restored_variables(*INTERFACE_VARIABLES), at_signal(lambda: None):
        how = _make_attempts(fitted, world)
    # Every process of the world is here, but ``upon_finish`` is called once per launch
    if isinstance(how, RankResults) and world.global_rank == 0:
        fitted.finish()
    return FinishedRun(fitted, how)


def require_world() -> World:
    """Return this process's place in the world that a launcher has started.

    Raises:
        LaunchError: If no launcher has started this process, or its world has no address.
    """
    world = find_world()
    if world is None:
        msg = (
            "launcher='env' needs a process that torchrun, srun, or mpirun started, and this "
            "process was started without them: start it with one of them, or leave launcher out"
        )
        raise LaunchError(msg)
    if world.master_addr is None or world.master_port is None:
        msg = (
            f"{world.name} started {spell_count(world.world_size, 'rank')}, maybe on several "
            "machines, and did not say where they meet: set MASTER_ADDR to the host of rank 0 and "
            "MASTER_PORT to a free port there, the same in all ranks"
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
            f"the platform specifies {spell_count(platform.world_size, 'rank')}, but "
            f"{world.name} started {world.world_size}, as {world.variable} in the environment "
            f"says: start {platform.world_size}, leave n_nodes, n_cpus, and n_gpus out of the "
            "platform, or set launcher='local' to start the ranks on this machine"
        )
        raise PlatformError(msg)
    for name, default in _WITHOUT_EFFECT.items():
        value = getattr(platform, name)
        if value != default:
            _log.warning("%s=%r has no effect here: %s controls the ranks", name, value, world.name)
    per_node = world.ranks_per_node
    # A platform has one count for all nodes. Unequal or unknown nodes are described as one node
    if not per_node or world.world_size % per_node:
        per_node = world.world_size
    return replace(job, platform=platform.fitted_to(world.world_size // per_node, per_node))


def _make_attempts(job: Job, world: World) -> RankResults[Any] | BaseException:
    """Make attempts until no rank requests a restart. Return how the last one ended."""
    while True:
        how = _make_attempt(job, world)
        if how is not None:
            return how
        world = replace(world, restart=world.restart + 1)


def _make_attempt(job: Job, world: World) -> RankResults[Any] | BaseException | None:
    """Call the function as this process's rank, in all processes of the world.

    Return the results of all ranks, or the failure of this one; None if a rank requests a restart.
    """
    if world.is_on_one_machine:
        stay_on_loopback()
    meeting = _meet()
    meeting.number += 1
    # init_process_group replaces the hook and does not restore it
    hook = sys.excepthook
    has_own_groups = job.platform.requires_ipc and not dist.is_initialized()
    try:
        # Before the function: ranks that make different calls would wait for each other in it
        calls = meeting.gather(_CallOfRank(meeting.number, job.name, torch.initial_seed()))
        _check_calls(calls)
        store = meeting.store_of_call() if has_own_groups else None
        value = _call(job, world, meeting, calls[0].seed, store)
        # The function of another rank may still wait for this one in a collective. It raises once
        # this rank leaves the groups; otherwise all ranks would wait here for ever
        leave = leave_groups if has_own_groups else None
        values = meeting.gather(value, while_waiting=leave)
        if None in values:  # a rank requests a restart, and all ranks make it
            return None
        return RankResults(map(unpack, values))
    except BaseException as error:  # noqa: BLE001 (raised by the handle)
        meeting.leave()
        if has_own_groups:
            # Other ranks may wait for this one. To leave the groups is not enough: the traceback
            # keeps them alive
            break_links()
        if is_echo(error):
            # If this process ended before the launcher of the world has noticed the rank that died,
            # the launcher would report this rank
            time.sleep(_LAUNCHER_NOTICE_S)
        return error
    finally:
        if has_own_groups:
            leave_groups()
            sys.excepthook = hook


class _CallOfRank(NamedTuple):
    """A call that a rank is about to make: its number, its function, and the seed of the script."""

    number: int
    name: str
    seed: int


def _check_calls(calls: Sequence[_CallOfRank]) -> None:
    """Raise LaunchError if the ranks make different calls."""
    first = calls[0]
    for rank, call in enumerate(calls):
        if (call.number, call.name) != (first.number, first.name):
            msg = (
                f"the ranks of this world make different calls: rank 0 calls {first.name} as its "
                f"call {first.number}, and rank {rank} {call.name} as its call {call.number}. All "
                "ranks must make the same calls in the same order"
            )
            raise LaunchError(msg)


def _call(
    job: Job, world: World, meeting: _Meeting, script_seed: int, store: dist.Store | None
) -> bytes | None:
    """Call the function, and return its pickled value; None if it requests a restart.

    Args:
        job: The call.
        world: The place of this process.
        meeting: The meeting of the world.
        script_seed: The seed of the script in rank 0, for ``seed="script"``.
        store: The store of new process groups. None if the function uses those of this process.

    Raises:
        BaseException: The exception of the function, with a note on this rank.
    """
    rank, size = world.global_rank, world.world_size
    place = f"node {world.node}, {os.uname().nodename}"
    agreement = Agreement(meeting.connect, rank, size)
    device = job.platform.device_of(world.local_rank)
    try:
        with agreement, at_signal(agreement.request), preserved_generators(device):
            if job.platform.seed == "script":
                torch.manual_seed(script_seed)
            own = set_up(world, job.platform, agreement.preemption)
            with _group_of(job, own, store) as group:
                with acting_as(replace(own, group=group)):
                    value = job.call()
                return pack(value, "the result").to_bytes()
    except RequeueRequested:
        return None
    except SystemExit as error:
        # As with other launchers: a rank that exits has died
        raise error_of(rank, {rank: outcome_of(error)}, size, place) from None
    except BaseException as error:
        add_note(error, f"raised in rank {rank} of {size} ({place})")
        if is_echo(error):
            add_note(
                error, "a connection to another rank broke: the output of that rank has the reason"
            )
        raise


@contextlib.contextmanager
def _group_of(job: Job, rank: Rank, store: dist.Store | None) -> Iterator[dist.ProcessGroup | None]:
    """Yield the group of this rank; None without one.

    With a store, all process groups are new, and meet there. Without it, the user has made the
    world's group already, and only those of ``ipc_groups`` are new.
    """
    # False, also on one machine: `_make_attempt` has chosen the interface for gloo already
    groups = groups_of(job.platform, is_on_one_machine=False)
    if store is not None:
        yield groups.join(store, rank.global_rank, rank.world_size, rank.device)
    elif not job.platform.ipc_groups:
        yield dist.group.WORLD if job.platform.requires_ipc else None
    else:
        group = groups.make_own(rank.global_rank)
        try:
            yield group
        finally:
            if group is not None:
                dist.destroy_process_group(group)


class _Meeting:
    """The ranks of the world, in a gloo group next to those of the function.

    A failed call ends the group in all ranks.

    Attributes:
        number: The number of the current call, from 0.
    """

    def __init__(self, world: World) -> None:
        self._rank, self._world_size = world.global_rank, world.world_size
        # `require_world` has checked that the world has both
        self._address = str(world.master_addr), int(world.master_port or 0)
        # The store of torchrun outlives a restart
        self._prefix = f"parawrap/{world.restart}"
        # Any, because torch types its methods only in part
        self._group: Any = None
        self._generations = count()  # of the group
        self.number = -1  # before the first call
        self._store: Any = dist.TCPStore(
            *self._address,
            self._world_size,
            is_master=world.hosts_store,
            wait_for_workers=False,
            multi_tenant=True,
        )
        atexit.register(self._close, os.getpid())

    def gather(self, value: Any, while_waiting: Callable[[], None] | None = None) -> list[Any]:
        """Return the values of all ranks, by rank.

        Args:
            value: The value of this rank, which plain pickle accepts.
            while_waiting: Called once all ranks are here, or after `LINGER_S` of waiting for them.

        Raises:
            LaunchError: If another rank has left the meeting, or its process has ended.
        """
        pickled = bytearray(pickle.dumps(value))  # writable, or `torch.frombuffer` warns
        data = torch.frombuffer(pickled, dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self._world_size)]
        try:
            if self._group is None:
                self._group = self._make_group()
            # The sizes first, and then the padded data, because gloo gathers tensors of one size
            work = self._group.allgather([sizes], [torch.tensor([len(data)])])
            if while_waiting is not None:
                until = time.monotonic() + LINGER_S
                while not work.is_completed() and time.monotonic() < until:
                    time.sleep(_POLL_S)
                while_waiting()
            work.wait()
            longest = max(int(size) for size in sizes)
            parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self._world_size)]
            padded = torch.nn.functional.pad(data, (0, longest - len(data)))
            self._group.allgather([parts], [padded]).wait()
        except RuntimeError as error:
            # Of the store, or of a connection to another rank
            msg = (
                "another rank of this world did not end the call: its function raised an "
                "exception, or its process ended. Its output has the reason"
            )
            raise LaunchError(msg) from error
        return [
            pickle.loads(part[: int(size)].numpy().tobytes())
            for part, size in zip(parts, sizes, strict=True)
        ]

    def _make_group(self) -> Any:
        """Join a new group of all ranks. Its store has no keys of an earlier one."""
        store = dist.PrefixStore(f"{self._prefix}/meeting/{next(self._generations)}", self._store)
        # A rank may compute for days before it makes the next call
        store.set_timeout(NO_LIMIT)
        return dist.ProcessGroupGloo(store, self._rank, self._world_size, timeout=NO_LIMIT)

    def leave(self) -> None:
        """Leave the group. Ranks that wait for this one raise an error."""
        self._group = None

    def store_of_call(self) -> dist.Store:
        """Return the store of the current call."""
        return dist.PrefixStore(f"{self._prefix}/call/{self.number}", self._store)

    def connect(self) -> dist.Store:
        """Open another connection to the store of the current call."""
        store = dist.TCPStore(*self._address, is_master=False, wait_for_workers=False)
        return dist.PrefixStore(f"{self._prefix}/call/{self.number}", store)

    def _close(self, owner: int) -> None:
        """End the threads of gloo and of the store, which would abort the interpreter at its end.

        `owner` is the id of the process that has these threads. A forked child has none.
        """
        if os.getpid() == owner:
            self._group = self._store = None


@cache
def _meet() -> _Meeting:
    """Return the meeting of this process's world, which stays until the process exits."""
    return _Meeting(require_world())
