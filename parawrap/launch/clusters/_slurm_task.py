"""What runs in each task of a launch's batch job: the watch over all ranks on the first node, a keeper on each other.

What it guarantees: when the submitting process is gone for the time of its lease, the job ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType

from parawrap.errors import LaunchError
from parawrap.launch._platform import Platform
from parawrap.launch.clusters._folder import Folder, Plan
from parawrap.launch.clusters._journal import Journal, JournalRecord, LogsIntoJournal
from parawrap.launch.clusters._network import Front, dial, interface_of, own_addresses
from parawrap.launch.clusters._node_agent import NodeAgent
from parawrap.launch.clusters._node_arrival import GATHERING_S, await_nodes
from parawrap.launch.clusters._queue import requeue_job
from parawrap.launch.parcels._outcomes import Outcome, Raised, Returned
from parawrap.launch.parcels._private_files import open_private
from parawrap.launch.ranks._groups import LOOPBACK, Rendezvous
from parawrap.launch.ranks._signals import FROM_CLUSTER, not_for_children
from parawrap.launch.watch._ending import Ending
from parawrap.launch.watch._launch import assignments_of
from parawrap.launch.watch._local_node import LocalNode, Node
from parawrap.launch.watch._loop import Loop
from parawrap.launch.watch._rendezvous import open_rendezvous
from parawrap.launch.watch._run import Run
from parawrap.launch.watch._starters import Starter, starter_named

__all__ = ["ALIVE_S", "serve"]

ALIVE_S = 5.0
"""How often the first node tells that it lives."""

_LOOK_S = 0.2
_NODES_A_LOOK = 50  # the more nodes look into one folder, the less often each does


def serve(path: str, node: int, start: int, noted: list[int]) -> None:
    """Be this node's task, to the end of the launch or of this start of the job.

    Args:
        path: the launch's folder.
        node: this node's number in the job.
        start: how often the job was started before.
        noted: signals that have come already.
    """
    folder = Folder(Path(path))
    plan = folder.read_plan()
    _allow_open_files()
    starter = starter_named(plan.platform.spawn_method, not_for_children)
    with open_private(folder.call) as call:
        if node == 0:
            _Head(folder, plan, start, noted).serve(starter, call.fileno())
        else:
            _keep(folder, plan, node, start, starter, call.fileno())


def _allow_open_files() -> None:
    """As many as there may be: a node that watches has some for every node and rank."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _keep(folder: Folder, plan: Plan, node: int, start: int, starter: Starter, payload: int) -> None:
    """Keep this node for the first one."""
    until = time.monotonic() + GATHERING_S
    while (address := folder.address(start, plan.token)) is None and time.monotonic() < until:
        time.sleep(_LOOK_S * max(1.0, plan.platform.n_nodes / _NODES_A_LOOK))
    wire = None if address is None else dial(address, until - time.monotonic())
    if wire is None:
        where = "nowhere to be found" if address is None else f"at none of {', '.join(address.hosts)}, port {address.port}"
        msg = f"node {node} ({socket.gethostname()}) cannot reach node 0: it is {where}"
        folder.write_trouble(start, node, msg)
        raise LaunchError(msg)
    NodeAgent(wire, node, starter, payload, plan.platform.grace_s, partial(folder.parcel, start)).keep()


class _Head:
    """The first node's task. Its main thread watches; another looks for requests in the folder."""

    def __init__(self, folder: Folder, plan: Plan, start: int, noted: list[int]) -> None:
        self._folder = folder
        self._plan = plan
        self._platform = plan.platform
        self._start = start
        self._journal = Journal(folder.journal(start))
        logging.getLogger("parawrap.launch").addHandler(LogsIntoJournal(self._journal))
        self._run: Run | None = None
        self._ended = threading.Event()
        self._cancelled = threading.Event()
        self._signal: str | None = None
        self._preempted = False
        self._rehearsals = 0
        self._is_forgotten = False
        for number in FROM_CLUSTER:
            signal.signal(number, self._on_signal)
        for early in noted:
            self._on_signal(early, None)

    def serve(self, starter: Starter, payload: int) -> None:
        """Watch the ranks to their end, tell how it was, and have the job requeued where they want to go on."""
        listener = threading.Thread(target=self._look_for_requests, name="parawrap-requests", daemon=True)
        listener.start()
        try:
            with ExitStack() as cleanup:
                ending = self._watched(starter, payload, cleanup)
        except (LaunchError, OSError) as error:
            ending = Ending({}, cancelled=self._cancelled.is_set(), broken=str(error))
        if ending.requeued:
            ending = self._requeued(ending)
        self._tell(self._sent(ending))
        self._ended.set()
        listener.join()
        self._journal.close()
        if self._is_forgotten:
            self._folder.remove()

    def _watched(self, starter: Starter, payload: int, cleanup: ExitStack) -> Ending:
        platform = self._platform
        restart, failures, self._rehearsals = self._folder.restarts()
        if self._start and not self._folder.was_preempted(self._start - 1):
            restart, failures = restart + 1, failures + 1
        if failures > platform.max_restarts:
            msg = "a node was lost, and Slurm started the job again; give max_restarts for that to be allowed"
            raise LaunchError(msg)
        hosts = own_addresses() if platform.n_nodes > 1 else [LOOPBACK]
        hosts = hosts if platform.master_addr is None else [platform.master_addr]
        meeting = cleanup.enter_context(open_rendezvous(platform, hosts[0], self._folder.path / f"store-{self._start}"))
        loop = Loop()
        nodes: list[Node] = [LocalNode(loop, starter, payload), *self._others(loop, hosts)]
        self._journal.add("hosts", [node.host for node in nodes])
        run = Run(
            self._plan.name,
            platform,
            loop,
            nodes,
            assignments_of(platform, meeting, self._plan.surroundings, interface=_interface(platform, meeting)),
            [JournalRecord(self._journal, rank) for rank in range(platform.world_size)],
            restart=max(restart, self._start),
            failures=failures,
            requeues=True,
        )
        run.begin()
        self._run = run
        if self._cancelled.is_set():
            run.cancel()
        if self._preempted:
            run.preempt(ends_late=self._is_rehearsal())
        ending = run.run()
        self._folder.note_restarts(run.restart + 1, run.failures, self._rehearsals)
        return ending

    def _others(self, loop: Loop, hosts: Sequence[str]) -> Sequence[Node]:
        """The other nodes, once all of them have called."""
        front = Front(hosts, self._plan.token)
        try:
            self._folder.write_address(self._start, front.address)
            return await_nodes(front, loop, range(1, self._platform.n_nodes), self._check_gathering, GATHERING_S)
        finally:
            front.close()

    def _check_gathering(self) -> None:
        if self._cancelled.is_set():
            msg = "cancelled while the nodes await_nodes"
            raise LaunchError(msg)
        if troubles := self._folder.troubles(self._start):
            raise LaunchError("; ".join(troubles))

    def _tell(self, ending: Ending) -> None:
        try:
            self._journal.add("ending", ending)
        except LaunchError as error:
            self._folder.write_trouble(self._start, 0, str(error))

    def _sent(self, ending: Ending) -> Ending:
        """The ending, with what ranks returned and raised in files of the folder."""
        path_of = partial(self._folder.parcel, self._start)
        try:
            outcomes = {rank: _put(outcome, path_of(rank)) for rank, outcome in ending.outcomes.items()}
        except OSError as error:
            return replace(ending, outcomes={}, requeued=False, broken=str(self._folder.unusable(error)))
        return replace(ending, outcomes=outcomes)

    def _requeued(self, ending: Ending) -> Ending:
        self._folder.mark_preempted(self._start)
        reason = requeue_job(os.environ["SLURM_JOB_ID"])
        broken = replace(ending, requeued=False, broken=f"Slurm does not requeue the job: {reason}")
        return ending if reason is None else broken

    # -- what comes from outside

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Slurm is about to end the job, or `preempt` rehearses that. SIGTERM comes also where a node is lost."""
        self._signal = signal.Signals(number).name  # for the journal, which a handler must not wait for
        self._preempted = True
        with contextlib.suppress(OSError):  # ranks save all the same where the folder is full
            if number == signal.SIGUSR2:
                self._folder.mark_preempted(self._start)
        if self._run is not None:
            self._run.preempt(ends_late=self._is_rehearsal())

    def _is_rehearsal(self) -> bool:
        """Whether the signal was asked for. After any other Slurm itself ends what is left, by its own clock."""
        before = self._rehearsals
        with contextlib.suppress(OSError):
            self._rehearsals = self._folder.rehearsals()
        return self._rehearsals > before

    def _look_for_requests(self) -> None:
        seen: set[str] = set()
        sign, signed_at, told_at = None, time.monotonic(), time.monotonic()
        while not self._ended.wait(_LOOK_S):
            if self._signal is not None:
                self._journal.add("signal", self._signal)
                self._signal = None
            if time.monotonic() - told_at > ALIVE_S:
                told_at = time.monotonic()
                self._journal.add("alive")
            now = sign
            with contextlib.suppress(OSError):  # a file system that fails for long ends the lease
                self._grant_new_requests(seen)
                now = self._folder.sign_of_life()
            if now != sign:
                sign, signed_at = now, time.monotonic()
            elif time.monotonic() - signed_at > self._plan.lease_s:
                self._is_forgotten = True
                self._cancel()

    def _grant_new_requests(self, seen: set[str]) -> None:
        for request in set(self._folder.requests()) - seen:
            seen.add(request)
            self._grant(request)

    def _grant(self, request: str) -> None:
        if request == "cancel":
            self._cancel()
        elif request.startswith("stacks-") and self._run is not None:
            self._journal.add("stacks", request, self._run.stacks())

    def _cancel(self) -> None:
        self._cancelled.set()
        if self._run is not None:
            self._run.cancel()


def _put(outcome: Outcome, path: Path) -> Outcome:
    if isinstance(outcome, Returned):
        return replace(outcome, value=outcome.value.put(path))
    if isinstance(outcome, Raised):
        return replace(outcome, error=outcome.error.put(path))
    return outcome


def _interface(platform: Platform, meeting: Rendezvous | None) -> str | None:
    """By which the ranks of this node reach those of others."""
    return None if platform.n_nodes == 1 or meeting is None or meeting.host is None else interface_of(meeting.host)
