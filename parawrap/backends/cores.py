"""The cores of the CPU that this process may use, and the share of each lane."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def usable_cores() -> int:
    """Return the number of cores that this process may use, by its affinity mask and cgroup quota.

    ``os.cpu_count()`` also counts cores that a container or ``taskset`` takes from the process.
    """
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # on Linux
        cores = len(os.sched_getaffinity(0))
    quota = _cgroup_quota()
    if quota is not None:
        # Rounded down: with a quota of 2.5 cores, Linux would stop a third thread half of the time
        cores = min(cores, int(quota))
    return max(1, cores)


def share_of_cores(lanes: int) -> int:
    """Return the number of CPU threads per operator for this number of lanes.

    All lanes together use no more threads than torch would by itself, so OMP_NUM_THREADS and
    ``torch.set_num_threads`` are obeyed.
    """
    return max(1, min(usable_cores(), torch.get_num_threads()) // lanes)


def _cgroup_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return the quota in cores, from cpu.max of cgroup v2; None without a limit.

    In a container, the root is the container's own group, which has its quota.
    """
    try:
        limit, period = (root / "cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):  # cgroup v1, or another system
        return None
