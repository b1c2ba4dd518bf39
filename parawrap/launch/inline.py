"""Run a decorated function in this process, as rank 0 of 1, so that a debugger can step into it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from parawrap.errors import PlatformError
from parawrap.launch._devices import Device, selects_cores
from parawrap.launch._job import Job
from parawrap.launch._platform_fields import PlatformFields
from parawrap.launch._rank import acting_as
from parawrap.launch._rank_results import RankResults
from parawrap.launch._seeds import preserved_generators
from parawrap.launch._world import RankPlace
from parawrap.launch.inheritance import restored_variables
from parawrap.launch.set_up import set_up
from parawrap.processes.preemption import Preemption, RequeueRequested, at_signal
from parawrap.processes.torch_groups import leave_groups


def run_inline(job: Job) -> RankResults[Any]:
    """Call the function in this process, again after each request for a restart.

    Afterwards restore random states, current device, and process group.

    Nothing is pickled, and exceptions propagate unchanged.

    Raises:
        PlatformError: If this machine lacks the device.
    """
    platform = job.platform
    if platform.device == Device.GPU and not torch.cuda.is_available():
        place = f"device={str(platform.device)!r}, launcher={platform.launcher!r}"
        msg = (
            f"{place}: {job.name} needs a GPU to run inline, and this machine has none: give "
            "Platform(device='cpu')"
        )
        raise PlatformError(msg)
    # Ignore a signal that arrives between two attempts. The loop is in a function: Ctrl-C in the
    # jump of a loop in this block could skip the end of the block
    with at_signal(lambda: None):
        value = _make_attempts(job)
    job.finish()
    return RankResults([value])


def _make_attempts(job: Job) -> Any:
    restart = 0
    while True:
        try:
            return _make_attempt(job, restart)
        except RequeueRequested:
            restart += 1


def _make_attempt(job: Job, restart: int) -> Any:
    """Call the function as rank 0 of 1."""
    variables = job.platform.device_variables
    platform = job.platform.fitted_to(1, 1)  # code that reads its counts finds this world
    device = platform.device_of(0)
    preemption = Preemption()
    with (
        restored_variables(*variables),
        preserved_generators(device),
        _current_device(device),
        _lone_group(platform) as group,
    ):
        # GPUs keep their numbers here: CUDA may have read its variable already
        if selects_cores(platform.device):
            os.environ.update(variables)
        rank = set_up(RankPlace.of(0, 1, 1, restart), platform, preemption)
        with acting_as(replace(rank, group=group)), at_signal(partial(_preempt, preemption)):
            return job.call()


def _preempt(preemption: Preemption) -> None:
    """Make `should_checkpoint` return True from its next call on."""
    # The only rank of its world waits for no other: its own count is the highest
    answered = preemption.hold_back()
    preemption.decide(answered)


@contextmanager
def _current_device(device: torch.device) -> Iterator[None]:
    """Make a device the current one of its kind inside the block. The CPU and MPS have only one."""
    if device.type not in ("cuda", "neuron"):
        yield
        return
    with torch.get_device_module(device).device(device):
        yield


@contextmanager
def _lone_group(platform: PlatformFields) -> Iterator[dist.ProcessGroup | None]:
    """Create a process group of one rank, unless this process has a group already."""
    if not platform.requires_ipc:
        yield None
        return
    if dist.is_initialized():
        yield dist.group.WORLD
        return
    # init_process_group replaces the hook and does not restore it
    hook = sys.excepthook
    try:
        # In memory: a group of one rank needs neither a port nor a file
        dist.init_process_group(
            platform.process_group_backend, store=dist.HashStore(), rank=0, world_size=1
        )
        yield dist.group.WORLD
    finally:
        leave_groups()
        sys.excepthook = hook
