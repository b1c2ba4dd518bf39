"""`Preview`: a launch as a text, without starting it."""

from __future__ import annotations

from dataclasses import dataclass

from parawrap._public import public
from parawrap.launch._devices import Device, rank_device
from parawrap.launch._job import Job
from parawrap.launch._launcher import launcher_name
from parawrap.launch.machines import uses_port
from parawrap.processes.process_groups import LOOPBACK


@public
@dataclass(frozen=True, repr=False)
class Preview:
    """A description of a launch that is not started; ``print`` shows it.

    Attributes:
        launcher: The name of the launcher.
        function: The name of the function.
        command: How the ranks would be started.
        meeting: The address of the store where the ranks would meet; None if they form no process group.
        groups: The process groups that the ranks would form.
        ranks: One line per rank.
        payload: The number of bytes that each rank would receive.
        script: The batch script for the cluster; empty for other launchers.

    >>> from parawrap import Platform, wrapper
    >>> @wrapper(Platform(device="cpu", n_cpus=2))
    ... def train(lr):
    ...     return lr
    >>> preview = train.dry_run(0.1)
    >>> preview.launcher, preview.ranks
    ('local', ('rank 0: node 0, local rank 0, cpu', 'rank 1: node 0, local rank 1, cpu'))
    """

    launcher: str
    function: str
    command: str
    meeting: str | None
    groups: str
    ranks: tuple[str, ...]
    payload: int
    script: str = ""

    def __repr__(self) -> str:
        return f"<Preview of {self.function}: {len(self.ranks)} ranks on launcher {self.launcher!r}>"

    def __str__(self) -> str:
        lines = [
            f"{self.function} on launcher {self.launcher!r}: {self.command}",
            f"meeting at {self.meeting}; {self.groups}" if self.meeting else "no process group",
            f"{self.payload:,} bytes of function and arguments for each of {len(self.ranks)} ranks",
            *self.ranks,
            self.script,
        ]
        return "\n".join(lines).rstrip("\n")


def preview(job: Job) -> Preview:
    """Describe the launch of a job without starting it. An argument that cannot be sent raises here too."""
    platform, name, script = job.platform, launcher_name(job.platform), ""
    port = platform.master_port or "(any free port)"
    if name == "env":
        from parawrap.launch.torchrun import fit_job, require_world

        world = require_world()
        platform = fit_job(job, world).platform
        command = f"in the {world.world_size} processes that {world.name} started"
        meeting = f"tcp {world.master_addr}:{world.master_port}"
    elif name == "ray":
        strategy = "each on another machine" if platform.n_nodes > 1 else "on one machine"
        command = f"{platform.n_nodes} bundle(s), {strategy}, {platform.ranks_per_node} rank(s) in each"
        meeting = f"tcp {platform.master_addr or '(this process)'}:{port}"
    elif name == "slurm":
        from parawrap.launch.slurm.batch_job import job_script

        script = job_script(platform)
        command = f"a job of {platform.n_nodes} node(s), {platform.ranks_per_node} rank(s) on each"
        is_file = platform.ipc_protocol == "file"
        meeting = "file (in the launch folder)" if is_file else f"tcp {platform.master_addr or '(the first node)'}:{port}"
    else:
        command = f"{platform.world_size} processes on this machine, forked from one with torch loaded"
        address = f"tcp {platform.master_addr or LOOPBACK}:{port}"
        meeting = address if uses_port(platform) else "file (in a new private folder)"
    groups = ", ".join(str(list(group)) for group in platform.ipc_groups or ())
    ranks = []
    for rank in range(platform.world_size):
        node, local_rank = divmod(rank, platform.ranks_per_node)
        device = rank_device(Device(platform.device), local_rank)
        ranks.append(f"rank {rank}: node {node}, local rank {local_rank}, {device}")
    return Preview(
        launcher=name,
        function=job.name,
        command=command,
        meeting=meeting if platform.requires_ipc else None,
        groups=f"process groups {groups}" if groups else "one process group",
        ranks=tuple(ranks),
        payload=job.pack().size,
        script=script,
    )
