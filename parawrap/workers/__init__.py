"""Lanes that work in other processes: the same calls, cut and joined in the same way, without a shared interpreter lock.

A worker is a rank of the local launcher, or a Ray actor, with a copy of the model. Its lane in this process sends it shards
and whole calls.
"""

from parawrap.workers._build import Build, build
from parawrap.workers._ray_workers import devices_of
from parawrap.workers._worker_session import open_session

__all__ = ["Build", "build", "devices_of", "open_session"]
