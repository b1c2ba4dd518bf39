"""A launch as a text, without starting it."""

from __future__ import annotations

from parawrap.displays import spell_count
from parawrap.launch._devices import Device, selects_cores, variables_for
from parawrap.launch._job import Job
from parawrap.launch._launcher import launcher_name
from parawrap.launch._platform_fields import PlatformFields
from parawrap.launch.machines import uses_port
from parawrap.processes.process_groups import LOOPBACK


def preview(job: Job) -> str:
    """Describe the launch of a job: its ranks, where they meet, and for Slurm the batch script.

    Raises:
        UnsendableError: If an argument cannot be sent.
    """
    platform, name, script = job.platform, launcher_name(job.platform), ""
    port = platform.master_port or "(any free port)"
    if name == "env":
        from parawrap.launch.torchrun import fit_job, require_world

        world = require_world()
        platform = fit_job(job, world).platform
        processes = spell_count(world.world_size, "process", "processes")
        command = f"in the {processes} that {world.name} started"
        meeting = f"tcp {world.master_addr}:{world.master_port}"
    elif name == "ray":
        strategy = "each on another machine" if platform.n_nodes > 1 else "on one machine"
        command = (
            f"{platform.n_nodes} bundle(s), {strategy}, {platform.ranks_per_node} rank(s) in each"
        )
        meeting = f"tcp {platform.master_addr or '(this process)'}:{port}"
    elif name == "slurm":
        from parawrap.launch.slurm.batch_job import job_script

        script = job_script(platform)
        command = f"a job of {platform.n_nodes} node(s), {platform.ranks_per_node} rank(s) on each"
        is_file = platform.ipc_protocol == "file"
        meeting = (
            "file (in the launch folder)"
            if is_file
            else f"tcp {platform.master_addr or '(the first node)'}:{port}"
        )
    else:
        processes = spell_count(platform.world_size, "process", "processes")
        command = f"{processes} on this machine, forked from one with torch loaded"
        address = f"tcp {platform.master_addr or LOOPBACK}:{port}"
        meeting = address if uses_port(platform) else "file (in a new private folder)"
    groups = ", ".join(str(list(group)) for group in platform.ipc_groups or ())
    ranks = []
    for rank in range(platform.world_size):
        node, local_rank = divmod(rank, platform.ranks_per_node)
        device = describe_device(platform, local_rank)
        ranks.append(f"rank {rank}: node {node}, local rank {local_rank}, {device}")
    receivers = "the rank" if len(ranks) == 1 else f"each of {len(ranks)} ranks"
    lines = [
        f"{job.name} on launcher {name!r}: {command}",
        f"meeting at {meeting}; {f'process groups {groups}' if groups else 'one process group'}"
        if platform.requires_ipc
        else "no process group",
        # Packed as for a launch, so that a value which cannot be sent is found here already
        f"{job.pack().block.size:,} bytes of function and arguments for {receivers}",
        *ranks,
        script,
    ]
    return "\n".join(lines).rstrip("\n")


def describe_device(platform: PlatformFields, local_rank: int) -> str:
    """Return the device of a rank as the rank names it, and as this process does."""
    kind = Device(platform.device)
    own = platform.as_sent().device_of(local_rank)
    if selects_cores(kind):
        number = platform.own_device_ids[local_rank]
        (core,) = variables_for(kind, [number]).values()
        return f"NeuronCore {core} (tensors on the {str(own).upper()})"
    here = platform.device_of(local_rank)
    return str(own) if own == here else f"{own} ({here} of this process)"
