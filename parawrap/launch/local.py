"""Ranks as processes on this machine."""

from __future__ import annotations

import atexit
import os
import socket
import threading
from contextlib import ExitStack
from itertools import count
from typing import Any

from parawrap.errors import LaunchCancelledError, LaunchError, LaunchTimeoutError
from parawrap.launch._charge import Charge
from parawrap.launch._elastic import ElasticSupervisor
from parawrap.launch._failures import add_note
from parawrap.launch._groups import Meeting, meeting_place, private_folder
from parawrap.launch._job import Job, Preview, preview
from parawrap.launch._orders import Orders, Surroundings
from parawrap.launch._outcomes import Returned, error_of, first_failure, values_of
from parawrap.launch._output import Transcript, open_log_folder
from parawrap.launch._platform import Platform
from parawrap.launch._results import Launch, RankResults, State
from parawrap.launch._settling import Place
from parawrap.launch._starters import Starter, starter_named
from parawrap.launch._supervisor import Supervisor
from parawrap.launch._wire import Wire, close_in_forked_children

__all__ = ["launcher"]

_HOW = {
    "forkserver": "forked from a warm process",
    "spawn": "a fresh interpreter each",
    "fork": "forked from this process",
}

_LINE_TIMEOUT_S = 10.0  # a rank that is stopped in the middle of a message stops nobody else for longer

# Seconds that all ranks but those that have returned may wait in torch.distributed, without a move.
STUCK_S = 20.0

_numbers = count(1)
_running: set[_LocalLaunch] = set()


class _Local:
    """The launcher."""

    def launch(self, job: Job) -> Launch[Any]:
        return _LocalLaunch(job)

    def preview(self, job: Job) -> Preview:
        platform = job.platform
        how = "a fresh interpreter each, from an elastic agent" if platform.max_restarts else _HOW[platform.spawn_method]
        return preview(job, "local", f"{platform.world_size} processes on this machine, {how}")


launcher = _Local()


class _LocalLaunch(Launch[Any]):
    """Holds the ranks of one call, and the thread that watches them; both are gone when it is done."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._platform = job.platform
        self._name = job.name
        self._ended = threading.Event()
        self._reading = threading.Lock()
        self._ending: RankResults[Any] | BaseException | None = None
        self._transcripts: list[Transcript] = []
        with ExitStack() as cleanup:
            self._supervisor = self._start(job, cleanup)
            self._cleanup = cleanup.pop_all()
        self._watch = threading.Thread(target=self._run, name=f"parawrap-launch-{next(_numbers)}", daemon=True)
        self._begin_watch()

    def _begin_watch(self) -> None:
        """Have the ranks watched by the thread; or ended, where it cannot be started or the start is interrupted."""
        _running.add(self)
        try:
            self._watch.start()
        except BaseException:
            if self._watch.ident is None:
                self._supervisor.end()
                self._run()
            else:
                self.cancel()
            raise

    def _start(self, job: Job, cleanup: ExitStack) -> Supervisor:
        platform = self._platform
        starter = None if platform.max_restarts else starter_named(platform.spawn_method)  # first: it needs time
        folder = open_log_folder(platform)
        payload = job.packed()
        cleanup.callback(os.close, payload)
        orders = _Orders(platform, cleanup.enter_context(meeting_place(platform)))
        self._transcripts = [
            Transcript(rank, prefix=orders.prefix(rank), shown=platform.verbose, folder=folder)
            for rank in range(platform.world_size)
        ]
        if starter is None:
            return ElasticSupervisor(platform, cleanup.enter_context(private_folder()), payload, orders, self._transcripts)
        return _with_ranks(Supervisor(platform, starter.load), starter, orders, payload, self._transcripts)

    def _run(self) -> None:
        """The body of the thread that watches."""
        try:
            with self._cleanup:
                self._supervisor.run()
            if self._is_success():
                self._job.finish()
        except BaseException as error:  # noqa: BLE001 (raised where the results are asked for)
            self._ending = error
        finally:
            _running.discard(self)
            self._ended.set()

    def _is_success(self) -> bool:
        supervisor = self._supervisor
        given_up = supervisor.cancelled or supervisor.timed_out or supervisor.broken or supervisor.stuck
        return not given_up and first_failure(supervisor.outcomes()) is None

    def results(self, timeout: float | None = None) -> RankResults[Any]:
        if not self._has_ended(timeout):
            msg = f"the ranks of {self._name} still run after {timeout} seconds; they go on: ask again, or cancel()"
            raise TimeoutError(msg)
        with self._reading:
            if self._ending is None:
                self._ending = self._read_ending()
        if isinstance(self._ending, BaseException):
            raise self._ending
        return self._ending

    def _read_ending(self) -> RankResults[Any] | BaseException:
        supervisor, world_size = self._supervisor, self._platform.world_size
        outcomes = supervisor.outcomes()
        if supervisor.cancelled:
            return LaunchCancelledError(f"the launch of {self._name} was cancelled: it has no results")
        if supervisor.timed_out is not None:
            return _timeout_error(self._name, supervisor)
        if supervisor.stuck:
            return _stuck_error(self._name, supervisor)
        failed = first_failure(outcomes)
        if failed is None and (supervisor.broken is not None or len(outcomes) < world_size):
            return LaunchError(
                supervisor.broken or f"only {len(outcomes)} of {world_size} ranks of {self._name} ever began"
            )
        if failed is None:
            return values_of(outcomes, world_size)
        error = error_of(failed, outcomes, world_size)
        for attempt in supervisor.history:
            add_note(error, attempt)
        return error

    def done(self) -> bool:
        return self._ended.is_set()

    def cancel(self) -> None:
        self._supervisor.cancel()
        self._has_ended(None)

    def _has_ended(self, timeout: float | None) -> bool:
        """Waits for it; but ``upon_finish``, which runs in the thread that watches, comes after the end."""
        return threading.current_thread() is self._watch or self._ended.wait(timeout)

    @property
    def state(self) -> State:
        if not self.done():
            return "running"
        if self._supervisor.cancelled:
            return "cancelled"
        return "failed" if isinstance(self._ending, BaseException) or not self._is_success() else "finished"

    def logs(self, rank: int) -> str:
        if not 0 <= rank < len(self._transcripts):
            msg = f"there is no rank {rank} in a world of {len(self._transcripts)}"
            raise IndexError(msg)
        return self._transcripts[rank].text()

    def stacks(self) -> dict[int, str]:
        return {} if self.done() else self._supervisor.ask_for_stacks()

    def __repr__(self) -> str:
        return f"<launch of {self._name} on {self._platform.world_size} ranks: {self.state}>"


class _Orders:
    """The orders of each rank of a launch; gives those of one rank when called."""

    def __init__(self, platform: Platform, meeting: Meeting | None) -> None:
        self._platform = platform
        self._meeting = meeting
        self._surroundings = Surroundings.here()

    def __call__(self, rank: int, restart: int = 0) -> Orders:
        world_size = self._platform.world_size
        return Orders(
            place=Place(rank, rank, 0, world_size, world_size, restart),
            meeting=self._meeting,
            surroundings=self._surroundings,
            grace_s=self._platform.grace_s,
            tells_of_life=self._platform.hang_timeout_s is not None,
            stuck_s=STUCK_S,
        )

    def prefix(self, rank: int) -> str:
        """What stands before each line that the rank writes, where there are several."""
        return f"[rank {rank}] " if self._platform.world_size > 1 else ""


def _with_ranks(
    supervisor: Supervisor, starter: Starter, orders: _Orders, payload: int, transcripts: list[Transcript]
) -> Supervisor:
    """The supervisor, with all ranks started and in its charge; or none of them, where one cannot be started."""
    try:
        for rank, transcript in enumerate(transcripts):
            supervisor.watch(_started(starter, orders(rank), payload, transcript))
    except BaseException:
        supervisor.end()
        supervisor.run()
        raise
    return supervisor


def _started(starter: Starter, orders: Orders, payload: int, transcript: Transcript) -> Charge:
    """Start one rank and tell it who it is."""
    ours, its = socket.socketpair()
    ours.settimeout(_LINE_TIMEOUT_S)
    wire = Wire(ours)
    close_in_forked_children(wire)  # before the start, which may be a fork of this process
    try:
        with its:
            started = starter.start(its, orders.grace_s)
    except BaseException:
        wire.close()
        raise
    wire.send("orders", orders, (payload,))
    return Charge(orders.place.global_rank, wire, transcript, started.pid, started.status)


def _stuck_error(name: str, supervisor: Supervisor) -> LaunchError:
    stacks = supervisor.stacks()
    returned = ", ".join(str(rank) for rank, outcome in supervisor.outcomes().items() if isinstance(outcome, Returned))
    told = "\n".join(f"rank {rank}:\n{text}" for rank, text in sorted(stacks.items()))
    msg = (
        f"{name} can get no further: rank(s) {returned} have returned, and all others wait in torch.distributed. In a "
        f"collective, every rank of the group has to take part. What they were doing:\n{told}"
    )
    return LaunchError(msg)


def _timeout_error(name: str, supervisor: Supervisor) -> LaunchTimeoutError:
    stacks = supervisor.stacks()
    told = "\n".join(f"rank {rank}:\n{text}" for rank, text in sorted(stacks.items()))
    returned = sorted(set(supervisor.outcomes()) - set(stacks))
    msg = f"{name} was {supervisor.timed_out}; its ranks were ended. What they were doing:\n{told}"
    error = LaunchTimeoutError(msg, stacks=stacks)
    if returned:
        error.add_note(f"these ranks had ended before: {', '.join(map(str, returned))}")
    return error


def _cancel_all() -> None:
    """At the interpreter's end nobody can ask for results any more."""
    for launch in list(_running):
        launch.cancel()


atexit.register(_cancel_all)
os.register_at_fork(after_in_child=_running.clear)
