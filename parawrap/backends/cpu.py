"""The CPU: one device, on which a lane is a thread with its share of the cores."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from parawrap.backends._base import Backend
from parawrap.errors import DeviceUnavailableError

__all__ = ["BACKEND", "CpuBackend", "share_of_cores", "usable_cores"]

# More Python threads than this wait for the interpreter lock rather than work; each then gets several cores instead.
_MOST_LANES = 8


def usable_cores() -> int:
    """How many cores this process may use: its affinity mask, and the cgroup's quota where there is one.

    ``os.cpu_count()`` counts the machine's cores, also those that a container or ``taskset`` keeps from the process.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_quota()
    return max(1, affinity if quota is None else min(affinity, int(quota)))


def share_of_cores(lanes: int) -> int:
    """How many threads an operator on the CPU may use in each of so many lanes.

    Never more than torch itself would use: OMP_NUM_THREADS and set_num_threads are the user's word.
    """
    return max(1, min(usable_cores(), torch.get_num_threads()) // lanes)


def _cgroup_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """The quota in cores: cpu.max of cgroup v2, else cpu.cfs_quota_us of v1; None where there is no limit.

    Inside a container the container's own group is mounted at the root, which is where a quota is set.
    """
    try:
        limit, period = (root / "cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        pass
    try:
        limit = (root / "cpu/cpu.cfs_quota_us").read_text()
        period = (root / "cpu/cpu.cfs_period_us").read_text()
        return None if int(limit) <= 0 else int(limit) / int(period)
    except (OSError, ValueError):
        return None


class CpuBackend(Backend):
    """One device, "cpu". torch accepts "cpu:1" too and then copies at every ``.to``: it is refused here."""

    type = "cpu"

    def count(self) -> int:
        return 1

    def device(self, index: int | None) -> torch.device:
        if index not in (None, 0):
            msg = (
                f"device 'cpu:{index}' is not there: a machine has one CPU device, 'cpu'. "
                'For several lanes on it repeat the name, as in ["cpu", "cpu"], or give a number, as in devices=2'
            )
            raise DeviceUnavailableError(msg)
        return torch.device("cpu")

    def every_device(self) -> tuple[torch.device, ...]:
        return self.first(min(usable_cores(), _MOST_LANES))

    def first(self, lanes: int) -> tuple[torch.device, ...]:
        return (torch.device("cpu"),) * lanes

    def intra_op_threads(self, lanes: int) -> int | None:
        return share_of_cores(lanes)


BACKEND = CpuBackend()
