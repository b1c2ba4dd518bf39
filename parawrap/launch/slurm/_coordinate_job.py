"""The coordinator of one attempt. It runs in two threads of rank 0's task.

Each guard reports on its rank through a common queue in the attempt's store, and takes orders from a second queue. Requests
of the submitting process come through the launch folder.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist

from parawrap.errors import LaunchError
from parawrap.launch._addresses import list_addresses
from parawrap.launch.coordinator._attempts import Attempts
from parawrap.launch.coordinator._attempts_backend import assignments_of
from parawrap.launch.coordinator._ending import Ending
from parawrap.launch.coordinator._event_loop import Loop
from parawrap.launch.coordinator._store_host import open_store_host
from parawrap.launch.guard._guard import Watcher
from parawrap.launch.messages._first_rank_failure import Died, Raised, first_rank_failure
from parawrap.launch.rank._process_groups import LOOPBACK
from parawrap.launch.rank._rank_assignment import Assignment
from parawrap.launch.rank._signed_values import Signer
from parawrap.launch.slurm._job_commands import requeue_job
from parawrap.launch.slurm._launch_folder import Address, Folder, Plan
from parawrap.launch.slurm._store_messages import StoreQueue, connect

__all__ = ["ARRIVAL_S", "JobCoordinator"]

ARRIVAL_S = 300.0
"""Seconds for the tasks of a launch to arrive: Slurm starts them, and file systems show files, at different times."""

_LOOK_S = 0.2  # a guess that no test has contradicted
_BACKLOG = 4096  # the most that Linux queues by default: all tasks connect at once
_NO_VALUE = Path(os.devnull)  # values stay in the tasks, which return them themselves

_log = logging.getLogger("parawrap.launch")


class JobCoordinator:
    """Coordinates the tasks of one attempt. Created and started by the main thread of rank 0's task.

    Args:
        folder: The launch's folder.
        plan: The launch's plan.
        start: The number of earlier starts of the job.
        attempt: The attempt's name.
        cleanup: Takes callbacks for the end of the attempt.

    Attributes:
        address: Where the tasks meet.
        ending: How the attempt ended, once it has.
        is_final: True if no other attempt follows.
        is_forgotten: True if the submitting process gives no sign of life.

    Raises:
        LaunchError: If Slurm started the job again after a failure, and ``max_restarts`` does not allow this.
    """

    def __init__(self, folder: Folder, plan: Plan, start: int, attempt: str, cleanup: ExitStack) -> None:
        self._folder = folder
        self._plan = plan
        self._platform = plan.platform
        self._start = start
        self._attempt = attempt
        self.ending = Ending({})
        self.is_final = True
        self.is_forgotten = False
        self._loop = Loop()
        self._run: Attempts | None = None
        self._cancelled = threading.Event()
        self._ended = threading.Event()
        self._hosts: dict[int, str] = {}
        self._preempts: bool | None = None  # ends_late of a preemption that arrived before the ranks
        self._trouble: str | None = None
        self._nodes: list[_Node] = []
        restart = folder.attempts()
        self._failures = restart - folder.preemptions()
        if self._failures > self._platform.max_restarts:
            folder.mark_over()
            msg = f"attempt {restart} follows a lost node or task, and max_restarts={self._platform.max_restarts}"
            raise LaunchError(msg)
        hosts = list_addresses() if self._platform.n_nodes > 1 else [LOOPBACK]
        hosts = hosts if self._platform.master_addr is None else [self._platform.master_addr]
        with socket.create_server((LOOPBACK if self._platform.n_nodes == 1 else "", 0), backlog=_BACKLOG) as listener:
            port = listener.getsockname()[1]
            self._store = dist.TCPStore(
                LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listener.fileno())
            )
        meeting = cleanup.enter_context(open_store_host(self._platform, hosts[0], folder.path / f"store-{attempt}"))
        self.address = Address(tuple(hosts), port, restart, meeting)
        folder.write_address(attempt, self.address)

    def begin(self) -> None:
        """Start the threads. The caller has started its rank before, because forks of one thread are the safest."""
        signer, port = Signer(self._plan.token), self.address.port
        self._reports = StoreQueue(connect(LOOPBACK, port), f"{self._attempt}/reports", signer)
        store = connect(LOOPBACK, port)
        self._own_report = StoreQueue(store, f"{self._attempt}/reports", signer)
        self._orders = [
            StoreQueue(store, f"{self._attempt}/orders-{rank}", signer) for rank in range(self._platform.world_size)
        ]
        for act in (self._coordinate, self._take_reports, self._take_requests):
            threading.Thread(target=act, name=f"parawrap-{act.__name__.strip('_')}", daemon=True).start()

    # -- the thread that coordinates

    def _coordinate(self) -> None:
        with _LogIntoFile(self._folder.log):
            try:
                self.ending = self._conclude(self._supervise())
            except Exception as error:  # noqa: BLE001 (the tasks must end in any case)
                broken = str(self._folder.unusable(error)) if isinstance(error, OSError) else str(error) or repr(error)
                self.ending = Ending({}, cancelled=self._cancelled.is_set(), broken=broken)
                self.is_final = True
                with contextlib.suppress(OSError):
                    self._folder.mark_over()
        self._ended.set()
        failed = {
            rank
            for rank, outcome in self.ending.outcomes.items()
            if isinstance(outcome, (Raised, Died)) and not self.ending.requeued
        }
        for rank, orders in enumerate(self._orders):
            with contextlib.suppress(dist.DistError):
                orders.send("finish", rank in failed)
        with contextlib.suppress(dist.DistError):
            self._own_report.send(0, "end of reports")

    def _supervise(self) -> Ending:
        self._await_tasks()
        platform = copy.copy(self._platform)
        object.__setattr__(platform, "max_restarts", 0)  # the loop in the batch script restarts
        records = [_LastWords() for _ in range(platform.world_size)]
        per_node = platform.ranks_per_node
        self._nodes = [
            _Node(self._hosts[node * per_node], self._send, {rank: records[rank] for rank in _ranks_on(node, per_node)})
            for node in range(platform.n_nodes)
        ]
        run = Attempts(
            self._plan.name,
            platform,
            self._loop,
            self._nodes,
            assignments_of(platform, self.address.meeting, self._plan.surroundings),
            records,
            restart=self.address.restart,
            requeues=True,
        )
        run.begin()
        self._run = run
        if self._cancelled.is_set():
            run.cancel()
        if self._preempts is not None:
            run.preempt(ends_late=self._preempts)
        return run.run()

    def _await_tasks(self) -> None:
        until = time.monotonic() + ARRIVAL_S
        while missing := sorted(set(range(self._platform.world_size)) - set(self._hosts)):
            if self._cancelled.is_set():
                msg = "cancelled while tasks were arriving"
                raise LaunchError(msg)
            if self._trouble is not None:
                raise LaunchError(self._trouble)
            if time.monotonic() > until:
                listed = ", ".join(map(str, missing))
                msg = f"rank(s) {listed} did not arrive within {ARRIVAL_S:g} seconds: check that they can reach this node"
                raise LaunchError(msg)
            time.sleep(_LOOK_S / 10)

    def _conclude(self, ending: Ending) -> Ending:
        """Requeue the job if its ranks requested it, and store the ending for another attempt.

        Raises:
            OSError: If the folder cannot be written.
        """
        history, times = self._folder.earlier()
        ending = replace(ending, history=[*history, *ending.history], times=[*times, *ending.times])
        if ending.requeued and not self._cancelled.is_set():
            ending = self._requeue(ending)
        failed = first_rank_failure(ending.outcomes)
        given_up = ending.cancelled or ending.stuck or ending.timed_out or ending.broken
        restarts = failed is not None and not given_up and self._failures < self._platform.max_restarts
        self.is_final = not (restarts or ending.requeued)
        if self.is_final:
            self._folder.mark_over()
        else:
            self._folder.note_earlier((self._with_failure(ending, failed), list(ending.times)))
        return ending

    def _with_failure(self, ending: Ending, failed: int | None) -> list[str]:
        if failed is None or ending.requeued:
            return list(ending.history)
        outcome = ending.outcomes[failed]
        assert isinstance(outcome, (Raised, Died))
        raised = "raised " if isinstance(outcome, Raised) else ""
        return [*ending.history, f"attempt {self.address.restart} failed: rank {failed} {raised}{outcome.summary}"]

    def _requeue(self, ending: Ending) -> Ending:
        self._folder.mark_preempted(self._start)
        self._folder.note_earlier((list(ending.history), list(ending.times)))  # before Slurm ends this task
        reason = requeue_job(os.environ["SLURM_JOB_ID"])
        broken = replace(ending, requeued=False, broken=f"Slurm refused to requeue the job: {reason}")
        return ending if reason is None else broken

    # -- the thread that takes reports of the guards

    def _take_reports(self) -> None:
        with contextlib.suppress(dist.DistError):
            while True:
                try:
                    rank, word, *body = self._reports.receive()
                except LaunchError as error:  # another program wrote to the store
                    self._trouble = str(error)
                    self._loop.call_soon(partial(self._fail, str(error)))
                    continue
                if word == "end of reports":
                    return
                if word == "hello":
                    self._hosts[rank] = body[0]
                elif word == "signal" and body == ["SIGTERM"] and self._run is None:
                    self._trouble = "Slurm ended the job while its tasks were arriving"
                elif word == "signal":
                    self._preempt(ends_late=False)
                else:
                    self._loop.call_soon(partial(self._report, rank, word, body))

    def _report(self, rank: int, word: str, body: Sequence[Any]) -> None:
        self._nodes[rank // self._platform.ranks_per_node].report(rank, word, *body)

    def _fail(self, reason: str) -> None:
        for node in self._nodes:
            node.fail(reason)

    def _send(self, rank: int, *order: Any) -> None:
        with contextlib.suppress(dist.DistError):
            self._orders[rank].send(*order)

    # -- the thread that takes requests of the submitting process

    def _take_requests(self) -> None:
        """Handle requests, and end the launch if the submitting process is silent, also while the file system fails."""
        seen: set[str] = set()
        if self.address.restart:
            with contextlib.suppress(OSError):
                seen = {each for each in self._folder.requests() if each != "cancel"}  # handled by an earlier attempt
        sign, signed_at = None, time.monotonic()
        while not self._ended.wait(_LOOK_S):
            with contextlib.suppress(OSError):
                for request in sorted(self._folder.requests() - seen):
                    self._handle(request)
                    seen.add(request)
            now = self._folder.sign_of_life()
            if now is not None and now != sign:
                sign, signed_at = now, time.monotonic()
            elif time.monotonic() - signed_at > self._plan.lease_s and not self.is_forgotten:
                self.is_forgotten = True
                self._cancel()

    def _handle(self, request: str) -> None:
        if request == "cancel":
            self._cancel()
        elif request.startswith("preempt-"):
            self._preempt(ends_late=True)
        elif request.startswith("stacks-"):
            self._folder.answer(request, self._run.stacks() if self._run is not None else {})

    def _cancel(self) -> None:
        self._cancelled.set()
        if self._run is not None:
            self._run.cancel()

    def _preempt(self, *, ends_late: bool) -> None:
        """Order the ranks to save. Late ranks are ended after a request; after a signal, Slurm itself ends the job."""
        self._preempts = ends_late or bool(self._preempts)
        if self._run is not None:
            self._run.preempt(ends_late=ends_late)


def _ranks_on(node: int, per_node: int) -> range:
    return range(node * per_node, (node + 1) * per_node)


class _Node:
    """The tasks of one machine, as the coordinator sees them. Implements `Guard`. Used by the coordinating thread.

    The tasks start their ranks by themselves, and each has one.
    """

    is_lost = False  # Slurm ends the job if a node is lost

    def __init__(self, host: str, send: Callable[..., None], records: dict[int, _LastWords]) -> None:
        self.host = host
        self._send_order = send
        self._records = records
        self._watchers: dict[int, Watcher] = {}
        self._running: set[int] = set()
        self._over: set[int] = set()

    @property
    def is_over(self) -> bool:
        return len(self._over) == len(self._watchers)

    def start(self, assignment: Assignment, watcher: Watcher) -> None:
        rank = assignment.place.global_rank
        self._watchers[rank] = watcher
        self._running.add(rank)

    def send(self, rank: int, word: str, body: Any = None) -> None:
        if rank in self._running:
            self._send_order(rank, "send", word, body)

    def kill(self, rank: int) -> None:
        if rank in self._running:
            self._send_order(rank, "kill")

    def give_up(self) -> None:
        for rank in list(self._running):
            self._end(rank, None)
        self._over = set(self._watchers)

    def close(self) -> None:
        """Do nothing: the order to finish follows."""

    def fail(self, reason: str) -> None:
        """End the attempt, although no rank has failed."""
        for watcher in self._watchers.values():
            watcher.on_trouble(reason)

    def report(self, rank: int, word: str, *body: Any) -> None:
        """Handle a report of a rank's guard."""
        watcher = self._watchers[rank]
        if word == "started":
            watcher.on_start(rank, *body)
        elif word == "word":
            watcher.on_word(rank, body[0], body[1], _NO_VALUE)
        elif word == "output":  # it is in the task's files; here it only shows that the rank is not silent
            watcher.on_output(rank, 1, b"")
        elif word == "trouble":
            watcher.on_trouble(f"on {self.host}, {body[0]}")
        elif word == "over":
            self._over.add(rank)
        elif rank in self._running:
            code, lost_with, self._records[rank].text = body
            self._end(rank, code, lost_with)

    def _end(self, rank: int, code: int | None, lost_with: str = "") -> None:
        self._running.discard(rank)
        self._watchers[rank].on_end(rank, code, lost_with)


class _LastWords:
    """The end of a rank's output. Implements `Record`: the output itself goes into the files of the rank's task."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, stream: int, data: bytes) -> None:
        """Do nothing."""

    def record(self, text: str) -> None:
        """Do nothing: the submitting process adds the traceback."""

    def last_words(self, at_most: int) -> str:
        return self.text[-at_most:]


class _LogIntoFile(logging.Handler):
    """Writes log records into a file of the launch folder inside the block. The submitting process logs them."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.WARNING)
        self._path = path

    def __enter__(self) -> Self:
        _log.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        _log.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError), self._path.open("a") as file:  # opened each time: other machines then see it
            file.write(json.dumps([record.levelno, self.format(record)]) + "\n")
