"""The choice of a launcher: this machine, a cluster, or processes that are running already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parawrap.launch._job import Job, Preview
from parawrap.launch._platform import Platform
from parawrap.launch._world import find_world
from parawrap.launch.attempts import Attempts
from parawrap.launch.launch import Launch, start
from parawrap.launch.machines import machines_for, uses_port
from parawrap.processes.groups import LOOPBACK


def launch(job: Job) -> Launch[Any]:
    """Start the ranks of a job with its platform's launcher, and return without waiting for them.

    Raises:
        LaunchError: If the ranks cannot be started. The failed attempt leaves nothing behind.
    """
    name = launcher_name(job.platform)
    if name == "env":
        from parawrap.launch.env import launch_here

        return launch_here(job)
    if name == "slurm":
        from parawrap.launch.slurm.batch_run import launch_batch

        return launch_batch([job])[0]
    launched: Launch[Any] = Launch(job, Attempts(job, machines_for(job.platform)))
    start(launched)
    return launched


def launch_array(jobs: Sequence[Job], max_parallel: int | None) -> list[Launch[Any]] | None:
    """Submit jobs of one platform as a job array. Return None if the platform's launcher does not support arrays.

    Raises:
        LaunchError: If the jobs cannot be submitted. The failed attempt leaves nothing behind.
    """
    if launcher_name(jobs[0].platform) != "slurm":
        return None
    from parawrap.launch.slurm.batch_run import launch_batch

    return launch_batch(jobs, max_parallel)


def runs_here(job: Job) -> bool:
    """True if the job's ranks run on this machine, or in processes that torchrun, srun, or mpirun started."""
    return launcher_name(job.platform) in ("local", "env")


def launcher_name(platform: Platform) -> str:
    """Return the name of the launcher that a platform selects in this process."""
    return platform.launcher or ("local" if find_world() is None else "env")


def preview(job: Job) -> Preview:
    """Describe the launch of a job without starting it. An argument that cannot be sent raises here too."""
    platform, name, script, how = job.platform, launcher_name(job.platform), "", ""
    if name == "env":
        from parawrap.launch.env import fit_job, require_world

        world = require_world()
        job = fit_job(job, world)
        how = f"in the {world.world_size} processes that {world.name} started"
        meeting = f"tcp {world.master_addr}:{world.master_port}"
    else:
        hosts = {"local": LOOPBACK, "ray": "(this process)", "slurm": "(the first node)"}
        meeting = f"tcp {platform.master_addr or hosts[name]}:{platform.master_port or '(any free port)'}"
    if name == "local":
        how = f"{platform.world_size} processes on this machine, forked from one with torch loaded"
        meeting = meeting if uses_port(platform) else "file (in a new private folder)"
    elif name == "ray":
        strategy = "each on another machine" if platform.n_nodes > 1 else "on one machine"
        how = f"{platform.n_nodes} bundle(s), {strategy}, {platform.ranks_per_node} rank(s) in each"
    elif name == "slurm":
        from parawrap.launch.slurm.batch_job import job_script

        script = job_script(platform)
        how = f"a job of {platform.n_nodes} node(s), {platform.ranks_per_node} rank(s) on each"
        meeting = "file (in the launch folder)" if platform.ipc_protocol == "file" else meeting
    return Preview.of(job, name, how, meeting if platform.requires_ipc else None, script)
