"""Ranks as processes on this machine."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any

from parawrap.launch._job import Job, Preview, preview
from parawrap.launch._results import Launch
from parawrap.launch.ranks._assignment import Surroundings
from parawrap.launch.watch._launch import RunLaunch, assignments_of
from parawrap.launch.watch._local_node import LocalNode
from parawrap.launch.watch._loop import Loop
from parawrap.launch.watch._rendezvous import open_rendezvous
from parawrap.launch.watch._run import Run
from parawrap.launch.watch._starters import starter_named
from parawrap.launch.watch._transcript import Transcript

__all__ = ["launcher"]

_HOW = {
    "forkserver": "forked from a warm process",
    "spawn": "a fresh interpreter each",
    "fork": "forked from this process",
}


class _Local:
    """The launcher."""

    def launch(self, job: Job) -> Launch[Any]:
        starter = starter_named(job.platform.spawn_method)  # first: it needs time

        def begin(transcripts: list[Transcript], cleanup: ExitStack) -> Run:
            payload = job.packed()
            cleanup.callback(os.close, payload)
            meeting = cleanup.enter_context(open_rendezvous(job.platform))
            orders = assignments_of(job.platform, meeting, Surroundings.here())
            loop = Loop()
            run = Run(job.name, job.platform, loop, [LocalNode(loop, starter, payload)], orders, transcripts)
            run.begin()
            return run

        return RunLaunch(job, begin)

    def preview(self, job: Job) -> Preview:
        how = _HOW[job.platform.spawn_method]
        return preview(job, "local", f"{job.platform.world_size} processes on this machine, {how}")


launcher = _Local()
