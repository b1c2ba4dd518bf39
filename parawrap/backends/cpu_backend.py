"""The CPU: one device. Each lane on it is a thread with an equal share of the cores."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from parawrap.backends._backend import Backend
from parawrap.errors import DeviceUnavailableError

# More Python threads than this mostly wait for the interpreter lock. Each lane gets several cores instead.
_MOST_LANES = 8


def usable_cores() -> int:
    """Return the number of cores that this process may use, from its affinity mask and its cgroup quota.

    ``os.cpu_count()`` also counts cores that a container or ``taskset`` withholds from the process.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_quota()
    return max(1, affinity if quota is None else min(affinity, int(quota)))


def share_of_cores(lanes: int) -> int:
    """Return the number of CPU threads per operator for this number of lanes.

    At most the number that torch itself would use, so OMP_NUM_THREADS and ``torch.set_num_threads`` are obeyed.
    """
    return max(1, min(usable_cores(), torch.get_num_threads()) // lanes)


def _cgroup_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return the quota in cores, cpu.max of cgroup v2; None without a limit.

    A container's own group, which carries its quota, is mounted at the root.
    """
    try:
        limit, period = (root / "cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):  # cgroup v1, or another system
        return None


class CpuBackend(Backend):
    """One device, "cpu". "cpu:1" is refused: torch accepts it, but then copies on every ``.to``."""

    type = "cpu"

    def count(self) -> int:
        return 1

    def device(self, index: int | None) -> torch.device:
        if index not in (None, 0):
            msg = (
                f"device 'cpu:{index}' is not available: the CPU is one device, 'cpu'. "
                'For several lanes on it, repeat the name, as in ["cpu", "cpu"], or pass a number, as in devices=2'
            )
            raise DeviceUnavailableError(msg)
        return torch.device("cpu")

    def every_device(self) -> tuple[torch.device, ...]:
        return self.first(min(usable_cores(), _MOST_LANES))

    def first(self, lanes: int) -> tuple[torch.device, ...]:
        return (torch.device("cpu"),) * lanes

    def intra_op_threads(self, lanes: int) -> int | None:
        return share_of_cores(lanes)
