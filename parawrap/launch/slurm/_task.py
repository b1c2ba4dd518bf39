"""A task of a launch's batch job: it starts the server that forks one rank, and outlives it.

submitit calls `guard_rank` in each task, and stores its return value in a file. The task of rank 0 also coordinates the
others (`_coordinate_job`). Each task has a connection to it for orders, and so does its rank: the pool of the coordinator
supervises the ranks as those of one machine. If the rank failed, its task exits with code 1 once all tasks have written
their files, so that Slurm ends the other tasks.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

from parawrap.errors import LaunchError
from parawrap.launch._addresses import interface_of
from parawrap.launch.remote import connect
from parawrap.launch.slurm._coordinate_job import ARRIVAL_S, CONNECTIONS, Hello, JobCoordinator
from parawrap.launch.slurm._launch_folder import Address, Folder, Plan
from parawrap.processes.outcomes import Ending
from parawrap.processes.server import ForkServer, signal_group
from parawrap.processes.wire import Wire

_LOOK_S = 0.1  # a guess that no test has contradicted
_TASKS_PER_LOOK = 100  # with more tasks, each reads the shared folder less often
_REACH_S = 30.0  # rank 0 listens before it publishes its address, so only a broken network takes longer
_RESULTS_S = 5.0  # time for other tasks to write their files
_REQUEUE_S = 60.0  # Slurm ends the tasks of a requeued job well before this
_FROM_SLURM = (signal.SIGUSR2, signal.SIGTERM)


@dataclass(frozen=True)
class TaskResult:
    """The value that a task returns. Only rank 0's has an ending.

    Attributes:
        attempt: The attempt's name.
        ending: How all ranks ended, with their values as bytes.
        is_final: True if no other attempt follows.
        is_requeued: True if the job was requeued.
    """

    attempt: str
    ending: Ending | None = None
    is_final: bool = False
    is_requeued: bool = False


def guard_rank(path: str) -> TaskResult:
    """Run this task's rank until the attempt ends. `path` is the launch's folder."""
    folder = Folder(Path(path))
    task = _Task(folder)
    try:
        return task.run()
    except (LaunchError, OSError) as error:
        with contextlib.suppress(OSError):
            folder.write_trouble(task.start, task.node, f"node {task.node} ({socket.gethostname()}): {error}")
        raise


class _Task:
    """One task.

    Attributes:
        node: The number of the task's node.
        start: The number of earlier starts of the job.
    """

    def __init__(self, folder: Folder) -> None:
        import submitit  # the submitting process imports this module too, and may lack the package

        task = submitit.JobEnvironment()
        self._folder = folder
        self._rank = task.global_rank
        self.node = task.node
        self._results = [Path(folder.task_files(task.job_id, rank).result_pickle) for rank in range(task.num_tasks)]
        own = self._results[self._rank]
        for left in (own, own.with_suffix(f"{own.suffix}.save_tmp")):
            left.unlink(missing_ok=True)  # of an earlier attempt
        self.start = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        self._attempt = f"{self.start}-{os.environ.get('PARAWRAP_ATTEMPT', '0')}"
        self._coordinator: JobCoordinator | None = None
        self._orders: Wire | None = None
        self._signals: list[str] = []
        self._has_failed = True  # until the coordinator has ended the attempt
        self._is_finished = False
        self._streams = _separate_streams(folder.tasks_log)
        atexit.register(self._leave)  # not earlier: submitit writes the file of the result first

    def run(self) -> TaskResult:
        server = ForkServer()  # it inherits the blocked signals, and ignores them
        self._take_signals()
        plan = self._folder.read_plan()
        if self._rank == 0:
            self._coordinator = JobCoordinator(self._folder, plan, self.start, self._attempt)
        host, (orders, *others) = self._connect(plan)
        self._orders = Wire(orders)
        interface = interface_of(orders.getsockname()[0]) if plan.platform.n_nodes > 1 else None
        self._orders.send("hello", Hello(socket.gethostname(), host, interface))
        for name in self._signals:
            self._orders.send("signal", name)
        server.request([*(each.fileno() for each in others), *self._streams])
        for each in others:
            each.close()
        if self._coordinator is not None:
            self._coordinator.begin()
        self._follow_orders(self._orders)
        server.stop()
        if self._coordinator is None:
            return TaskResult(self._attempt)
        ended = self._coordinator
        return TaskResult(self._attempt, ended.ending, ended.is_final, ended.is_requeued)

    def _connect(self, plan: Plan) -> tuple[str, list[socket.socket]]:
        """Open the connections of this task and its rank to rank 0's task. Also return its address."""
        address = self._await_address(plan)
        until = time.monotonic() + _REACH_S
        while True:
            for host in address.hosts:
                with contextlib.suppress(OSError):
                    return host, connect((host, address.port), plan.token, self._rank, range(CONNECTIONS))
            if time.monotonic() > until:
                msg = f"cannot reach node 0: tried {', '.join(address.hosts)}, port {address.port}"
                raise LaunchError(msg)
            time.sleep(_LOOK_S)

    def _await_address(self, plan: Plan) -> Address:
        until = time.monotonic() + ARRIVAL_S
        look_s = _LOOK_S * max(1.0, plan.platform.world_size / _TASKS_PER_LOOK)
        while (address := self._folder.address(self._attempt)) is None:
            if "SIGTERM" in self._signals:
                sys.exit("Slurm ended the job before rank 0 had published its address")
            if time.monotonic() > until:
                msg = f"rank 0 did not publish its address within {ARRIVAL_S:g} seconds"
                raise LaunchError(msg)
            time.sleep(look_s)
        return address

    def _follow_orders(self, orders: Wire) -> None:
        """Follow the orders of the coordinator until it has ended the attempt, or is lost."""
        while (message := orders.receive()) is not None:
            if message.word == "finish":
                self._has_failed, self._is_finished = message.body, True
                return
            signal_group(message.body, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(message.body, signal.SIGKILL)

    # -- signals of Slurm, which is about to end the job. SIGUSR2 comes early enough to save

    def _take_signals(self) -> None:
        for number in _FROM_SLURM:
            signal.signal(number, partial(self._on_signal))
        signal.signal(signal.SIGCONT, signal.SIG_DFL)  # submitit's handler would log it
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FROM_SLURM)

    def _on_signal(self, number: int, _frame: object) -> None:
        name = signal.Signals(number).name
        if number == signal.SIGUSR2 and self._rank == 0:
            with contextlib.suppress(OSError):  # ranks must be able to save even if the folder is full
                self._folder.mark_preempted(self.start)
        self._signals.append(name)
        if self._orders is not None:
            self._orders.send("signal", name)

    # -- the end of the task

    def _leave(self) -> NoReturn:
        """Exit without unloading torch, with a code that makes Slurm end the other tasks if this rank failed."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        coordinator = self._coordinator
        if coordinator is not None and coordinator.is_requeued:
            time.sleep(_REQUEUE_S)
        is_forgotten = coordinator is not None and coordinator.is_forgotten
        if (self._has_failed and self._is_finished) or is_forgotten:
            self._await_results()
        if is_forgotten:
            self._folder.remove()
            os._exit(1)
        os._exit(int(self._has_failed or not self._results[self._rank].exists()))

    def _await_results(self) -> None:
        """Wait until all tasks have written their results."""
        until = time.monotonic() + _RESULTS_S
        while time.monotonic() < until and not all(path.exists() for path in self._results):
            time.sleep(_LOOK_S / 10)


def _separate_streams(log: Path) -> tuple[int, int]:
    """Return copies of this process's output streams for the rank. Its own output goes into a log from now on."""
    copies = os.dup(1), os.dup(2)
    try:
        own = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    except OSError:  # a full disk
        own = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(own, number)
    os.close(own)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return copies
