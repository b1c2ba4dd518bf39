"""A launch without processes: the function runs here and now, as rank 0 of 1, where a debugger can follow it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from parawrap.launch._devices import Device, rank_device
from parawrap.launch._groups import leave_groups
from parawrap.launch._job import Job
from parawrap.launch._platform import Platform
from parawrap.launch._rank import Rank, being
from parawrap.launch._results import RankResults
from parawrap.launch._seeds import preserved_generators, seed

__all__ = ["run_inline"]


def run_inline(job: Job) -> RankResults[Any]:
    """Make the call in this process, and put seeds, device and process group back as they were.

    Nothing is pickled, and exceptions pass as they are.
    """
    platform = job.platform
    device = rank_device(Device(platform.device), 0)
    with preserved_generators(device), _current_device(device), _lone_group(platform) as group:
        seed(platform.seed)
        with being(Rank(0, 0, 0, 1, device, platform, group)):
            result = job.call()
    job.finish()
    return RankResults([result])


@contextmanager
def _current_device(device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        yield


@contextmanager
def _lone_group(platform: Platform) -> Iterator[dist.ProcessGroup | None]:
    """A process group of this process alone; the one that is there already, where there is one."""
    if not platform.requires_ipc or dist.is_initialized():
        yield dist.group.WORLD if platform.requires_ipc else None
        return
    hook = sys.excepthook  # torch.distributed puts its own there, and leaves it
    dist.init_process_group(platform.process_group_backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        leave_groups()
        sys.excepthook = hook
