"""Lanes that work in other processes: the same calls without a shared interpreter lock.

A worker is a rank of a pool of processes, or a Ray actor, with a copy of the model. Its lane in
this process sends it parts of calls, and batches in chunks.
"""

from parawrap.workers.model import build
from parawrap.workers.ray_workers import devices_of
from parawrap.workers.worker_session import WorkerSession

__all__ = ["WorkerSession", "build", "devices_of"]
