"""The tasks of a launch's batch job: the first node's task supervises all ranks, and each other task runs a node agent.

The job ends if the submitting process gives no sign of life for `Plan.lease_s`.
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
from parawrap.launch.clusters._connections import Front, dial, interface_of, own_addresses
from parawrap.launch.clusters._node_agent import NodeAgent
from parawrap.launch.clusters._remote_node import ARRIVAL_S, await_nodes
from parawrap.launch.coordinator._attempts import Attempts
from parawrap.launch.coordinator._attempts_backend import assignments_of
from parawrap.launch.coordinator._ending import Ending
from parawrap.launch.coordinator._event_loop import Loop
from parawrap.launch.coordinator._store_host import open_store_host
from parawrap.launch.guard._guard import Guard, LocalGuard
from parawrap.launch.guard._start_methods import Starter, starter_named
from parawrap.launch.messages._first_rank_failure import Outcome, Raised, Returned
from parawrap.launch.messages._private_files import open_private
from parawrap.launch.rank._cluster_signals import FROM_CLUSTER, not_for_children
from parawrap.launch.rank._process_groups import LOOPBACK, StoreAddress
from parawrap.launch.slurm._commands import requeue_job
from parawrap.launch.slurm._launch_folder import Folder, Plan
from parawrap.launch.slurm._report_journal import Journal, JournalRecord, LogsIntoJournal

__all__ = ["ALIVE_S", "serve"]

ALIVE_S = 5.0
"""Seconds between two signs of life of the first node."""

_LOOK_S = 0.2
_NODES_PER_LOOK = 50  # with more nodes, each reads the shared folder less often


def serve(path: str, node: int, start: int, noted: list[int]) -> None:
    """Run this node's task until the launch, or this start of the job, ends.

    Args:
        path: The launch's folder.
        node: This node's number in the job.
        start: The number of earlier starts of the job.
        noted: Signals that this process received before parawrap was imported.
    """
    folder = Folder(Path(path))
    plan = folder.read_plan()
    _allow_open_files()
    starter = starter_named(plan.platform.spawn_method, not_for_children)
    with open_private(folder.call) as call:
        if node == 0:
            _Head(folder, plan, start, noted).run(starter, call.fileno())
        else:
            _run_agent(folder, plan, node, start, starter, call.fileno())


def _allow_open_files() -> None:
    """Raise the limit on open files to the maximum: the first node has several per node and rank."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _run_agent(folder: Folder, plan: Plan, node: int, start: int, starter: Starter, payload: int) -> None:
    """Connect to the first node and run this node's ranks for it.

    Raises:
        LaunchError: If the first node cannot be reached.
    """
    until = time.monotonic() + ARRIVAL_S
    while (address := folder.address(start, plan.token)) is None and time.monotonic() < until:
        time.sleep(_LOOK_S * max(1.0, plan.platform.n_nodes / _NODES_PER_LOOK))
    wire = None if address is None else dial(address, until - time.monotonic())
    if wire is None:
        tried = "it published no address" if address is None else f"tried {', '.join(address.hosts)}, port {address.port}"
        msg = f"node {node} ({socket.gethostname()}) cannot reach node 0: {tried}"
        folder.write_trouble(start, node, msg)
        raise LaunchError(msg)
    NodeAgent(wire, node, starter, payload, plan.platform.grace_s, partial(folder.parcel, start)).run()


class _Head:
    """The first node's task. Its main thread supervises the ranks; a second thread reads requests from the folder."""

    def __init__(self, folder: Folder, plan: Plan, start: int, noted: list[int]) -> None:
        self._folder = folder
        self._plan = plan
        self._platform = plan.platform
        self._start = start
        self._journal = Journal(folder.journal(start))
        logging.getLogger("parawrap.launch").addHandler(LogsIntoJournal(self._journal))
        self._run: Attempts | None = None
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

    def run(self, starter: Starter, payload: int) -> None:
        """Run the ranks and write the ending to the journal. Requeue the job if the ranks called ``requeue()``."""
        listener = threading.Thread(target=self._handle_requests, name="parawrap-requests", daemon=True)
        listener.start()
        try:
            with ExitStack() as cleanup:
                ending = self._watched(starter, payload, cleanup)
        except (LaunchError, OSError) as error:
            ending = Ending({}, cancelled=self._cancelled.is_set(), broken=str(error))
        if ending.requeued:
            ending = self._requeued(ending)
        self._report(self._with_parcels_in_files(ending))
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
            msg = "a node was lost, and Slurm started the job again; set max_restarts to allow this"
            raise LaunchError(msg)
        hosts = own_addresses() if platform.n_nodes > 1 else [LOOPBACK]
        hosts = hosts if platform.master_addr is None else [platform.master_addr]
        meeting = cleanup.enter_context(open_store_host(platform, hosts[0], self._folder.path / f"store-{self._start}"))
        loop = Loop()
        nodes: list[Guard] = [LocalGuard(loop, starter, payload), *self._others(loop, hosts)]
        self._journal.add("hosts", [node.host for node in nodes])
        run = Attempts(
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

    def _others(self, loop: Loop, hosts: Sequence[str]) -> Sequence[Guard]:
        """Wait for the other nodes and return them."""
        front = Front(hosts, self._plan.token)
        try:
            self._folder.write_address(self._start, front.address)
            return await_nodes(front, loop, range(1, self._platform.n_nodes), self._check_arrival)
        finally:
            front.close()

    def _check_arrival(self) -> None:
        if self._cancelled.is_set():
            msg = "cancelled while nodes were connecting"
            raise LaunchError(msg)
        if troubles := self._folder.troubles(self._start):
            raise LaunchError("; ".join(troubles))

    def _report(self, ending: Ending) -> None:
        try:
            self._journal.add("ending", ending)
        except LaunchError as error:
            self._folder.write_trouble(self._start, 0, str(error))

    def _with_parcels_in_files(self, ending: Ending) -> Ending:
        """Write results and exceptions to files in the folder. Return the ending with their paths."""
        path_of = partial(self._folder.parcel, self._start)
        try:
            outcomes = {rank: _put(outcome, path_of(rank)) for rank, outcome in ending.outcomes.items()}
        except OSError as error:
            return replace(ending, outcomes={}, requeued=False, broken=str(self._folder.unusable(error)))
        return replace(ending, outcomes=outcomes)

    def _requeued(self, ending: Ending) -> Ending:
        self._folder.mark_preempted(self._start)
        reason = requeue_job(os.environ["SLURM_JOB_ID"])
        broken = replace(ending, requeued=False, broken=f"Slurm refused to requeue the job: {reason}")
        return ending if reason is None else broken

    # -- signals and requests

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Preempt the ranks: Slurm is about to end the job, or `preempt` simulates it. A lost node also causes SIGTERM."""
        self._signal = signal.Signals(number).name  # the other thread writes it to the journal: a handler must not block
        self._preempted = True
        with contextlib.suppress(OSError):  # ranks must be able to save even if the folder is full
            if number == signal.SIGUSR2:
                self._folder.mark_preempted(self._start)
        if self._run is not None:
            self._run.preempt(ends_late=self._is_rehearsal())

    def _is_rehearsal(self) -> bool:
        """True if `preempt` requested the signal. After any other signal, Slurm itself ends the job."""
        before = self._rehearsals
        with contextlib.suppress(OSError):
            self._rehearsals = self._folder.rehearsals()
        return self._rehearsals > before

    def _handle_requests(self) -> None:
        seen: set[str] = set()
        sign, signed_at, reported_at = None, time.monotonic(), time.monotonic()
        while not self._ended.wait(_LOOK_S):
            if self._signal is not None:
                self._journal.add("signal", self._signal)
                self._signal = None
            if time.monotonic() - reported_at > ALIVE_S:
                reported_at = time.monotonic()
                self._journal.add("alive")
            now = sign
            with contextlib.suppress(OSError):  # the lease ends if the file system fails for long
                for request in set(self._folder.requests()) - seen:
                    seen.add(request)
                    self._handle(request)
                now = self._folder.sign_of_life()
            if now != sign:
                sign, signed_at = now, time.monotonic()
            elif time.monotonic() - signed_at > self._plan.lease_s:
                self._is_forgotten = True
                self._cancel()

    def _handle(self, request: str) -> None:
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


def _interface(platform: Platform, meeting: StoreAddress | None) -> str | None:
    """Return the network interface for connections to other nodes. None leaves the choice to torch.distributed."""
    return None if platform.n_nodes == 1 or meeting is None or meeting.host is None else interface_of(meeting.host)
