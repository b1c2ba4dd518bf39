"""The session of an open block: cut calls, whole calls in lanes, counters, and traces.

Batches of a stream take this way. Submitted calls enter it at `Session.get_ready`::

    stream (`streams.py`) ──► ThreadStream.start ──► Session.get_ready, once per stream
                                     │
                                     └─► Session.send ──► Lanes.send ──► WholeCall in a lane
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from itertools import islice
from operator import attrgetter
from os import getpid
from pathlib import Path
from typing import Any

import torch

from parawrap._private_names import global_hooks, profiler_runs, version_of
from parawrap.backends import device_of
from parawrap.engine.call import Calls, Entry
from parawrap.engine.device_streams import moments_of
from parawrap.engine.lanes import Modes, here
from parawrap.engine.stats import LaneStats, Stats
from parawrap.engine.streams import (
    Pending,
    Prepare,
    StreamSize,
    Tell,
    as_call,
    make_failed_future,
    make_future,
)
from parawrap.engine.trace import Trace
from parawrap.engine.whole_call import CHANGED, LaneFuture, Ready, WholeCall
from parawrap.errors import ReplicaError, SessionError
from parawrap.tree import TENSORS, flatten

_CPU = torch.device("cpu")
_is_cpu = attrgetter("is_cpu")
# Batches below this are tiny: to wake a caller costs about 30 us
_TINY_NS = 100_000
# An output waits for later ones at most this long before the caller reads it. As long as the work
# of a message to workers; a guess that no test has contradicted
_DELAY_NS = 5_000_000


class Session(Calls):
    """The calls of one target, until `close`. Thread-safe."""

    # Whole calls, each in one lane

    def get_ready(self, prepare: Prepare | None = None) -> Ready | None:
        """Bring the replicas up to date, and return the facts that whole calls need.

        None if these calls must run plainly. `prepare` is the option of `map`.

        Raises:
            SessionError: If the lanes are closed.
            ReplicaError: If a copy cannot be made.
        """
        if not self.lanes.is_open:
            msg = (
                "the lanes are closed: submit inside the `with` block, and read the outputs of map "
                "before it ends"
            )
            raise SessionError(msg)
        if not self.is_ready():
            return None
        replicas = self.replicas
        with self._lock:
            # No cut call runs now. The next one sees the flag, and waits for whole calls
            self.runs_whole_calls = True
            if not replicas.state.is_current():
                self.refresh()
            state, survey = replicas.state, replicas.state.survey
            if not state.replicas:  # such as a lazy layer without a shape yet
                return None
            # Of earlier calls: a lane does not warn, since it would not name the user's line
            replicas.unkept.warn()
            prepares, prepare_draws = None, False
            if prepare is not None:
                prepares, prepare_draws = replicas.copy_for_lanes(prepare)

            # Must a call look for writes of forward?
            brings_code = prepare is not None or any(global_hooks)
            may_write = brings_code or not state.possible_writes.is_quiet
            looks_at_contents = not state.possible_writes.watched_whole_call or survey.writes_data
            first_call_lock = None
            if may_write and looks_at_contents:
                first_call_lock = threading.Lock()
                state.possible_writes.watched_whole_call = True
            is_quiet = not may_write and not self.recorder.traces and self.rules.keep_single

            # Must one lane run all calls?
            draws = prepare_draws or bool(survey.generators)
            has_order = survey.in_turns or torch.are_deterministic_algorithms_enabled()
            return Ready(
                modes=Modes.capture(self.lanes.backend.type),
                versions=[*map(version_of, state.params)],
                state=state,
                is_quiet=is_quiet,
                in_order=draws or has_order,
                prepares=prepares,
                first_call_lock=first_call_lock,
            )

    def submit(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
        """Run a call whole in one lane, and return a future of its output.

        Inside a lane, it runs at once.
        """
        ready = self.get_ready()
        if ready is None:
            try:
                return make_future(self.run_plainly(entry, args, kwargs))
            except Exception as error:  # noqa: BLE001
                return make_failed_future(error)
        future = LaneFuture()
        self.send(WholeCall(self, entry, args, kwargs, ready, future))
        return future

    def open_stream(self, entry: Entry, prepare: Prepare | None, _size: StreamSize) -> ThreadStream:
        """Return the starter of one stream. The size is that of messages, which threads lack."""
        return ThreadStream(self, entry, prepare)

    def send(self, call: WholeCall) -> None:
        """Queue a call; under a profiler, which records the calling thread alone, run it here."""
        # With `prepare`, the lane computes the arguments, so the device of the batch does not count
        is_computed = call.ready.prepares is not None
        is_on_cpu = self.stays_on_cpu and (is_computed or _are_on_cpu(call.args, call.kwargs))
        if not is_on_cpu:
            sources = map(device_of, flatten((call.args, call.kwargs))[0])
            devices = (call.ready.state.home, self.output_device, *self.devices, *sources)
            # As for lane 0: the lane that takes the call is not known yet
            moments = moments_of(self.devices[:1], devices)
            if moments:
                (call.moment,) = moments
        if profiler_runs():
            call(self.lanes.all[0])
        else:
            self.lanes.send(call, in_order=call.ready.in_order)

    def cancel(self) -> None:
        """Drop submitted calls that have not started."""
        for call in self.lanes.list_queued():
            # `future` is read once: a lane that ends the call in between sets it to None
            (call.future or call).cancel()

    def renew(self) -> None:
        """Copy everything to the lanes at the next call.

        It never waits: a callback in a lane may call it.
        """
        self.replicas.doubt_everything()

    def close(self) -> None:
        """Let the lanes finish, and end them. A call in flight finishes too."""
        self.lanes.close()
        # In a lane, the next lines would wait for that lane; in a forked child, for lost threads
        if here.lane is None and self.lanes.pid == getpid():
            try:
                self.replicas.unkept.warn()
            finally:
                with self._lock:
                    self.lanes.run_idle(self.replicas.forget)

    def stats(self) -> Stats:
        """Return the counters."""
        whole_calls = 0
        of_lanes = []
        for lane in self.lanes.all:
            whole_calls += lane.whole_calls
            busy_s = lane.busy_ns / 1e9
            of_lanes.append(LaneStats(lane.device, lane.label, lane.tasks, lane.rows, busy_s))
        return Stats(
            calls=self.cut_calls + self.plain_calls + whole_calls,
            plain=self.plain_calls,
            shards=self.shards,
            refreshes=self.replicas.refreshes,
            copied_bytes=self.replicas.copied_bytes,
            lanes=tuple(of_lanes),
        )

    def trace(self, path: str | Path) -> Trace:
        """Return a recorder of the calls of each lane."""
        return Trace(self.recorder, self.lanes.all, path)


class ThreadStream:
    """Starts the batches of one stream in the lanes of a session. For one thread.

    The model is read before the first batch. `Starter` in `streams.py` explains the methods and
    attributes.
    """

    has_room = None  # `most` alone limits the batches in flight

    def __init__(self, session: Session, entry: Entry, prepare: Prepare | None) -> None:
        # The caller may read half of them at once (`wait_for_some`). The other half is a batch that
        # each lane runs, and one that it runs next; a guess that no test has contradicted
        self.most = 4 * len(session.devices)
        self._session = session
        self._entry = entry
        self._prepare = prepare
        self._ready: Ready | None = None
        # The counters of lane 0 when the stream begins: they show how long its batches take
        self._lane = session.lanes.all[0]
        self._tasks, self._busy_ns = self._lane.tasks, self._lane.busy_ns

    def start(self, number: int, batch: Any, tell: Tell | None, /) -> Pending:
        """Start a batch. An error becomes the outcome of the pending call."""
        session, entry = self._session, self._entry
        try:
            if self._ready is None:
                self._ready = session.get_ready(self._prepare)
            if session.recorder.traces:
                entry = entry._replace(batch=number)
            if self._ready is None:
                args, kwargs = as_call(batch if self._prepare is None else self._prepare(batch))
                return make_future(session.run_plainly(entry, args, kwargs), tell)
            if type(batch) is torch.Tensor or self._prepare is not None:
                args, kwargs = (batch,), {}
            else:
                args, kwargs = as_call(batch)
            call = WholeCall(session, entry, args, kwargs, self._ready, tell=tell)
            session.send(call)
            return call
        except Exception as error:  # noqa: BLE001
            return make_failed_future(error, tell)

    def flush(self) -> None:
        """Do nothing: lanes have the batches at once."""

    def wait_for(self, _: Callable[[], bool], /) -> None:
        """Do nothing: lanes have threads."""

    def wait_for_some(self, flying: Collection[Pending], /) -> int:
        """Wait for several batches at once, if they are neither tiny nor long.

        Return how many outputs the caller may read before the next call of this method.

        Each time that the caller wakes, it takes the interpreter lock from a lane that has just
        begun the next batch. So it waits for up to half of the batches in flight, and the other
        half keeps the lanes at work.
        """
        tasks, busy_ns = self._lane.tasks - self._tasks, self._lane.busy_ns - self._busy_ns
        each_ns = busy_ns // tasks if tasks > 0 else 0  # no batch has ended: as if they were tiny
        half = max(1, len(flying) // 2)
        if each_ns < _TINY_NS:  # the lanes are faster than the caller: a wait would gain nothing
            return half
        count = max(1, min(half, _DELAY_NS // each_ns))
        last = next(islice(flying, count - 1, None))
        if isinstance(last, WholeCall):
            # With a limit: forward may wait for what the caller does with the first output
            has_ended = last.ended.acquire(timeout=_DELAY_NS / 1e9)
            if has_ended:
                last.ended.release()  # open again, as the thread that ended the call left it
        return count

    def end(self) -> None:
        """Check that the model is what it was when the stream began.

        Raises:
            ReplicaError: If a parameter was written since.
        """
        ready, session = self._ready, self._session
        self._ready = None
        if ready is not None and session.lanes.is_open:
            replicas = session.replicas
            replicas.unkept.warn()  # of what forward wrote in the lanes, which do not warn
            # By the state of the stream: another thread may be refreshing that of the replicas
            if ready.state.generation != replicas.state.generation:
                raise ReplicaError(CHANGED)
            if [*map(version_of, ready.state.params)] != ready.versions:
                replicas.refuse_write(ready.versions, ready.state)


def _are_on_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if no argument is on another device than the CPU."""
    if not kwargs and TENSORS.issuperset(map(type, args)):
        return all(map(_is_cpu, args))
    return all(device_of(leaf) in (None, _CPU) for leaf in flatten((args, kwargs))[0])
