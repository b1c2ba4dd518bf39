"""The Slurm launcher: ranks run in the tasks of a batch job, one each. submitit writes the job and submits it.

Slurm starts and ends the tasks. Files carry the rest: the pickled call, requests of this process, and the tasks' output and
values. Rank 0's task coordinates the others.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from parawrap.launch._job import Job, Preview, preview
from parawrap.launch.launch import Launch, start
from parawrap.launch.remote import TOKEN_BYTES
from parawrap.launch.slurm._batch_job import job_script, submit
from parawrap.launch.slurm._job_commands import cancel_job, job_state
from parawrap.launch.slurm._job_follower import JobFollower
from parawrap.launch.slurm._launch_folder import Folder, Plan
from parawrap.processes.outcomes import Ending
from parawrap.processes.output import Transcript
from parawrap.processes.settings import Settings

__all__ = ["launcher"]

_LEASE_S = 120.0  # the tasks end the launch if this process is silent for this long
_STACKS_S = 5.0  # as docs/launch_slurm.md promises
_LOOK_S = 0.05  # a rank answers within a second, and a user waits


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
        folders = Folder.new(platform.name, len(jobs))
        try:
            backends = [_SlurmBackend(job, folder) for job, folder in zip(jobs, folders, strict=True)]
            launches: list[Launch[Any]] = [Launch(job, backend) for job, backend in zip(jobs, backends, strict=True)]
            numbers = submit(platform, folders, max_parallel)
        except BaseException:
            for folder in folders:
                folder.remove()
            raise
        try:
            for launch, backend, number in zip(launches, backends, numbers, strict=True):
                backend.note_number(number)
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
        if platform.ipc_protocol == "file" or (platform.ipc_protocol is None and platform.n_nodes == 1):
            meeting = "file (in the launch folder)"
        return preview(job, "slurm", how, meeting=meeting if platform.requires_ipc else None, script=text)


launcher = _Slurm()


class _SlurmBackend:
    """One batch job and its folder, which is removed at the end of the launch."""

    def __init__(self, job: Job, folder: Folder) -> None:
        self._job = job
        self._folder = folder
        self._ended = False
        self._requests = count()
        settings = Settings.here().for_other_machines()
        plan = Plan(job.name, job.sent_platform, settings, secrets.token_bytes(TOKEN_BYTES), _LEASE_S)
        try:
            folder.call.write_bytes(job.pack().to_bytes())
            folder.write_plan(plan)
        except OSError as error:
            raise folder.unusable(error) from error

    def note_number(self, number: str) -> None:
        """Store the number of the submitted job, before `supervise`."""
        self._number = number
        self._follower = JobFollower(number, self._job.name, self._job.platform, self._folder)

    @property
    def has_begun(self) -> bool:
        return self._follower.has_begun

    def supervise(self, transcripts: Sequence[Transcript], on_begin: Callable[[], None]) -> Ending:
        """Follow the job. `on_begin` is not called, because `Launch` does not wait for the ranks of a job."""
        try:
            return self._follower.follow(transcripts)  # with all values, so the folder is not needed any more
        finally:
            self._ended = True
            self._folder.remove()

    def cancel(self) -> None:
        self._follower.cancel()

    def preempt(self) -> None:
        if not job_state(self._number).waits:
            self._folder.request(f"preempt-{next(self._requests)}")

    def state_of(self, rank: int) -> str:
        """Return "running": the tasks do not report the states of single ranks."""
        return "running"

    def stacks(self) -> dict[int, str]:
        if not self._follower.has_begun:
            return {}
        request = f"stacks-{next(self._requests)}"
        until = time.monotonic() + _STACKS_S
        with contextlib.suppress(OSError):  # the launch ends, and removes its folder
            self._folder.request(request)
            while not self._ended and time.monotonic() < until:
                if (stacks := self._folder.answer_to(request)) is not None:
                    return stacks
                time.sleep(_LOOK_S)
        return {}
