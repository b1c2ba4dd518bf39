"""The Slurm launcher: ranks run in a batch job that submitit submits.

The job and this process communicate through a folder. It holds the pickled call, a journal that the first node writes, and
the requests of this process. Signals, requeueing, and the end of the job go through Slurm.
"""

from __future__ import annotations

import logging
import secrets
import threading
import weakref
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from parawrap.launch._packed_call import Job, Preview, preview
from parawrap.launch.coordinator._ending import Ending
from parawrap.launch.coordinator._launch import Launch, start
from parawrap.launch.coordinator._transcript import Transcript
from parawrap.launch.messages._first_rank_failure import Parcel
from parawrap.launch.rank._rank_assignment import Surroundings
from parawrap.launch.slurm._batch_job import script, submit
from parawrap.launch.slurm._commands import cancel_job, job_state, send_signal
from parawrap.launch.slurm._job_follower import JobFollower
from parawrap.launch.slurm._launch_folder import Folder, Plan

__all__ = ["launcher"]

_log = logging.getLogger("parawrap.launch")

_LEASE_S = 120.0  # the nodes end the launch if this process is silent for this long
_STACKS_S = 5.0


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
                backend.follow(number)
                start(launch)
        except BaseException:
            cancel_job(numbers[0].partition("_")[0])
            raise
        return launches

    def preview(self, job: Job) -> Preview:
        platform = job.platform
        text = script(platform, Folder.planned(platform.name))
        how = f"a job of {platform.n_nodes} node(s), {platform.ranks_per_node} rank(s) on each"
        return preview(job, "slurm", how, host="(the first node)", script=text)


launcher = _Slurm()


class _SlurmBackend:
    """One batch job and its folder. The folder is removed once the results were read or the launch is garbage-collected."""

    def __init__(self, job: Job, folder: Folder) -> None:
        self._job = job
        self._folder = folder
        self._remove_folder = weakref.finalize(self, folder.remove)
        self._answered = threading.Condition()
        self._stacks: dict[str, dict[int, str]] = {}
        self._requests = count()
        self._transcripts: Sequence[Transcript] = ()
        surroundings = Surroundings.here().without_environ()
        plan = Plan(job.name, job.sent_platform, surroundings, secrets.token_bytes(32), _LEASE_S)
        try:
            Parcel(job.packed()).put(folder.call)
            folder.write_plan(plan)
        except OSError as error:
            raise folder.unusable(error) from error

    def follow(self, number: str) -> None:
        """Note the number of the submitted job. Called before `supervise`."""
        self._number = number
        self._follower = JobFollower(number, self._job.name, self._job.platform, self._folder, self._handle)

    @property
    def has_begun(self) -> bool:
        return self._follower.has_begun

    def supervise(self, transcripts: Sequence[Transcript], on_begin: Callable[[], None]) -> Ending:
        self._transcripts = transcripts
        ending = self._follower.follow()
        if ending.cancelled:
            self._remove_folder()  # a cancelled launch has no results
        return ending

    def _handle(self, word: str, body: tuple[Any, ...]) -> None:
        if word == "output":
            rank, stream, data = body
            self._transcripts[rank].write(stream, data)
        elif word == "record":
            rank, text = body
            self._transcripts[rank].record(text)
        elif word == "log":
            _log.log(*body)
        elif word == "stacks":
            request, stacks = body
            with self._answered:
                self._stacks[request] = stacks
                self._answered.notify_all()

    def cancel(self) -> None:
        self._follower.cancel()

    def preempt(self) -> None:
        if not job_state(self._number).waits:
            self._folder.request(f"preempt-{next(self._requests)}")
            send_signal(self._number, "USR2")

    def state_of(self, rank: int) -> str:
        return "running"

    def stacks(self) -> dict[int, str]:
        if not self._follower.has_begun:
            return {}
        request = f"stacks-{next(self._requests)}"
        self._folder.request(request)
        with self._answered:
            self._answered.wait_for(lambda: request in self._stacks, _STACKS_S)
            return self._stacks.pop(request, {})
