"""Launchers: the part of a launch that differs between this machine, clusters, and worlds that exist already."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Protocol, cast

from parawrap.launch._job import Job, Preview
from parawrap.launch._platform import Platform
from parawrap.launch._registry import LAUNCHERS
from parawrap.launch._results import Launch
from parawrap.launch._world import surrounding_world

__all__ = ["Launcher", "launch", "launch_array", "preview", "runs_here"]


class Launcher(Protocol):
    """Starts ranks. It has no state, so any thread may use it.

    A launcher may also have ``launch_all(jobs, max_parallel) -> list[Launch]``, which submits jobs together.
    """

    def launch(self, job: Job) -> Launch[Any]:
        """Start the ranks of a job, and return without waiting for them.

        Raises:
            LaunchError: If they cannot be started. Nothing of the attempt is left then.
        """
        ...

    def preview(self, job: Job) -> Preview:
        """Return the preview of a launch."""
        ...


def launch(job: Job) -> Launch[Any]:
    """Start a job's ranks with the launcher of its platform."""
    return _launcher_for(job.platform).launch(job)


def launch_array(jobs: Sequence[Job], max_parallel: int | None) -> list[Launch[Any]] | None:
    """Submit jobs of one platform together, as a job array; None if the platform's launcher has no arrays.

    Raises:
        LaunchError: If they cannot be submitted. Nothing of the attempt is left then.
    """
    launch_all: Any = getattr(_launcher_for(jobs[0].platform), "launch_all", None)
    return None if launch_all is None else launch_all(jobs, max_parallel)


def runs_here(job: Job) -> bool:
    """True if a job's ranks share this machine, or are the processes of a world that exists already."""
    return _name_for(job.platform) in ("local", "env")


def preview(job: Job) -> Preview:
    """Return the preview of a launch."""
    return _launcher_for(job.platform).preview(job)


def _launcher_for(platform: Platform) -> Launcher:
    return cast("Launcher", importlib.import_module(LAUNCHERS[_name_for(platform)]).launcher)


def _name_for(platform: Platform) -> str:
    return platform.launcher or ("local" if surrounding_world() is None else "env")
