"""Lanes that work in other processes: the same calls, cut and joined in the same way, without a shared interpreter lock.

A worker is a rank of the local launcher, or a Ray actor, with a copy of the model. Its lane in this process sends it shards
and whole calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from parawrap.engine.cut import Cutter
from parawrap.engine.join_rules import JoinRules
from parawrap.engine.pooled import PooledSession
from parawrap.launch import Platform
from parawrap.workers._build import Build, build
from parawrap.workers._local_worker import LocalWorkers
from parawrap.workers._ray_workers import RayWorkers, devices_of
from parawrap.workers._worker_pool import WorkerPool, Workers

__all__ = ["Build", "build", "devices_of", "open_session"]


def open_session(
    target: Any,
    devices: Sequence[torch.device] | Platform,
    *,
    cutters: Mapping[str | None, Cutter],
    rules: JoinRules,
    output_device: torch.device | None = None,
    retries: int = 1,
) -> PooledSession:
    """Open a session with one worker process per device, or with the workers of a platform for Ray.

    A call whose worker died runs `retries` more times.
    """
    workers: Workers = RayWorkers(devices) if isinstance(devices, Platform) else LocalWorkers(devices)
    pool = WorkerPool(target, workers, retries)
    return PooledSession(target, pool, cutters=cutters, rules=rules, output_device=output_device)
