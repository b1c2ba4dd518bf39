"""The local launcher: ranks are processes on this machine."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any

from parawrap.errors import LaunchError
from parawrap.launch._launch_handle import Launch
from parawrap.launch._packed_call import Job, Preview, preview
from parawrap.launch._system_limits import explained
from parawrap.launch.coordinator._attempts import Attempts
from parawrap.launch.coordinator._event_loop import Loop
from parawrap.launch.coordinator._store_host import open_store_host
from parawrap.launch.coordinator._watched_launch import RunLaunch, assignments_of
from parawrap.launch.guard._guard import LocalGuard
from parawrap.launch.guard._start_methods import starter_named
from parawrap.launch.rank._rank_assignment import Surroundings

__all__ = ["launcher"]

_HOW = {
    "forkserver": "forked from a warm process",
    "spawn": "a fresh interpreter each",
    "fork": "forked from this process",
}


class _Local:
    """Launches on this machine."""

    def launch(self, job: Job) -> Launch[Any]:
        try:
            return _LocalLaunch(job)
        except OSError as error:
            msg = f"{job.name} cannot be launched: {explained(error)}"
            raise LaunchError(msg) from error

    def preview(self, job: Job) -> Preview:
        how = _HOW[job.platform.spawn_method]
        return preview(job, "local", f"{job.platform.world_size} processes on this machine, {how}")


launcher = _Local()


class _LocalLaunch(RunLaunch):
    """A launch on this machine. The constructor returns once the ranks are started, or raises."""

    def __init__(self, job: Job) -> None:
        self._starter = starter_named(job.platform.spawn_method)  # first: the warm process starts in the background
        self._payload = job.packed()
        self._surroundings = Surroundings.here()
        try:
            super().__init__(job)
            self._begin_watch()
        except LaunchError:
            os.close(self._payload)
            raise
        self._await_begin()

    def _begun(self, cleanup: ExitStack) -> Attempts:
        cleanup.callback(os.close, self._payload)
        meeting = cleanup.enter_context(open_store_host(self._platform))
        line = self._job.line
        assignments = assignments_of(self._platform, meeting, self._surroundings, may_idle=line is not None)
        loop = Loop()
        node = LocalGuard(loop, self._starter, self._payload, line)
        run = Attempts(self._job.name, self._platform, loop, [node], assignments, self._transcripts)
        run.begin()
        return run
