"""A task of a launch's batch job. It is a rank: srun has started it, and supervises it.

    main thread ───── set-up, function, outcome ──► a file ──► exit handlers ──► exit, together
    signal threads ── SIGUSR2: save. SIGTERM: ends a wait in C code
    agreement ─────── agrees with the other ranks on the step to save in, writes stacks on request

srun ends all tasks when one exits with a failure. So a rank writes its outcome into a file before
it exits. A rank that has returned runs its exit handlers, and then waits for the other ranks. A
task that exits without a file has died, and the log of srun has the cause.
"""

from __future__ import annotations

import _thread
import contextlib
import faulthandler
import math
import os
import pickle
import signal
import socket
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from parawrap.errors import LaunchError
from parawrap.launch._platform_fields import PlatformFields
from parawrap.launch._world import RankPlace
from parawrap.launch.agreement import Agreement, StacksRequests
from parawrap.launch.set_up import RankSetUp
from parawrap.launch.slurm.commands import requeue_job
from parawrap.launch.slurm.launch_folder import Folder
from parawrap.processes.outcomes import Ended, Outcome, Raised, Requeued, Returned, outcome_of
from parawrap.processes.pickling import pack
from parawrap.processes.preemption import RequeueRequested
from parawrap.processes.rank_process import (
    EndOrdered,
    flush_and_join_threads,
    flush_streams,
    leave,
    refuse_breakpoint,
    run_exit_steps,
)
from parawrap.processes.script_globals import ScriptOfRank
from parawrap.processes.settings import Settings
from parawrap.processes.torch_groups import (
    LINGER_S,
    LOOPBACK,
    NO_LIMIT,
    StoreAddress,
    break_links,
    open_tcp_store,
)

_ARRIVAL_S = 300.0  # importing torch from a busy network file system takes minutes
_POLL_S = 0.05  # of ranks that wait for the address of rank 0 in the launch folder
# Python code reacts to SIGTERM in less time. A main thread that does not react waits in C code
_SIGTERM_S = 1.0
_REQUEUE_S = 60.0  # Slurm ends the tasks of a requeued job well before this
_LAUNCHER_NOTICE_S = 2.0  # for srun to report the death that broke a connection
_REQUEUED = "requeued"  # a key of the store: some rank requests a restart


def run_rank(path: str, plan: bytes) -> NoReturn:
    """Be this task's rank, and exit.

    `path` is the launch's folder. `plan` is the pickled platform and settings. submitit calls this
    function in the process that srun has started.
    """
    platform, settings = pickle.loads(plan)
    task = _Task(Folder(Path(path)), platform, settings)
    code = task.run()
    if code:
        # At once: threads of the function would hold the other ranks in their collective
        os._exit(code)
    leave(code)


class _Task:
    """The rank of this task, in its main thread. It exists until the process exits."""

    def __init__(self, folder: Folder, platform: PlatformFields, settings: Settings) -> None:
        import submitit  # the submitting process may lack it

        job = submitit.JobEnvironment()
        self._folder = folder
        self._platform = platform
        self._settings = settings
        self._start = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        self._place = RankPlace.of(
            job.global_rank, platform.ranks_per_node, platform.n_nodes, self._start
        )
        self._outcome_file = Path(job.paths.result_pickle)
        self._number = job.job_id  # read now: the function may change the environment
        # Never left: the store and the open file in it live as long as the process
        self._kept = contextlib.ExitStack()
        # For messages between the ranks, not for process groups. None until the ranks meet
        self._store: dist.Store | None = None
        self._is_ending = False  # True once the handler of SIGTERM has raised: it raises once

    def run(self) -> int:
        """Run the function, and write how it ended. Return the exit code."""
        self._outcome_file.unlink(missing_ok=True)  # of an earlier start
        outcome = self._call()
        # SIGTERM before this line ends this rank without an outcome: another rank has the cause.
        # From here on, an exception of the handler would replace the outcome
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._write(outcome)
        if isinstance(outcome, Returned):
            # Exit handlers may take long. They come before the wait for the other ranks: once a
            # task has exited, srun kills the others after grace_s
            signal.signal(signal.SIGTERM, self._report_unfinished)
            run_exit_steps()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if isinstance(outcome, (Returned, Requeued)):
            return self._end_together()
        if isinstance(outcome, Raised) and outcome.is_echo:
            # If this task exited now, srun would end all tasks: also the one with the cause, before
            # it reports. If the cause is a death, srun would report this exit instead
            time.sleep(self._platform.grace_s + _LAUNCHER_NOTICE_S)
        return 1

    def _call(self) -> Outcome:
        """Set up the rank and run the function. Return how it ended, whatever it raises."""
        try:
            # The submitting process checks this too, but it may have ended
            failures = self._folder.failures(self._start, self._number)
            if failures > self._platform.max_restarts:
                msg = (
                    f"Slurm started job {self._number} again, start {self._start}, after "
                    f"{failures} start(s) ended by a failure, such as the loss of a node: "
                    f"max_restarts={self._platform.max_restarts} allows no more"
                )
                raise LaunchError(msg)
            self._settings.apply()
            sys.breakpointhook = refuse_breakpoint
            address = self._meet()
            rank = self._place.global_rank
            requests = StacksRequests(
                last=partial(self._folder.last_request, self._start),
                answer=partial(self._folder.write_answer, rank),
            )
            open_store = partial(self._open_messages, address)
            agreement = Agreement(open_store, rank, self._place.world_size, requests)
            self._take_signals(agreement)
            RankSetUp(self._platform, self._place, address).enter(agreement.preemption)
            if rank == 0:
                self._folder.mark("begun", self._start)
            with agreement:
                return Returned(time.time(), self._value())
        except RequeueRequested:
            if self._store is not None:
                with contextlib.suppress(dist.DistError):  # rank 0 has ended: its outcome counts
                    self._store.set(_REQUEUED, "")
            return Requeued(time.time())
        except EndOrdered:
            return Ended(time.time())
        except BaseException as error:  # noqa: BLE001 (a rank reports every exception)
            # Here `at` is not a time, but the number of this failure among those of all ranks: only
            # the order of failures matters
            return replace(outcome_of(error), at=self._count_failure())

    def _value(self) -> bytes:
        """Call the function, and return its pickled value."""
        block = memoryview(bytearray(self._folder.call.read_bytes()))
        # `BatchRun` has packed one item, the call, which takes all bytes. `take` also sets the
        # globals that it brings
        whole_block = range(len(block))
        function, args, kwargs = ScriptOfRank().take(whole_block, block)
        value = function(*args, **kwargs)
        flush_and_join_threads()  # here, so that its errors are errors of the call
        return pack(value, "the result").to_bytes()

    def _meet(self) -> StoreAddress:
        """Open the store for messages. Return the address of the one for process groups.

        This is the same store, at the port of rank 0, unless process groups meet in a file.
        """
        platform = self._platform
        if self._place.global_rank == 0:
            # srun runs on the first node, which is this one
            is_alone = platform.n_nodes == 1
            host = LOOPBACK if is_alone else os.environ["SLURM_LAUNCH_NODE_IPADDR"]
            store = open_tcp_store(
                platform.master_addr or host, platform.master_port, on_all_interfaces=not is_alone
            )
            address = self._kept.enter_context(store)
            self._folder.write_address(self._start, address)
        else:
            address = self._await_address()
        self._store = self._open_messages(address)
        if platform.ipc_protocol == "file":  # for process groups only
            return replace(address, path=str(self._folder.path / f"store-{self._start}"))
        return address

    def _await_address(self) -> StoreAddress:
        until = time.monotonic() + _ARRIVAL_S
        while (address := self._folder.address(self._start)) is None:
            if time.monotonic() > until:
                msg = f"rank 0 did not publish its address within {_ARRIVAL_S:g} seconds"
                raise LaunchError(msg)
            time.sleep(_POLL_S)
        return address

    def _open_messages(self, address: StoreAddress) -> dist.Store:
        """Open a connection to the store for messages between the ranks."""
        at_port = replace(address, path=None)
        # The prefix keeps starts of the job apart
        return dist.PrefixStore(f"parawrap/{self._start}", at_port.open(self._place.world_size))

    # -- signals. SIGUSR2 is blocked from the start of this process, also in processes that the
    # function starts. SIGUSR1 belongs to the function

    def _take_signals(self, agreement: Agreement) -> None:
        faulthandler.enable()
        stacks = self._kept.enter_context(self._folder.stacks_of(self._place.global_rank).open("a"))
        # Slurm sends SIGCONT before SIGTERM. With a handler of SIGCONT, Linux might give SIGTERM to
        # another thread
        signal.signal(signal.SIGCONT, signal.SIG_DFL)
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)  # submitit's handler would requeue the job
        signal.signal(signal.SIGTERM, self._on_sigterm)
        faulthandler.register(signal.SIGTERM, stacks, chain=True)  # and then call `_on_sigterm`
        # Python writes the number of each signal here, also while the main thread runs C code
        numbers, written = socket.socketpair()
        written.setblocking(False)  # Python refuses a blocking file: a handler must not block
        signal.set_wakeup_fd(written.detach())
        os.register_at_fork(after_in_child=_restore_signals)
        threading.Thread(
            target=self._await_preemption,
            args=(agreement,),
            name="parawrap-preemption",
            daemon=True,
        ).start()
        threading.Thread(
            target=self._await_sigterm, args=(numbers,), name="parawrap-sigterm", daemon=True
        ).start()

    def _await_preemption(self, agreement: Agreement) -> None:
        """Make all ranks save at SIGUSR2, and call a handler that the function has installed.

        The signal is blocked in all threads, so only `sigwait` takes it.
        """
        while True:
            signal.sigwait((signal.SIGUSR2,))
            with contextlib.suppress(OSError):  # the disk is full: ranks may save elsewhere
                self._folder.mark("preempted", self._start)
            agreement.request()
            if callable(signal.getsignal(signal.SIGUSR2)):
                # Runs the handler in the main thread, at its next bytecode
                _thread.interrupt_main(signal.SIGUSR2)

    def _await_sigterm(self, numbers: socket.socket) -> None:
        """Break the connections of a main thread that waits for other ranks in C code at SIGTERM.

        The wait then raises an error.
        """
        while numbers.recv(1)[0] != signal.SIGTERM:
            pass
        time.sleep(_SIGTERM_S)
        if not self._is_ending:
            break_links()

    def _on_sigterm(self, *_: object) -> None:
        if not self._is_ending:
            self._is_ending = True
            raise EndOrdered

    def _report_unfinished(self, *_: object) -> None:
        """Exit at a SIGTERM during the exit handlers: the job is at its limit, or was cancelled."""
        rank = self._place.global_rank
        text = f"rank {rank} returned, but SIGTERM ended it before its exit handlers had ended\n"
        with contextlib.suppress(OSError):
            # Not `sys.stderr`, which the function or its exit handlers may have closed
            os.write(2, text.encode())
        os._exit(1)

    # -- the end

    def _count_failure(self) -> float:
        """Return the place of this failure among those of all ranks.

        The store counts them, because the clocks of machines differ.
        """
        if self._store is None:  # the ranks have not met yet: no function has run
            return 0.0
        try:
            return float(self._store.add("failed", 1))
        except dist.DistError:  # rank 0 has ended, so this failure is not the first
            return math.inf

    def _write(self, outcome: Outcome) -> None:
        import submitit.core.utils

        with contextlib.suppress(Exception):  # the function may have replaced the streams
            flush_streams()
        # In the form of submitit, which itself reports tasks that cannot import this package
        with submitit.core.utils.temporary_save_path(self._outcome_file) as part:
            part.write_bytes(pickle.dumps(("success", (self._start, outcome))))

    def _end_together(self) -> int:
        """Wait until all ranks have ended, and requeue the job if one of them requests it.

        Return the exit code.
        """
        store = self._store
        assert store is not None
        with contextlib.suppress(dist.DistError):  # rank 0 has left, so all have ended
            if store.add("ended", 1) == self._place.world_size:
                store.set("all ended", "")
            try:
                store.wait(["all ended"], timedelta(seconds=LINGER_S))  # most ranks end together
            except dist.DistStoreError:  # others may wait for this rank in a collective
                break_links()
                store.wait(["all ended"], NO_LIMIT)
            if store.check([_REQUEUED]):
                return self._requeue()
        return 0

    def _requeue(self) -> int:
        """Let rank 0 requeue the job, and wait until Slurm ends this task.

        Return the exit code of a task that is not ended.
        """
        if self._place.global_rank == 0:
            self._folder.mark("preempted", self._start)
            reason = requeue_job(self._number)
            if reason is not None:
                text = f"Slurm refused to requeue the job: {reason}\n"
                # Not `sys.stderr`, which the function may have replaced
                sys.__stderr__.write(text)  # type: ignore[union-attr]
                return 1
        time.sleep(_REQUEUE_S)
        return 1


def _restore_signals() -> None:
    """Let SIGTERM end a process that the function has forked, as it would end any process."""
    signal.set_wakeup_fd(-1)
    faulthandler.unregister(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
