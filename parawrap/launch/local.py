"""The local launcher: ranks are processes on this machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from parawrap.errors import LaunchError
from parawrap.launch._packed_call import Job, Preview, preview
from parawrap.launch._system_limits import explain_error
from parawrap.launch.coordinator._attempts import Attempts
from parawrap.launch.coordinator._attempts_backend import AttemptsBackend, assignments_of
from parawrap.launch.coordinator._event_loop import Loop
from parawrap.launch.coordinator._launch import Launch, await_ranks, start
from parawrap.launch.coordinator._store_host import open_store_host
from parawrap.launch.coordinator._transcript import Transcript
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
        """Start the ranks, and return once they are started."""
        try:
            backend = _LocalBackend(job)
            try:
                launch: Launch[Any] = Launch(job, backend)
                start(launch)
            except LaunchError:
                backend.close()
                raise
            await_ranks(launch)
        except OSError as error:
            msg = f"{job.name} cannot be launched: {explain_error(error)}"
            raise LaunchError(msg) from error
        return launch

    def preview(self, job: Job) -> Preview:
        how = _HOW[job.platform.spawn_method]
        return preview(job, "local", f"{job.platform.world_size} processes on this machine, {how}")


launcher = _Local()


class _LocalBackend(AttemptsBackend):
    """The ranks of one launch on this machine."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._starter = starter_named(job.platform.spawn_method)  # first: the warm process starts in the background
        self._payload = job.packed()
        self._surroundings = Surroundings.here()

    def close(self) -> None:
        """Close the file of the call. Only for a launch that does not start."""
        os.close(self._payload)

    def _begin(self, transcripts: Sequence[Transcript], cleanup: ExitStack) -> Attempts:
        cleanup.callback(self.close)
        meeting = cleanup.enter_context(open_store_host(self._platform))
        line = self._job.line
        assignments = assignments_of(
            self._platform, meeting, self._surroundings, may_idle=line is not None, stays=self._job.calls is not None
        )
        loop = Loop()
        guard = LocalGuard(loop, self._starter, self._payload, line)
        attempts = Attempts(self._job.name, self._platform, loop, [guard], assignments, transcripts, calls=self._job.calls)
        attempts.begin()
        return attempts
