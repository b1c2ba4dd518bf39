"""The choice of a launcher: this machine, a cluster, or processes that are running already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parawrap.launch._job import Job
from parawrap.launch._platform import Platform
from parawrap.launch._world import find_world
from parawrap.launch.attempts import Attempts
from parawrap.launch.launch import Launch, start
from parawrap.launch.machines import Machines


def launch(job: Job) -> Launch[Any]:
    """Start the ranks of a job with its platform's launcher, and return without waiting for them.

    Raises:
        LaunchError: If the ranks cannot be started. The failed attempt leaves nothing behind.
    """
    name = launcher_name(job.platform)
    if name == "env":
        from parawrap.launch.torchrun import launch_here

        return launch_here(job)
    if name == "slurm":
        from parawrap.launch.slurm.batch_run import launch_batch

        return launch_batch([job])[0]
    launched: Launch[Any] = Launch(job, Attempts(job, machines_for(job.platform)))
    start(launched)
    return launched


def launch_array(jobs: Sequence[Job], max_parallel: int | None) -> list[Launch[Any]] | None:
    """Submit jobs of one platform as a job array.

    Return None if the platform's launcher does not support arrays.

    Raises:
        LaunchError: If the jobs cannot be submitted. The failed attempt leaves nothing behind.
    """
    if launcher_name(jobs[0].platform) != "slurm":
        return None
    from parawrap.launch.slurm.batch_run import launch_batch

    return launch_batch(jobs, max_parallel)


def runs_here(job: Job) -> bool:
    """True if the job's ranks run on this machine, or in processes that torchrun, srun, or mpirun
    started.
    """
    return launcher_name(job.platform) in ("local", "env")


def launcher_name(platform: Platform) -> str:
    """Return the name of the launcher that a platform selects in this process."""
    return platform.launcher or ("local" if find_world() is None else "env")


def machines_for(platform: Platform) -> Machines:
    """Return the machines of a platform.

    Raises:
        LaunchError: If they cannot be had.
    """
    if platform.launcher == "ray":
        from parawrap.launch.ray.ray_machines import RayMachines  # imports Ray

        return RayMachines(platform)
    return Machines(platform)
