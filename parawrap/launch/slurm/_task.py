"""A task of a launch's batch job: the guard of one rank.

submitit calls `guard_rank` in each task, and stores its return value in a file. The task forks its rank from itself, as
torch is imported here already, and outlives it. So it sees the rank's exit code, ends the processes that the rank leaves
behind, and returns the rank's value. If the rank failed, the task exits with code 1 once the file exists, so that Slurm
ends the other tasks.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from parawrap.errors import LaunchError
from parawrap.launch._addresses import interface_of
from parawrap.launch.coordinator._attempts_backend import assignments_of
from parawrap.launch.coordinator._ending import Ending
from parawrap.launch.coordinator._event_loop import Loop
from parawrap.launch.guard._guard import LocalGuard
from parawrap.launch.guard._start_methods import starter_named
from parawrap.launch.messages._last_words import LAST_WORDS, last_words_of
from parawrap.launch.messages._private_files import open_private
from parawrap.launch.rank._cluster_signals import FROM_CLUSTER, not_for_children
from parawrap.launch.rank._rank_assignment import Assignment
from parawrap.launch.rank._signed_values import Signer
from parawrap.launch.slurm._coordinate_job import ARRIVAL_S, JobCoordinator
from parawrap.launch.slurm._launch_folder import Address, Folder, Plan
from parawrap.launch.slurm._store_messages import StoreQueue, connect, reachable

__all__ = ["TaskResult", "guard_rank"]

_LOOK_S = 0.1  # a guess that no test has contradicted
_TASKS_PER_LOOK = 100  # with more tasks, each reads the shared folder less often
_REACH_S = 30.0  # rank 0 listens before it publishes its address, so only a broken network takes longer
_ALIVE_S = 0.5  # between two reports of output or progress
_KEPT = 1 << 16  # the end of the rank's output, which may have a crash report
_RESULTS_S = 5.0  # time for other tasks to write their files
_REQUEUE_S = 60.0  # Slurm ends the tasks of a requeued job well before this
_NEVER = float("inf")  # by the monotonic clock


@dataclass(frozen=True)
class TaskResult:
    """The value that a task returns.

    Attributes:
        attempt: The attempt's name.
        value: The rank's pickled result or exception; empty without one.
        ending: How all ranks ended, without their values. Only in rank 0's result.
        is_final: True if no other attempt follows.
    """

    attempt: str
    value: bytes = b""
    ending: Ending | None = None
    is_final: bool = False


def guard_rank(path: str) -> TaskResult:
    """Run this task's rank until the attempt ends.

    Args:
        path: The launch's folder.
    """
    folder = Folder(Path(path))
    task = _Task(folder)
    try:
        return task.run()
    except (LaunchError, OSError) as error:
        with contextlib.suppress(OSError):
            folder.write_trouble(task.start, task.node, f"node {task.node} ({socket.gethostname()}): {error}")
        raise


class _Task:
    """One task. Its main thread watches the rank; another one waits for orders of the coordinator.

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
        self._loop = Loop()
        self._guard: LocalGuard | None = None
        self._coordinator: JobCoordinator | None = None
        self._send: Callable[..., None] = lambda *_: None
        self._signals: list[str] = []
        self._grace_s = 0.0
        self._value = b""
        self._last_output = b""
        self._alive_at = self._began = 0.0
        self._end_at = self._kill_at = _NEVER
        self._is_over = self._has_ended = self._is_finished = False
        self._has_failed = True  # until the coordinator has ended the attempt
        self._streams = _separate_streams(folder.tasks_log)
        atexit.register(self._leave)  # not earlier: submitit writes the file of the result first
        _take_signals(self._on_signal)

    def run(self) -> TaskResult:
        plan = self._folder.read_plan()
        self._grace_s = plan.platform.grace_s
        with ExitStack() as cleanup, open_private(self._folder.call) as call:
            if self._rank == 0:
                self._coordinator = JobCoordinator(self._folder, plan, self.start, self._attempt, cleanup)
            address = self._await_address(plan)
            host, own = self._find_addresses(address)
            self._guard = guard = LocalGuard(self._loop, starter_named("fork", not_for_children), call.fileno())
            self._began = time.time()
            guard.start(_assignment(self._rank, plan, address, host, own), self)  # before this process has threads
            self._connect(plan, address, host)
            self._watch(guard)
            guard.close()
        self._loop.close()
        result = TaskResult(self._attempt, self._value)
        if self._coordinator is None:
            return result
        return replace(result, ending=self._coordinator.ending, is_final=self._coordinator.is_final)

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

    def _find_addresses(self, address: Address) -> tuple[str, str]:
        """Return the address at which this task reaches rank 0's machine, and its own address of that connection."""
        until = time.monotonic() + _REACH_S
        while (found := reachable(address.hosts, address.port)) is None:
            if time.monotonic() > until:
                msg = f"cannot reach node 0: tried {', '.join(address.hosts)}, port {address.port}"
                raise LaunchError(msg)
            time.sleep(_LOOK_S)
        return found

    def _connect(self, plan: Plan, address: Address, host: str) -> None:
        signer = Signer(plan.token)
        reports, orders = (
            StoreQueue(connect(host, address.port), f"{self._attempt}/{name}", signer)
            for name in ("reports", f"orders-{self._rank}")
        )

        def send(*report: Any) -> None:
            try:
                reports.send(self._rank, *report)
            except dist.DistError:
                self._on_lost()

        def take_orders() -> None:
            try:
                while True:
                    self._loop.call_soon(partial(self._obey, *orders.receive()))
            except (dist.DistError, LaunchError):
                self._loop.call_soon(self._on_lost)

        self._send = send
        send("hello", socket.gethostname())
        threading.Thread(target=take_orders, name="parawrap-orders", daemon=True).start()
        if self._coordinator is not None:
            self._coordinator.begin()

    def _watch(self, guard: LocalGuard) -> None:
        """Watch the rank until it is over and the coordinator has ended the attempt."""
        while not (self._is_finished and guard.is_over):
            self._loop.turn(min(self._end_at, self._kill_at) - time.monotonic())
            now = time.monotonic()
            if now >= self._end_at:
                self._end_at, self._kill_at = _NEVER, now + self._grace_s
                guard.send(self._rank, "end")
            if now >= self._kill_at:
                self._kill_at = _NEVER
                guard.kill(self._rank)
            if guard.is_over and not self._is_over:
                self._is_over = True
                self._send("over")

    # -- orders, signals, and the end of the connection

    def _obey(self, word: str, *body: Any) -> None:
        assert self._guard is not None
        if word == "send":
            self._guard.send(self._rank, *body)
        elif word == "kill":
            self._guard.kill(self._rank)
        else:
            (self._has_failed,) = body
            self._finish()

    def _finish(self) -> None:
        self._is_finished = True
        if not self._has_ended:
            self._end_at = time.monotonic()

    def _on_lost(self) -> None:
        """Handle the loss of the store: rank 0's task or its machine has ended."""
        self._send = lambda *_: None
        if not self._is_finished:
            self._finish()

    def _on_signal(self, number: int, _frame: object) -> None:
        """Handle a signal of Slurm: it is about to end the job. SIGUSR2 comes early enough to save."""
        name = signal.Signals(number).name
        if number == signal.SIGUSR2 and self._rank == 0:
            with contextlib.suppress(OSError):  # ranks must be able to save even if the folder is full
                self._folder.mark_preempted(self.start)
        self._signals.append(name)
        self._loop.call_soon(partial(self._pass_on, name))

    def _pass_on(self, name: str) -> None:
        self._send("signal", name)
        if name == "SIGTERM" and self._guard is not None:  # ranks that do not save may clean up
            self._end_at = min(self._end_at, time.monotonic() + self._grace_s)

    # -- reports on the rank. Implements `Watcher`

    def on_start(self, rank: int, pid: int) -> None:
        self._send("started", pid)
        self._send("word", "reached", ("start", self._began))  # the coordinator began later

    def on_output(self, rank: int, stream: int, data: bytes) -> None:
        self._last_output = (self._last_output + data)[-_KEPT:]
        with contextlib.suppress(OSError):  # a full disk
            while data:
                data = data[os.write(self._streams[stream], data) :]
        self._report_progress()

    def on_word(self, rank: int, word: str, body: Any, file: int | Path | None) -> None:
        if isinstance(file, int):
            self._value = _content(file)
        self._send("word", word, body)

    def on_end(self, rank: int, code: int | None, lost_with: str = "") -> None:
        self._has_ended = True
        self._end_at = self._kill_at = _NEVER
        self._send("end", code, lost_with, last_words_of(self._last_output.decode(errors="replace"), LAST_WORDS))

    def on_trouble(self, what: str) -> None:
        self._send("trouble", what)

    def _report_progress(self) -> None:
        if time.monotonic() - self._alive_at > _ALIVE_S:
            self._alive_at = time.monotonic()
            self._send("output")

    # -- the end of the task

    def _leave(self) -> NoReturn:
        """Exit without unloading torch, with a code that makes Slurm end the other tasks if this rank failed."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        coordinator = self._coordinator
        if coordinator is not None and coordinator.ending.requeued:
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


def _separate_streams(log: Path) -> dict[int, int]:
    """Return copies of this process's output streams for the rank. Its own output goes into a log from now on."""
    copies = {number: os.dup(number) for number in (1, 2)}
    try:
        own = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    except OSError:  # a full disk
        own = os.open(os.devnull, os.O_WRONLY)
    for number in copies:
        os.dup2(own, number)
    os.close(own)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return copies


def _take_signals(act: Callable[[int, Any], None]) -> None:
    """Handle the signals of Slurm. They are blocked until now."""
    for number in FROM_CLUSTER:
        signal.signal(number, act)
    signal.signal(signal.SIGCONT, signal.SIG_DFL)  # submitit's handler would log it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FROM_CLUSTER)


def _assignment(rank: int, plan: Plan, address: Address, host: str, own: str) -> Assignment:
    """Return the assignment of a rank. The ranks' store has the address at which this task reaches rank 0's machine."""
    meeting, several = address.meeting, plan.platform.n_nodes > 1
    if several and meeting is not None and meeting.host is not None:
        meeting = replace(meeting, host=host)
    interface = interface_of(own) if several else None
    return assignments_of(plan.platform, meeting, plan.surroundings, interface=interface)(rank, address.restart)


def _content(file: int) -> bytes:
    """Return the content of an open file, and close it."""
    with open(file, "rb") as source:
        source.seek(0)
        return source.read()
