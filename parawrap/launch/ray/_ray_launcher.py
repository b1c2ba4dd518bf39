"""The Ray launcher: ranks run on the nodes of a Ray cluster.

Ray reserves the resources and starts one actor per node, which runs the guard of the node's ranks. This process supervises
the ranks through the actors. If this process dies, Ray ends the actors, and their guards end the ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from parawrap.errors import LaunchError
from parawrap.launch._addresses import interface_of
from parawrap.launch._packed_call import Job, Preview, preview
from parawrap.launch.coordinator._attempts import Attempts
from parawrap.launch.coordinator._attempts_backend import AttemptsBackend, assignments_of
from parawrap.launch.coordinator._ending import Ending
from parawrap.launch.coordinator._event_loop import Loop
from parawrap.launch.coordinator._launch import Launch, start
from parawrap.launch.coordinator._store_host import open_store_host
from parawrap.launch.coordinator._transcript import Transcript
from parawrap.launch.rank._process_groups import LOOPBACK
from parawrap.launch.rank._rank_assignment import Surroundings
from parawrap.launch.ray._node_actor import address_of_node
from parawrap.launch.ray._ray_guard import RayGuard
from parawrap.launch.ray._reservation import Reservation, join_cluster

__all__ = ["launcher"]

_LOOK_S = 0.2  # short against the seconds in which Ray starts an actor
_LEAVING_S = 10.0  # for the guard processes to end, which have no ranks left


class _Ray:
    """Launches on a Ray cluster."""

    def launch(self, job: Job) -> Launch[Any]:
        """Check that the cluster is large enough, and return without waiting for its resources."""
        launch: Launch[Any] = Launch(job, _RayBackend(job))
        start(launch)
        return launch

    def preview(self, job: Job) -> Preview:
        platform = job.platform
        strategy = "each on another machine" if platform.n_nodes > 1 else "on one machine"
        how = f"{platform.n_nodes} bundle(s), {strategy}, {platform.ranks_per_node} rank(s) in each"
        return preview(job, "ray", how, host="(this process)")


launcher = _Ray()


class _Cancelled(Exception):  # noqa: N818 (control flow, not an error)
    """The launch was cancelled before its ranks started."""


class _RayBackend(AttemptsBackend):
    """The ranks of one launch on Ray. `supervise` waits for resources and nodes, then runs the ranks."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._surroundings = Surroundings.here().without_environ()
        with os.fdopen(job.packed(), "rb") as packed:
            packed.seek(0)
            self._payload = packed.read()
        self._ray = join_cluster(job.platform)
        self._reservation = Reservation(self._ray, job.platform)

    def supervise(self, transcripts: Sequence[Transcript], on_begin: Callable[[], None]) -> Ending:
        try:
            return super().supervise(transcripts, on_begin)
        except _Cancelled:
            return Ending({}, cancelled=True)

    def _begin(self, transcripts: Sequence[Transcript], cleanup: ExitStack) -> Attempts:
        loop, guards = Loop(), list[RayGuard]()
        try:
            cleanup.callback(self._reservation.end)
            cleanup.callback(self._await_end, guards)
            self._start_guards(loop, guards)
            platform, here = self._platform, address_of_node(self._ray)
            is_local = platform.master_addr is None and all(guard.address == here for guard in guards)
            host = platform.master_addr or (LOOPBACK if is_local else here)
            meeting = cleanup.enter_context(open_store_host(platform, host))
            interface = interface_of(LOOPBACK) if is_local else None
            assignments = assignments_of(
                platform, meeting, self._surroundings, interface=interface, stays=self._job.calls is not None
            )
            attempts = Attempts(self._job.name, platform, loop, guards, assignments, transcripts, calls=self._job.calls)
        except BaseException:
            for guard in guards:
                guard.close()
            loop.close()
            raise
        attempts.begin()
        return attempts

    def _start_guards(self, loop: Loop, guards: list[RayGuard]) -> None:
        """Request the resources, and wait until the guard of each node has started.

        Raises:
            LaunchError: If a guard cannot be started, or Ray was shut down.
        """
        self._reservation.request()
        payload = self._ray.put(self._payload)
        self._payload = b""
        start = partial(self._reservation.start_actor, payload=payload)
        guards.extend(RayGuard(self._ray, loop, number, start) for number in range(self._platform.n_nodes))
        while not all(guard.has_started for guard in guards):
            if self._cancelled.is_set():
                raise _Cancelled
            self._reservation.check_ray()
            for number, guard in enumerate(guards):
                if guard.failure is not None:
                    msg = f"node {number}: {guard.failure}"
                    raise LaunchError(msg)
            loop.turn(_LOOK_S)

    def _await_end(self, guards: list[RayGuard]) -> None:
        """Wait until the closed guards have ended."""
        endings = [guard.ending for guard in guards if guard.ending is not None]
        if endings and self._ray.is_initialized():
            self._ray.wait(endings, num_returns=len(endings), timeout=_LEAVING_S)
