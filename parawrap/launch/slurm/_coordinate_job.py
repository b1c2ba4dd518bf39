"""The coordinator of one attempt. It runs in threads of rank 0's task.

Its pool supervises the ranks through their connections, as on one machine. Requests of the submitting process come through
the launch folder.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, Self

from parawrap.errors import LaunchError
from parawrap.launch._addresses import list_addresses
from parawrap.launch.attempts import may_restart, summary_of_attempt, wants_more
from parawrap.launch.remote import Arrivals
from parawrap.launch.set_up import Place, RankSetUp
from parawrap.launch.slurm._job_commands import requeue_job
from parawrap.launch.slurm._launch_folder import Address, Folder, Plan
from parawrap.processes.groups import LOOPBACK, StoreAddress, free_port, open_tcp_store
from parawrap.processes.outcomes import Died, Ending, Outcome, Raised, Returned
from parawrap.processes.output import Transcript
from parawrap.processes.pickling import Packed
from parawrap.processes.pool import Call, Limits, Pool, stacks_of
from parawrap.processes.process import Assignment
from parawrap.processes.server import Connections
from parawrap.processes.wire import Wire

ARRIVAL_S = 300.0
"""Seconds for all tasks to arrive: importing torch from a busy network file system takes minutes."""

CONNECTIONS = 4
"""The connections of a rank: the orders to its task, and its status, data, and control."""

_LOOK_S = 0.2  # between two looks for requests
_log = logging.getLogger("parawrap.launch")


class Hello(NamedTuple):
    """The first message of a task.

    Attributes:
        hostname: The name of its machine.
        host: The address at which it has reached rank 0's machine.
        interface: Its network interface that leads there; None with one node.
    """

    hostname: str
    host: str
    interface: str | None


class JobCoordinator:
    """Coordinates the tasks of one attempt. Created and started by the main thread of rank 0's task.

    Args:
        folder: The launch's folder.
        plan: The launch's plan.
        start: The number of earlier starts of the job.
        attempt: The attempt's name.

    Attributes:
        ending: How the attempt ended, once it has, with the values of ranks as bytes.
        is_final: True if no other attempt follows.
        is_requeued: True if the job was requeued.
        is_forgotten: True if the submitting process gives no sign of life.

    Raises:
        LaunchError: If Slurm started the job again after a failure, and ``max_restarts`` does not allow this.
    """

    def __init__(self, folder: Folder, plan: Plan, start: int, attempt: str) -> None:
        self._folder = folder
        self._plan = plan
        self._platform = platform = plan.platform
        self._start = start
        self._attempt = attempt
        self.ending = Ending({})
        self.is_final = True
        self.is_requeued = self.is_forgotten = False
        self._pool: Pool | None = None
        self._cancelled = threading.Event()
        self._ended = threading.Event()
        self._preempts: bool | None = None  # ends_late of a preemption that arrived before the ranks
        self._trouble = ""
        self._orders: dict[int, Wire] = {}
        self.hellos: dict[int, Hello] = {}
        self._restart = folder.attempts()
        self._failures = self._restart - folder.preemptions()
        if self._failures > platform.max_restarts:
            folder.mark_over()
            msg = f"attempt {self._restart} follows a lost node or task, and max_restarts={platform.max_restarts}"
            raise LaunchError(msg)
        hosts = list_addresses() if platform.n_nodes > 1 else [LOOPBACK]
        self._hosts = hosts if platform.master_addr is None else [platform.master_addr]
        listened = LOOPBACK if platform.n_nodes == 1 else ""
        self._arrivals = Arrivals(listened, plan.token, CONNECTIONS, platform.world_size)
        folder.write_address(attempt, Address(tuple(self._hosts), self._arrivals.address[1]))

    def begin(self) -> None:
        """Start the threads."""
        for act in (self._coordinate, self._take_requests):
            threading.Thread(target=act, name=f"parawrap-{act.__name__.strip('_')}", daemon=True).start()

    # -- the thread that coordinates

    def _coordinate(self) -> None:
        with _LogIntoFile(self._folder.log), self._arrivals:
            try:
                self._conclude(*self._supervise())
            except Exception as error:  # noqa: BLE001 (the tasks must end in any case)
                lost = str(self._folder.unusable(error)) if isinstance(error, OSError) else str(error) or repr(error)
                self.ending = Ending({}, cancelled=self._cancelled.is_set(), lost=lost)
                self.is_final = True
                with contextlib.suppress(OSError):
                    self._folder.mark_over()
        self._ended.set()
        outcomes = {} if self.is_requeued else self.ending.outcomes
        for rank, orders in self._orders.items():
            orders.send("finish", isinstance(outcomes.get(rank), (Raised, Died)))

    def _supervise(self) -> tuple[Ending, bool]:
        """Make the call. Return how the ranks ended, and True if they were preempted."""
        plan, platform = self._plan, self._platform
        with self._open_store() as store:
            starter = _Starter(self, self._await_tasks())
            limits = Limits(platform.grace_s, platform.timeout_min, platform.hang_timeout_s)
            assignments = [
                Assignment(
                    settings=plan.settings,
                    set_up=RankSetUp(
                        platform,
                        Place.of(rank, platform, self._restart),
                        self._store_of(rank, store),
                        self.hellos[rank].interface,
                    ),
                    grace_s=platform.grace_s,
                    stays=False,
                    modules=(),
                )
                for rank in range(platform.world_size)
            ]
            transcripts = [Transcript(None) for _ in assignments]  # their output goes into the files of their tasks
            self._pool = pool = Pool(starter, assignments, transcripts, limits, wants_groups=platform.requires_ipc)
            try:
                for rank, orders in self._orders.items():
                    pool.watch(orders, partial(self._on_report, pool, rank, orders))
                pool.fork()
                if self._cancelled.is_set():
                    pool.cancel()
                ending = pool.set_up()
                if ending.is_success:
                    if self._preempts is not None:
                        pool.post(lambda: pool.preempt(ends_late=bool(self._preempts)))
                    packed = Packed.of_block(self._folder.call.read_bytes())
                    ending = pool.call(Call(plan.name, range(platform.world_size), packed))
                return ending, pool.preempted
            finally:
                pool.close()

    @contextlib.contextmanager
    def _open_store(self) -> Iterator[StoreAddress | None]:
        platform = self._platform
        if not platform.requires_ipc:
            yield None if platform.n_nodes > 1 else StoreAddress(LOOPBACK, free_port())
        elif platform.ipc_protocol == "file" or (platform.ipc_protocol is None and platform.n_nodes == 1):
            yield StoreAddress(self._hosts[0], free_port(), str(self._folder.path / f"store-{self._attempt}"))
        else:
            everywhere = platform.n_nodes > 1
            with open_tcp_store(self._hosts[0], platform.master_port, everywhere=everywhere) as store:
                yield store

    def _store_of(self, rank: int, store: StoreAddress | None) -> StoreAddress | None:
        """Return the store at the address where the task of a rank has reached this machine."""
        if store is None or store.path is not None or self._platform.n_nodes == 1:
            return store
        return replace(store, host=self.hellos[rank].host)

    def _await_tasks(self) -> dict[int, list[socket.socket]]:
        """Wait for the connections of all ranks, and for the names of their hosts."""
        arrived = {}
        until = time.monotonic() + ARRIVAL_S
        for rank in range(self._platform.world_size):
            while True:
                try:
                    connections = self._arrivals.of_rank(rank, lambda: self._cancelled.is_set() or bool(self._trouble))
                except TimeoutError:
                    if time.monotonic() < until:
                        continue
                    msg = f"rank {rank} did not arrive within {ARRIVAL_S:g} seconds: check that it can reach this node"
                    raise LaunchError(msg) from None
                break
            if connections is None:
                raise LaunchError(self._trouble or "cancelled while tasks were arriving")
            orders, *others = connections
            self._orders[rank] = Wire(orders)
            hello = self._orders[rank].receive()
            if hello is None:
                msg = f"the task of rank {rank} ended while it arrived"
                raise LaunchError(msg)
            self.hellos[rank] = hello.body
            arrived[rank] = others
        return arrived

    def _on_report(self, pool: Pool, rank: int, orders: Wire) -> None:
        message = orders.receive()
        if message is None:  # the task was killed, or its machine was lost
            pool.forget(orders)
            pool.end_connection(rank)
        elif message.word == "signal":  # Slurm itself ends the job
            pool.preempt(ends_late=False)

    def _conclude(self, ending: Ending, is_preempted: bool) -> None:
        """Requeue the job if its ranks requested it, and store how they ended for another attempt.

        Raises:
            OSError: If the folder cannot be written.
        """
        platform = self._platform
        history = self._folder.earlier()
        goes_on = wants_more(ending, self._plan.name, platform, is_preempted=is_preempted)
        restarts = may_restart(ending, platform, self._failures)
        if self._cancelled.is_set() and (goes_on or restarts):
            ending = replace(ending, cancelled=True)
            goes_on = restarts = False
        if goes_on or restarts:
            summary = summary_of_attempt(ending, is_preempted=is_preempted)
            if not goes_on:
                history = [*history, f"attempt {self._restart} {summary}"]
            self._folder.note_earlier(history)  # before Slurm ends this task
        ending = replace(ending, history=history)
        if goes_on or (restarts and is_preempted):
            ending = self._requeue(ending)
        elif restarts:
            _log.warning("%s: %s; its ranks start again", self._plan.name, history[-1])
        self.is_final = not (restarts or self.is_requeued)
        if self.is_final:
            self._folder.mark_over()
        self.ending = replace(ending, outcomes={rank: _packable(each) for rank, each in ending.outcomes.items()})

    def _requeue(self, ending: Ending) -> Ending:
        self._folder.mark_preempted(self._start)
        reason = requeue_job(os.environ["SLURM_JOB_ID"])
        self.is_requeued = reason is None
        return ending if reason is None else Ending({}, lost=f"Slurm refused to requeue the job: {reason}")

    # -- the thread that takes requests of the submitting process

    def _take_requests(self) -> None:
        """Handle requests, and end the launch if the submitting process is silent, also while the file system fails."""
        seen: set[str] = set()
        if self._restart:
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
        pool = self._pool
        if request == "cancel":
            self._cancel()
        elif request.startswith("preempt-"):
            self._preempts = True
            if pool is not None:
                pool.post(pool.preempt)
        elif request.startswith("stacks-"):
            self._folder.answer(request, {} if pool is None else stacks_of(pool))

    def _cancel(self) -> None:
        self._cancelled.set()
        if (pool := self._pool) is not None:
            pool.post(pool.cancel)

    def order_kill(self, rank: int, pid: int) -> None:
        """Have the task of a rank kill it."""
        self._orders[rank].send("kill", pid)


class _Starter:
    """Gives the pool the ranks that the tasks of the job have started. Implements `Starter`."""

    def __init__(self, coordinator: JobCoordinator, arrived: dict[int, list[socket.socket]]) -> None:
        self._coordinator = coordinator
        self._arrived = arrived
        self._per_node = coordinator._platform.ranks_per_node

    def start(self, rank: int) -> Connections:
        status, data, control = self._arrived[rank]
        return Connections(data, control, status.detach(), ())

    def kill(self, rank: int, pid: int) -> None:
        if pid:
            self._coordinator.order_kill(rank, pid)

    def load(self, names: list[str]) -> None:
        """Do nothing: the servers end with the attempt."""

    def describe(self, _rank: int) -> str:
        return f"its task in Slurm job {os.environ.get('SLURM_JOB_ID', '')}"

    def place_of(self, rank: int) -> str:
        return f"node {rank // self._per_node}, {self._coordinator.hellos[rank].hostname}"


def _packable(outcome: Outcome) -> Outcome:
    """Return an outcome with bytes in place of memory, which pickle refuses."""
    if isinstance(outcome, Returned):
        return replace(outcome, value=bytes(outcome.value))  # type: ignore[arg-type]
    if isinstance(outcome, Raised):
        return replace(outcome, error=bytes(outcome.error))  # type: ignore[arg-type]
    return outcome


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
