"""The Slurm launcher: the tasks of a batch job are the ranks. submitit writes the job and submits it.

Slurm starts, signals, and ends the tasks. Files carry the rest (`launch_folder`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from parawrap.launch._job import Job, Preview, preview
from parawrap.launch.launch import Launch, start
from parawrap.launch.slurm.batch_job import job_script, submit
from parawrap.launch.slurm.batch_run import BatchRun
from parawrap.launch.slurm.commands import cancel_job
from parawrap.launch.slurm.launch_folder import Folder

_log = logging.getLogger("parawrap.launch")


class _Slurm:
    """Launches on a Slurm cluster."""

    def launch(self, job: Job) -> Launch[Any]:
        (launch,) = self.launch_all([job])
        return launch

    def launch_all(self, jobs: Sequence[Job], max_parallel: int | None = None) -> list[Launch[Any]]:
        """Submit several calls as one job array. Return one launch per call.

        Args:
            jobs: The calls, at least one, on equal platforms.
            max_parallel: The number of calls that may run at a time. None sets no limit.

        Raises:
            LaunchError: If Slurm refuses the array. The failed attempt leaves nothing behind.
        """
        platform = jobs[0].platform
        if platform.hang_timeout_s is not None:
            _log.warning("hang_timeout_s=%g has no effect on Slurm, which controls the ranks", platform.hang_timeout_s)
        folders = Folder.new(platform.name, len(jobs))
        try:
            runs = [BatchRun(job, folder) for job, folder in zip(jobs, folders, strict=True)]
            launches: list[Launch[Any]] = [Launch(job, run) for job, run in zip(jobs, runs, strict=True)]
            numbers = submit(platform, folders, max_parallel)
        except BaseException:
            for folder in folders:
                folder.remove()
            raise
        try:
            for launch, run, number in zip(launches, runs, numbers, strict=True):
                run.note_number(number)
                start(launch)
        except BaseException:
            cancel_job(numbers[0].partition("_")[0])
            raise
        return launches

    def preview(self, job: Job) -> Preview:
        platform = job.platform
        text = job_script(platform, Folder.planned(platform.name))
        how = f"a job of {platform.n_nodes} node(s), {platform.ranks_per_node} rank(s) on each"
        meeting = f"tcp {platform.master_addr or '(the first node)'}:{platform.master_port or '(any free port)'}"
        if platform.ipc_protocol == "file":
            meeting = "file (in the launch folder)"
        return preview(job, "slurm", how, meeting=meeting if platform.requires_ipc else None, script=text)


launcher = _Slurm()
