"""Ranks as processes on this machine."""

from __future__ import annotations

import atexit
import os
import socket
import threading
import weakref
from contextlib import ExitStack
from itertools import count
from typing import Any

from parawrap.errors import LaunchCancelledError, LaunchTimeoutError
from parawrap.launch._groups import Meeting, meeting_place
from parawrap.launch._job import Job, Preview, preview
from parawrap.launch._orders import Orders, Surroundings
from parawrap.launch._outcomes import error_of, first_failure, values_of
from parawrap.launch._output import Transcript, open_log_folder
from parawrap.launch._platform import Platform
from parawrap.launch._results import Launch, RankResults, State
from parawrap.launch._settling import Place
from parawrap.launch._starters import Starter, starter_named
from parawrap.launch._supervisor import Charge, Supervisor
from parawrap.launch._wire import Wire, close_in_forked_children

__all__ = ["launcher"]

_HOW = {
    "forkserver": "forked from a warm process",
    "spawn": "a fresh interpreter each",
    "fork": "forked from this process",
}

_numbers = count(1)
_running: weakref.WeakSet[_LocalLaunch] = weakref.WeakSet()


class _Local:
    """The launcher."""

    def launch(self, job: Job) -> Launch[Any]:
        return _LocalLaunch(job)

    def preview(self, job: Job) -> Preview:
        return preview(
            job, "local", f"{job.platform.world_size} processes on this machine, {_HOW[job.platform.spawn_method]}"
        )


launcher = _Local()


class _LocalLaunch(Launch[Any]):
    """Holds the ranks of one call, and the thread that watches them; both are gone when it is done."""

    def __init__(self, job: Job) -> None:
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
        _running.add(self)
        self._watch.start()

    def _start(self, job: Job, cleanup: ExitStack) -> Supervisor:
        platform = self._platform
        starter = starter_named(platform.spawn_method)  # first: a process that starts needs time
        folder = open_log_folder(platform)
        payload = job.packed()
        cleanup.callback(os.close, payload)
        meeting = cleanup.enter_context(meeting_place(platform))
        prefixes = [f"[rank {rank}] " if platform.world_size > 1 else "" for rank in range(platform.world_size)]
        self._transcripts = [
            Transcript(rank, prefix=prefix, shown=platform.verbose, folder=folder) for rank, prefix in enumerate(prefixes)
        ]
        supervisor = Supervisor(platform, starter.load)
        try:
            for orders in _all_orders(platform, meeting):
                supervisor.watch(_started(starter, orders, payload, self._transcripts[orders.place.global_rank]))
        except BaseException:
            supervisor.end()
            supervisor.run()
            raise
        return supervisor

    def _run(self) -> None:
        """The body of the thread that watches."""
        try:
            with self._cleanup:
                self._supervisor.run()
            if self._platform.upon_finish is not None and self._is_success():
                self._platform.upon_finish()
        except BaseException as error:  # noqa: BLE001 (raised where the results are asked for)
            self._ending = error
        finally:
            _running.discard(self)
            self._ended.set()

    def _is_success(self) -> bool:
        supervisor = self._supervisor
        return not (supervisor.cancelled or supervisor.timed_out) and first_failure(supervisor.outcomes()) is None

    def results(self, timeout: float | None = None) -> RankResults[Any]:
        if not self._ended.wait(timeout):
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
        failed = first_failure(outcomes)
        if failed is not None:
            return error_of(failed, outcomes, world_size)
        return values_of(outcomes, world_size)

    def done(self) -> bool:
        return self._ended.is_set()

    def cancel(self) -> None:
        self._supervisor.cancel()
        self._ended.wait()

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


def _all_orders(platform: Platform, meeting: Meeting | None) -> list[Orders]:
    surroundings = Surroundings.here()
    return [
        Orders(
            place=Place(rank, rank, 0, platform.world_size, platform.world_size),
            meeting=meeting,
            surroundings=surroundings,
            grace_s=platform.grace_s,
            tells_of_life=platform.hang_timeout_s is not None,
        )
        for rank in range(platform.world_size)
    ]


def _started(starter: Starter, orders: Orders, payload: int, transcript: Transcript) -> Charge:
    """Start one rank and tell it who it is."""
    ours, its = socket.socketpair()
    wire = Wire(ours)
    close_in_forked_children(wire)  # before the start, which may be a fork of this process
    with its:
        started = starter.start(its, orders.grace_s)
    wire.send("orders", orders, (payload,))
    return Charge(orders.place.global_rank, wire, transcript, started)


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
