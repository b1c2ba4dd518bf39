"""Lanes that work in other processes: the same calls, cut and joined in the same way, without a shared interpreter lock.

A worker is a rank of a pool of processes, or a Ray actor, with a copy of the model. Its lane in this process sends it parts
of calls, and batches in chunks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from parawrap.engine.cut import Cutter
from parawrap.engine.join_rules import JoinRules
from parawrap.launch import Platform
from parawrap.workers.built_model import Build, build
from parawrap.workers.lanes import Workers
from parawrap.workers.local_workers import LocalWorkers
from parawrap.workers.ray_workers import RayWorkers, devices_of
from parawrap.workers.worker_pool import WorkerPool
from parawrap.workers.worker_session import WorkerSession

__all__ = ["Build", "WorkerSession", "build", "devices_of", "open_session"]


def open_session(
    target: Any,
    devices: Sequence[torch.device] | Platform,
    *,
    cutters: Mapping[str | None, Cutter],
    rules: JoinRules,
    output_device: torch.device | None = None,
    retries: int = 1,
) -> WorkerSession:
    """Open a session with one worker process per device, or with the workers of a platform for Ray.

    If a worker dies, its call runs `retries` more times.
    """
    workers: Workers = RayWorkers(devices) if isinstance(devices, Platform) else LocalWorkers(devices)
    pool = WorkerPool(target, workers, retries)
    return WorkerSession(target, pool, cutters=cutters, rules=rules, output_device=output_device)
