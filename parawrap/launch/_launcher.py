"""The choice of a launcher: this machine, a cluster, or processes that are running already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parawrap.errors import PlatformError
from parawrap.launch._job import Job
from parawrap.launch._platform_fields import PlatformFields, world_of
from parawrap.launch.attempts import Attempts
from parawrap.launch.launch import Launch
from parawrap.launch.machines import Machines


def launch(job: Job) -> Launch[Any]:
    """Start the ranks of a job with its platform's launcher, and return without waiting for them.

    Raises:
        LaunchError: If the ranks cannot be started. The failed attempt leaves nothing behind.
    """
    name = launcher_name(job.platform)
    if name == "env":
        # Launchers are imported where they are used: most programs need only one of them
        from parawrap.launch.torchrun import run_here

        return Launch(run_here(job))
    if name == "slurm":
        from parawrap.launch.slurm.batch_run import start_batch

        return Launch(start_batch([job])[0])
    # The handle comes last: until then, Ctrl-C finds the run in the registry by its job
    run = Attempts(job, machines_for(job.platform))
    run.start()
    return Launch(run)


def launch_array(jobs: Sequence[Job], max_parallel: int | None) -> list[Launch[Any]] | None:
    """Submit jobs of one platform as a job array.

    Return None if the platform's launcher does not support arrays.

    Raises:
        LaunchError: If the jobs cannot be submitted. The failed attempt leaves nothing behind.
    """
    if launcher_name(jobs[0].platform) != "slurm":
        return None
    from parawrap.launch.slurm.batch_run import start_batch

    return [Launch(run) for run in start_batch(jobs, max_parallel)]


def launcher_name(platform: PlatformFields) -> str:
    """Return the name of the launcher that a platform selects in this process."""
    return platform.launcher or ("local" if world_of(platform) is None else "env")


def machines_for(platform: PlatformFields) -> Machines:
    """Return the machines of a platform.

    Raises:
        LaunchError: If Ray is missing, or its cluster is missing or too small.
        PlatformError: If the platform uses all devices, and this process sees none any more.
    """
    if not platform.world_size:
        msg = (
            f"device={str(platform.device)!r}: devices were visible when the platform was made, "
            "but none is now. Set variables that hide devices before you make the platform"
        )
        raise PlatformError(msg)
    # Imported here, because it imports Ray
    if platform.launcher == "ray":
        from parawrap.launch.ray.ray_machines import RayMachines

        return RayMachines(platform)
    return Machines(platform)
