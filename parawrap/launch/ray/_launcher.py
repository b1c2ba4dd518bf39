"""The Ray launcher: ranks run on the nodes of a Ray cluster.

Ray reserves the resources and starts one node agent per node. This process supervises the ranks over a connection to each
agent. If this process dies, Ray ends the agents, and they end their ranks.
"""

from __future__ import annotations

import os
import secrets
from contextlib import ExitStack
from typing import Any

from parawrap.launch._launch_handle import Launch, State
from parawrap.launch._packed_call import Job, Preview, preview
from parawrap.launch.clusters._connections import Front, own_addresses
from parawrap.launch.clusters._remote_node import RemoteNode, await_nodes
from parawrap.launch.coordinator._attempts import Attempts
from parawrap.launch.coordinator._ending import Ending
from parawrap.launch.coordinator._event_loop import Loop
from parawrap.launch.coordinator._store_host import open_store_host
from parawrap.launch.coordinator._watched_launch import RunLaunch, assignments_of
from parawrap.launch.rank._rank_assignment import Surroundings
from parawrap.launch.ray._reservation import Reservation, joined

__all__ = ["launcher"]


class _Ray:
    """Launches on a Ray cluster."""

    def launch(self, job: Job) -> Launch[Any]:
        return _RayLaunch(job)

    def preview(self, job: Job) -> Preview:
        platform = job.platform
        strategy = "each on another machine" if platform.n_nodes > 1 else "on one machine"
        how = f"{platform.n_nodes} bundle(s), {strategy}, {platform.ranks_per_node} rank(s) in each"
        return preview(job, "ray", how, host="(this process)")


launcher = _Ray()


class _Cancelled(Exception):  # noqa: N818 (control flow, not an error)
    """The launch was cancelled before its ranks started."""


class _RayLaunch(RunLaunch):
    """One launch on Ray. Its thread waits for resources and nodes, then runs the ranks."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._surroundings = Surroundings.here().without_environ()
        with os.fdopen(job.packed(), "rb") as packed:
            packed.seek(0)
            self._payload = packed.read()
        self._reservation = Reservation(joined(job.platform), job.platform)
        self._begin_watch()

    def _watched(self) -> Ending:
        try:
            return super()._watched()
        except _Cancelled:
            return Ending({}, cancelled=True)

    def _begun(self, cleanup: ExitStack) -> Attempts:
        platform = self._platform
        cleanup.callback(self._reservation.end)
        while not self._reservation.is_ready():
            self._check_cancelled()
        hosts = [platform.master_addr] if platform.master_addr else self._reservation.addresses(own_addresses())
        meeting = cleanup.enter_context(open_store_host(platform, hosts[0]))
        loop = Loop()
        nodes = self._connect(loop, hosts)
        orders = assignments_of(platform, meeting, self._surroundings)
        run = Attempts(self._job.name, platform, loop, nodes, orders, self._transcripts)
        run.begin()
        return run

    def _connect(self, loop: Loop, hosts: list[str]) -> list[RemoteNode]:
        front = Front(hosts, secrets.token_bytes(32))
        try:
            self._reservation.start_agents(front.address, self._payload)
            self._payload = b""  # Ray has its own copy
            return await_nodes(front, loop, range(self._platform.n_nodes), self._check_arrival)
        except BaseException:
            loop.close()
            raise
        finally:
            front.close()

    def _check_arrival(self) -> None:
        self._check_cancelled()
        self._reservation.check()

    def _check_cancelled(self) -> None:
        if self._cancelled.is_set():
            raise _Cancelled

    @property
    def state(self) -> State:
        state = super().state
        return "pending" if state == "running" and self._run_of_ranks is None else state
