"""The Ray launcher: ranks run on the nodes of a Ray cluster."""

from __future__ import annotations

from typing import Any

from parawrap.launch._job import Job, Preview, preview
from parawrap.launch.attempts import Attempts
from parawrap.launch.launch import Launch, start
from parawrap.launch.ray._machines import RayMachines


class _Ray:
    """Launches on a Ray cluster."""

    def launch(self, job: Job) -> Launch[Any]:
        """Check that the cluster is large enough, and return without waiting for its resources."""
        launch: Launch[Any] = Launch(job, Attempts(job, RayMachines(job.platform)))
        start(launch)
        return launch

    def preview(self, job: Job) -> Preview:
        platform = job.platform
        strategy = "each on another machine" if platform.n_nodes > 1 else "on one machine"
        how = f"{platform.n_nodes} bundle(s), {strategy}, {platform.ranks_per_node} rank(s) in each"
        address = f"{platform.master_addr or '(this process)'}:{platform.master_port or '(any free port)'}"
        return preview(job, "ray", how, meeting=f"tcp {address}" if platform.requires_ipc else None)


launcher = _Ray()
