"""The interface of launchers, and the choice of one: this machine, a cluster, or processes that are running already."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Protocol, cast

from parawrap.launch._job import Job, Preview
from parawrap.launch._launcher_registry import LAUNCHERS
from parawrap.launch._platform import Platform
from parawrap.launch._world import find_world
from parawrap.launch.launch import Launch


class Launcher(Protocol):
    """Starts ranks. Stateless, so any thread may use it.

    A launcher with job arrays also has ``launch_all(jobs, max_parallel) -> list[Launch]``, which submits jobs together.
    """

    def launch(self, job: Job) -> Launch[Any]:
        """Start the ranks of a job and return without waiting for them.

        Raises:
            LaunchError: If the ranks cannot be started. The failed attempt leaves nothing behind.
        """
        ...

    def preview(self, job: Job) -> Preview:
        """Describe the launch of a job without starting it."""
        ...


def launch(job: Job) -> Launch[Any]:
    """Start the ranks of a job with its platform's launcher."""
    return _launcher_for(job.platform).launch(job)


def launch_array(jobs: Sequence[Job], max_parallel: int | None) -> list[Launch[Any]] | None:
    """Submit jobs of one platform as a job array. Return None if the platform's launcher does not support arrays.

    Raises:
        LaunchError: If the jobs cannot be submitted. The failed attempt leaves nothing behind.
    """
    launch_all: Any = getattr(_launcher_for(jobs[0].platform), "launch_all", None)
    return None if launch_all is None else launch_all(jobs, max_parallel)


def runs_here(job: Job) -> bool:
    """True if the job's ranks run on this machine, or in processes that torchrun, srun, or mpirun started."""
    return launcher_name(job.platform) in ("local", "env")


def preview(job: Job) -> Preview:
    """Describe the launch of a job without starting it."""
    return _launcher_for(job.platform).preview(job)


def _launcher_for(platform: Platform) -> Launcher:
    return cast("Launcher", importlib.import_module(LAUNCHERS[launcher_name(platform)]).launcher)


def launcher_name(platform: Platform) -> str:
    """Return the name of the launcher that a platform selects in this process."""
    return platform.launcher or ("local" if find_world() is None else "env")
