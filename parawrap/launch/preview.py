"""A launch as a text, without starting it."""

from __future__ import annotations

from typing import NamedTuple

from parawrap.displays import spell_count
from parawrap.launch._devices import selects_cores, variables_for
from parawrap.launch._job import Job
from parawrap.launch._launcher import launcher_name
from parawrap.launch._platform_fields import PlatformFields
from parawrap.launch.machines import uses_port
from parawrap.processes.torch_groups import LOOPBACK


class _Plan(NamedTuple):
    """How the ranks of a platform start, and where they meet, in words."""

    platform: PlatformFields
    start: str
    meeting: str
    script: str = ""


def preview(job: Job) -> str:
    """Describe the launch of a job: its ranks, where they meet, and for Slurm the batch script.

    Raises:
        UnsendableError: If an argument cannot be sent.
    """
    name = launcher_name(job.platform)
    plan = _PLANS[name](job)
    platform = plan.platform
    ranks = []
    for rank in range(platform.world_size):
        node, local_rank = divmod(rank, platform.ranks_per_node)
        device = describe_device(platform, local_rank)
        ranks.append(f"rank {rank}: node {node}, local rank {local_rank}, {device}")
    receivers = "the rank" if len(ranks) == 1 else f"each of {len(ranks)} ranks"
    meeting = "no process group"
    if platform.requires_ipc:
        groups = ", ".join(str(list(group)) for group in platform.ipc_groups or ())
        described = f"process groups {groups}" if groups else "one process group"
        meeting = f"meeting at {plan.meeting}; {described}"
    # Packed as for a launch, so that a value which cannot be sent is found here already
    size = job.pack().block.size
    lines = [
        f"{job.name} on launcher {name!r}: {plan.start}",
        meeting,
        f"{size:,} bytes of function and arguments for {receivers}",
        *ranks,
        plan.script,
    ]
    return "\n".join(lines).rstrip("\n")


def _plan_env(job: Job) -> _Plan:
    # Imported here, like the other launchers: most programs need one of them
    from parawrap.launch.torchrun import fit_job, require_world

    world = require_world()
    processes = spell_count(world.world_size, "process", "processes")
    return _Plan(
        fit_job(job, world).platform,
        f"in the {processes} that {world.name} started",
        f"tcp {world.master_addr}:{world.master_port}",
    )


def _plan_ray(job: Job) -> _Plan:
    platform = job.platform
    strategy = "each on another machine" if platform.n_nodes > 1 else "on one machine"
    return _Plan(
        platform,
        f"{platform.n_nodes} bundle(s), {strategy}, {platform.ranks_per_node} rank(s) in each",
        _describe_store(platform, "(this process)"),
    )


def _plan_slurm(job: Job) -> _Plan:
    from parawrap.launch.slurm.batch_job import job_script

    platform = job.platform
    meeting = _describe_store(platform, "(the first node)")
    if platform.ipc_protocol == "file":
        meeting = "file (in the launch folder)"
    return _Plan(
        platform,
        f"a job of {platform.n_nodes} node(s), {platform.ranks_per_node} rank(s) on each",
        meeting,
        job_script(platform),
    )


def _plan_local(job: Job) -> _Plan:
    platform = job.platform
    processes = spell_count(platform.world_size, "process", "processes")
    meeting = "file (in a new private folder)"
    if uses_port(platform):
        meeting = _describe_store(platform, LOOPBACK)
    return _Plan(
        platform, f"{processes} on this machine, forked from one with torch loaded", meeting
    )


# By the names of launchers
_PLANS = {"env": _plan_env, "ray": _plan_ray, "slurm": _plan_slurm, "local": _plan_local}


def _describe_store(platform: PlatformFields, host: str) -> str:
    """Return the address of a TCP store, which is at this host by default."""
    return f"tcp {platform.master_addr or host}:{platform.master_port or '(any free port)'}"


def describe_device(platform: PlatformFields, local_rank: int) -> str:
    """Return the device of a rank as the rank names it, and as this process does."""
    kind = platform.device
    own = platform.as_sent().device_of(local_rank)
    if selects_cores(kind):
        number = platform.own_device_ids[local_rank]
        (core,) = variables_for(kind, [number]).values()
        return f"NeuronCore {core} (tensors on the {str(own).upper()})"
    here = platform.device_of(local_rank)
    return str(own) if own == here else f"{own} ({here} of this process)"
