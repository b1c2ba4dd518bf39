"""What a launcher is: the one thing that differs between this machine, a cluster and a world that is there already."""

from __future__ import annotations

import importlib
from typing import Any, Protocol, cast

from parawrap.launch._job import Job, Preview
from parawrap.launch._platform import Platform
from parawrap.launch._registry import LAUNCHERS
from parawrap.launch._results import Launch
from parawrap.launch._world import surrounding_world

__all__ = ["Launcher", "launch", "preview"]


class Launcher(Protocol):
    """Starts ranks somewhere. Without state: any thread may use it at any time."""

    def launch(self, job: Job) -> Launch[Any]:
        """Start the ranks of a job, and return without waiting for them.

        Raises:
            LaunchError: they cannot be started; nothing is left of the attempt.
        """
        ...

    def preview(self, job: Job) -> Preview:
        """What `launch` would do."""
        ...


def launch(job: Job) -> Launch[Any]:
    """Start a job's ranks by the launcher that its platform names, or that the environment calls for."""
    return _launcher_for(job.platform).launch(job)


def preview(job: Job) -> Preview:
    """What `launch` would start."""
    return _launcher_for(job.platform).preview(job)


def _launcher_for(platform: Platform) -> Launcher:
    name = platform.launcher or ("local" if surrounding_world() is None else "env")
    return cast("Launcher", importlib.import_module(LAUNCHERS[name]).launcher)
