"""Ranks on the nodes of a Slurm cluster, in a batch job that submitit hands over.

The job and this process share a folder and nothing else: the call lies there, the first node writes there what its ranks
write and come to, and this process asks there for what it wants. Signals, requeueing and the job's end are Slurm's.
"""

from __future__ import annotations

import logging
import secrets
import threading
import weakref
from itertools import count
from typing import Any

from parawrap.launch._job import Job, Preview, preview
from parawrap.launch._results import Launch, RankResults, State
from parawrap.launch.clusters._batch import script, submit
from parawrap.launch.clusters._folder import Folder, Plan
from parawrap.launch.clusters._job_follower import JobFollower
from parawrap.launch.clusters._queue import send_signal
from parawrap.launch.parcels._outcomes import Parcel
from parawrap.launch.ranks._assignment import Surroundings
from parawrap.launch.watch._ending import Ending
from parawrap.launch.watch._launch import WatchedLaunch

__all__ = ["launcher"]

_log = logging.getLogger("parawrap.launch")

_LEASE_S = 120.0  # how long the nodes go on without a sign of this process
_STACKS_S = 5.0


class _Slurm:
    """The launcher."""

    def launch(self, job: Job) -> Launch[Any]:
        return _SlurmLaunch(job)

    def preview(self, job: Job) -> Preview:
        platform = job.platform
        text = script(platform, Folder.planned(platform.name))
        how = f"a job of {platform.n_nodes} node(s), {platform.ranks_per_node} rank(s) on each"
        return preview(job, "slurm", how, host="(the first node)", script=text)


launcher = _Slurm()


class _SlurmLaunch(WatchedLaunch):
    """One batch job, and its folder, which stays until the results were read or nobody can read them any more."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._folder = Folder.new(job.platform.name)
        self._remove_folder = weakref.finalize(self, self._folder.remove)
        self._answered = threading.Condition()
        self._stacks: dict[str, dict[int, str]] = {}
        self._requests = count()
        try:
            self._number = self._submitted(job)
        except BaseException:
            self._remove_folder()
            raise
        self._follower = JobFollower(self._number, job.name, job.platform, self._folder, self._take)
        self._begin_watch()

    def _submitted(self, job: Job) -> str:
        surroundings = Surroundings.here().without_environ()
        plan = Plan(job.name, job.sent_platform, surroundings, secrets.token_bytes(32), _LEASE_S)
        try:
            Parcel(job.packed()).put(self._folder.call)
            self._folder.write_plan(plan)
        except OSError as error:
            raise self._folder.unusable(error) from error
        return submit(job.platform, self._folder)

    # -- the thread that watches

    def _watched(self) -> Ending:
        ending = self._follower.follow()
        if ending.cancelled:
            self._remove_folder()  # nobody has anything to read there
        return ending

    def _take(self, word: str, told: tuple[Any, ...]) -> None:
        if word == "output":
            rank, stream, data = told
            self._transcripts[rank].write(stream, data)
        elif word == "record":
            rank, text = told
            self._transcripts[rank].record(text)
        elif word == "log":
            _log.log(*told)
        elif word == "stacks":
            request, stacks = told
            with self._answered:
                self._stacks[request] = stacks
                self._answered.notify_all()

    # -- from any thread

    def _results(self) -> RankResults[Any] | BaseException:
        try:
            return super()._results()
        finally:
            self._remove_folder()

    def _request_cancel(self) -> None:
        if not self.done():
            self._follower.cancel()

    def preempt(self) -> None:
        if not self.done():
            self._folder.request(f"preempt-{next(self._requests)}")
            send_signal(self._number, "USR2")

    @property
    def state(self) -> State:
        state = super().state
        return "pending" if state == "running" and not self._follower.has_begun else state

    def stacks(self) -> dict[int, str]:
        if self.done() or not self._follower.has_begun:
            return {}
        request = f"stacks-{next(self._requests)}"
        self._folder.request(request)
        with self._answered:
            self._answered.wait_for(lambda: request in self._stacks or self.done(), _STACKS_S)
            return self._stacks.pop(request, {})
