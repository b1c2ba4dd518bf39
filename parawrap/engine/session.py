"""The session of an open block: cut calls, whole calls in lanes, counters, and traces."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from itertools import islice
from operator import attrgetter
from os import getpid
from pathlib import Path
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch

from parawrap._private_names import global_hooks, profiler_runs, version_of
from parawrap.backends import backend_of, device_of, drop_own_frames, record_use
from parawrap.engine.borrowed import NOTHING, lend, replace_new_entries, rules_of_entries
from parawrap.engine.call import Calls, Entry
from parawrap.engine.device_streams import Moment, Reached, moments_of
from parawrap.engine.hand_over import hand_over
from parawrap.engine.join import join
from parawrap.engine.lanes import Lane, Modes, here
from parawrap.engine.lent_containers import paths_of_containers
from parawrap.engine.model_state import ModelState
from parawrap.engine.replica import Replica
from parawrap.engine.replicas import Replicas
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
from parawrap.engine.trace import Trace, record_call
from parawrap.errors import ReplicaError, SessionError, add_note
from parawrap.tree import TENSORS, flatten

_CPU = torch.device("cpu")
_is_cpu = attrgetter("is_cpu")
_TINY_NS = 100_000  # to wake a caller costs about 30 us
_DELAY_NS = 5_000_000  # of an output that is there, as in messages to workers
_CHANGED = (
    "the model changed while a stream of batches or a submitted call was open, which read it when "
    "it began. Read the outputs first, and change the model then"
)


class FirstCall:
    """The first whole call of a stream, which shows writes of parameters through ``.data``.

    Lanes may begin several calls at the same moment. The one that gets the lock is the first one,
    and keeps it. It reads the parameters in its lane: while another call of a model that writes
    them for a moment runs, they are not those of the model.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._claim = threading.Lock()

    def read_contents(self) -> list[Any] | None:
        """Return the contents of the parameters before the first call; None for any other call."""
        is_first = self._claim.acquire(blocking=False)
        return self._replicas.read_contents() if is_first else None


class Ready(NamedTuple):
    """Facts that whole calls need, read once for a stream: the caller's modes, the model's state.

    Attributes:
        modes: The modes of the caller.
        versions: Those of the parameters.
        state: That of the model. A call of another generation is refused.
        is_quiet: True if calls of tensors write nothing.
        in_order: True if one lane must run all calls.
        prepares: For each lane, the function that computes the arguments.
        first: The first call, which is watched more closely; None if an earlier one was.
    """

    modes: Modes
    versions: list[int]
    state: ModelState[Replica]
    is_quiet: bool
    in_order: bool
    prepares: Sequence[Prepare] | None
    first: FirstCall | None


def follow(reached: Reached, value: Any) -> None:
    """Have the calling thread's streams come after these events.

    A callback in a lane waits: it may pass the value on.
    """
    for device, event in reached:
        stream = backend_of(device.type).stream(device)
        if stream is None or here.lane is not None:
            event.synchronize()
        else:
            stream.wait_event(event)
    record_use(flatten(value)[0])


class LaneFuture(Future[Any]):
    """A future with a result that may be used on the current streams of the thread that reads it.

    Any number of threads may read it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reached: Reached = ()  # events that follow the work on its devices

    def result(self, timeout: float | None = None) -> Any:
        try:
            value = super().result(timeout)
        except BaseException:
            if self.done() and self.reached:
                # Work that was queued before the error may still read the model
                follow(self.reached, None)
            del self  # it has the error, and the traceback of the error holds this frame
            raise
        if self.reached:
            follow(self.reached, value)
        return value


class WholeCall:
    """A call that one lane runs whole: a future without the locks that a stream does not need.

    A `Future` makes a condition and takes it five times per call, which costs a stream 3 us of CPU
    per batch. Here `ended` is locked until the outcome is there, and `_claim` belongs to the thread
    that gets it first: a lane that runs the call, or a caller that cancels it.
    """

    __slots__ = (
        *("_claim", "_error", "_output", "_tell", "ended"),
        *("args", "entry", "future", "kwargs", "moment"),
        *("reached", "ready", "rows", "session", "staged"),
    )

    def __init__(
        self,
        session: Session,
        entry: Entry,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        ready: Ready,
        future: LaneFuture | None = None,
        tell: Tell | None = None,
    ) -> None:
        self.session = session
        self.entry = entry
        self.args, self.kwargs = args, kwargs
        self.ready = ready
        self.rows = 0
        self.future = future  # of a submitted call
        self.moment: Moment | None = None  # None: everything is on the CPU
        self.staged: Staged | None = None  # the arguments on the lane's device, if they came there
        self._output: Any = None
        self._error: BaseException | None = None
        self.reached: list[Any] = []  # events that follow the work on its devices
        # Given with the call, so there is no moment when the call has ended and nobody is told
        self._tell = tell
        self._claim = threading.Lock()
        self.ended = threading.Lock()
        self.ended.acquire()

    def __call__(self, lane: Lane) -> None:
        """Run the call in a lane's thread, unless it was cancelled."""
        if self.future is not None and not self.future.set_running_or_notify_cancel():
            return
        if not self._claim.acquire(blocking=False):
            return
        session = self.session
        while True:
            with lane.gate:
                # The flag is set before a cut call waits for the gates, and read with the gate
                # held: either this call ends first, or it sees the flag
                if not session.holds_whole_calls:
                    self._run_in(lane)
                    break
            with session._lock:  # wait for the cut call that holds whole calls back
                pass
        self.args, self.kwargs, self.staged = (), {}, None
        if self.future is not None:
            self._land(self.future)
        self.ended.release()
        if self._tell is not None:
            self._tell_of_end(self._tell)

    def _run_in(self, lane: Lane) -> None:
        """Run the call in a lane, and keep its outcome."""
        session, start = self.session, perf_counter_ns()
        with lane.lock:
            before, here.lane = here.lane, lane
            try:
                work = partial(session.run_whole, self, lane)
                home = session.replicas.state.home
                self._output = self.ready.modes.run(work, lane.device, home)
            except BaseException as error:  # noqa: BLE001  # a lane outlives its calls
                drop_own_frames(error)
                add_note(error, f"in {lane}")
                self._error = error
                session.replicas.mark_dirty(lane.index)
            finally:
                here.lane = before
                lane.tasks += 1
                lane.busy_ns += perf_counter_ns() - start

    def done(self) -> bool:
        """True if the call has ended, and its outcome was not read."""
        return not self.ended.locked()

    def result(self) -> Any:
        """Wait for the call, and return its output or raise its error, once."""
        self.ended.acquire()
        error, output = self._error, self._output
        self._error = self._output = None
        if self.reached:
            # Also after an error: work that was queued before it may still read the model
            follow(self.reached, output)
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback holds this frame
        return output

    def cancel(self) -> bool:
        """Drop the call if no lane has started it."""
        if not self._claim.acquire(blocking=False):
            return False
        self._error = CancelledError()
        self.args, self.kwargs = (), {}
        self.ended.release()
        if self._tell is not None:
            self._tell_of_end(self._tell)
        return True

    def _tell_of_end(self, tell: Tell) -> None:
        """Tell that the call has ended. The thread that has the claim does so, once."""
        self._tell = None  # what is told may hold the call, and a cycle would keep the output
        tell(self)

    def _land(self, future: LaneFuture) -> None:
        """Give the outcome to the future, whose callbacks run in this thread."""
        try:
            future.reached = self.reached
            if self._error is None:
                future.set_result(self._output)
            else:
                future.set_exception(self._error)
        except BaseException:  # noqa: BLE001  # a callback that exits does not end the lane
            failure = threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread()))
            threading.excepthook(failure)
        self._error = self._output = self.future = None


class Session(Calls):
    """The calls of one target, until `close`. Thread-safe."""

    # Whole calls, each in one lane

    def get_ready(self, prepare: Prepare | None = None) -> Ready | None:
        """Return what whole calls need; None if they must run plainly.

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
            self.runs_whole_calls = True
            if not replicas.state.is_current():
                self.refresh()
            state = replicas.state
            if not state.lanes:
                return None
            # Of earlier calls; a warning in a lane would not name the user's line
            replicas.unkept.warn()
            prepares, draws = None, False
            if prepare is not None:
                prepares, draws = replicas.copy_for_lanes(prepare)
            writes = not state.edition.is_quiet or prepare is not None or any(global_hooks)
            first = None
            if writes and (not state.edition.is_checked or state.survey.writes_data):
                first = FirstCall(replicas)
                state.edition.is_checked = True
            return Ready(
                Modes.capture(self.lanes.backend.type),
                [*map(version_of, state.params)],
                state,
                is_quiet=not (writes or self.recorder.traces) and self.rules.keep_single,
                in_order=draws
                or bool(state.survey.generators)
                or torch.are_deterministic_algorithms_enabled()
                or state.survey.in_turns,
                prepares=prepares,
                first=first,
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
        """Return what starts the batches of one stream.

        Batches of threads do not travel in messages.
        """
        return ThreadStream(self, entry, prepare)

    def send(self, call: WholeCall) -> None:
        """Queue a call; under a profiler, which records the calling thread alone, run it here."""
        if not (
            self.stays_on_cpu
            and (call.ready.prepares is not None or _are_on_cpu(call.args, call.kwargs))
        ):
            sources = map(device_of, flatten((call.args, call.kwargs))[0])
            places = (call.ready.state.home, self.output_device, *self.devices, *sources)
            call.moment = next(iter(moments_of(self.devices[:1], places)), None)
        if profiler_runs():
            call(self.lanes.all[0])
        else:
            self.lanes.send(call, in_order=call.ready.in_order)

    def run_whole(self, call: WholeCall, lane: Lane) -> Any:
        """Run a whole call in a lane, in the modes of the caller, and return the output."""
        ready, state = call.ready, self.replicas.state
        if not state.lanes or ready.state.generation != state.generation:
            raise ReplicaError(_CHANGED)
        is_plain = ready.is_quiet and call.moment is None and not call.kwargs
        if is_plain and TENSORS.issuperset(map(type, call.args)):
            replica = state.lanes[lane.index]
            replica.are_tensors_held = True  # by a graph
            output = call.entry.of(replica.target)(*call.args)
            # A stream looks once, at its end
            is_read_now = call.future is not None
            if is_read_now and [*map(version_of, state.params)] != ready.versions:
                raise ReplicaError(_CHANGED)
            lane.whole_calls += 1
            first = call.args[0] if call.args else None
            lane.rows += first.shape[self.rules.dim] if first is not None and first.ndim else 0
            return output  # a quiet model returns nothing of its own
        if call.moment is None:
            return self._run_on(call, lane)
        work, stage = partial(self._run_on, call, lane), partial(self._stage, call, lane)
        return lane.streams.run_staged(work, stage, call.moment, call.reached)

    def cancel(self) -> None:
        """Drop submitted calls that have not started."""
        for call in self.lanes.list_queued():
            (call.future or call).cancel()

    def renew(self) -> None:
        """Copy everything to the lanes at the next call.

        It never waits: a callback in a lane may call it.
        """
        self.replicas.renew()

    def close(self) -> None:
        """Let the lanes finish, and end them. A call in flight finishes too."""
        self.lanes.close()
        if here.lane is None and self.lanes.pid == getpid():
            try:
                self.replicas.unkept.warn()
            finally:
                with self._lock:
                    self.lanes.run_idle(self.replicas.forget)

    def stats(self) -> Stats:
        """Return the counters."""
        of_lanes = tuple(
            LaneStats(lane.device, lane.label, lane.tasks, lane.rows, lane.busy_ns / 1e9)
            for lane in self.lanes.all
        )
        calls = self.cut_calls + self.plain_calls + sum(lane.whole_calls for lane in self.lanes.all)
        replicas = self.replicas
        return Stats(
            calls,
            self.plain_calls,
            self.shards,
            replicas.refreshes,
            replicas.copied_bytes,
            of_lanes,
        )

    def trace(self, path: str | Path) -> Trace:
        """Return a recorder of the calls of each lane."""
        return Trace(self.recorder, self.lanes.all, path)

    # The steps of a whole call

    def _stage(self, call: WholeCall, lane: Lane) -> None:
        """Compute the arguments, and copy them to the lane's device.

        On devices with streams, this overlaps the earlier work of the lane.
        """
        self._prepare(call, lane)
        call.staged = Staged(self, call, lane)

    def _prepare(self, call: WholeCall, lane: Lane) -> None:
        """Compute the arguments of a call in its lane, and count their rows."""
        if call.ready.prepares is not None:
            record = None
            if self.recorder.traces:
                record = partial(self.recorder.record, "prepare", call.entry.batch, None)
            prepare = call.ready.prepares[lane.index]
            self.replicas.state.lanes[lane.index].are_tensors_held = True  # it has the lane's parts
            call.args, call.kwargs = as_call(record_call(record, lane.index, prepare, *call.args))
        cutter = self.cutters[call.entry.method]
        if call.args and type(call.args[0]) is torch.Tensor:
            call.rows = cutter.rows(call.args)
        else:
            call.rows = max(0, cutter.whole(call.args, call.kwargs)[0].rows)
        lane.rows += call.rows

    def _run_on(self, call: WholeCall, lane: Lane) -> Any:
        """Run the model on the arguments of a call, and return the caller's output."""
        replicas, ready = self.replicas, call.ready
        replica = replicas.state.lanes[lane.index]
        replicas.prepare(replica)
        replica.has_graph = replica.has_graph or ready.modes.grad
        staged, loan = call.staged, NOTHING
        if staged is None:
            self._prepare(call, lane)
            if call.kwargs or not TENSORS.issuperset(map(type, call.args)):
                given = call.args, call.kwargs
                loan = lend(given, paths_of_containers(flatten(given)[1]))
        else:
            record_use(flatten((call.args, call.kwargs))[0])
        record = None
        if self.recorder.traces:
            record = partial(self.recorder.record, call.entry.method, call.entry.batch, call.rows)
        contents = None if ready.first is None else ready.first.read_contents()
        function = call.entry.of(replica.target)
        output = record_call(record, lane.index, function, *call.args, **call.kwargs)
        lane.whole_calls += 1
        if staged is None:
            # The caller's own containers: forward may have put the lane's into them
            replace_new_entries(loan, partial(hand_over, replica=replica))
            output = hand_over(output, replica)
            if not self.rules.keep_single:
                output = join([output], (1,), self.rules)
        else:
            output = staged.join(output, replica)
        replicas.settle_whole(replica, ready.versions)
        if contents is not None:
            replicas.check_contents(contents)
        return output if staged is None else staged.enter(output)


class Staged:
    """The arguments of a whole call on the lane's device, borrowed from the caller."""

    def __init__(self, session: Session, call: WholeCall, lane: Lane) -> None:
        given = call.args, call.kwargs
        self._session = session
        self._plan, self._flat = session.cutters[call.entry.method].whole(*given)
        self._columns = self._plan.columns(self._flat, copy=False)
        shard = self._plan.place(self._flat, self._columns, 0, lane.device)
        call.args, call.kwargs = shard.args, shard.kwargs
        self._loans = [shard.loan]
        self._borrowed = self._plan.note_borrowed(self._flat, given, self._loans)
        self._home = session.output_device or session.replicas.state.home

    def join(self, output: Any, replica: Replica) -> Any:
        """Return the output on the caller's device, and bring what forward did to arguments there.

        The caller's own objects are not written yet.
        """
        rules, home = self._session.rules, self._home
        if self._borrowed is not None:

            def join_entry(values: Sequence[Any], place: Any, key: Any) -> Any:
                of_entry = rules_of_entries(rules, place, key)
                return join([hand_over(values[0], replica)], (1,), of_entry, home)

            def join_outputs(shown: Sequence[Any]) -> Any:
                return join(shown, (1,), rules, home)

            self._borrowed.join_changes(join_entry, home, [output], join_outputs)
            if rules.join != "list":
                output = self._borrowed.mark_returned(output, 0)
        output = hand_over(output, replica)
        if home is None and rules.keep_single:
            return output
        return join([output], (1,), rules, home)

    def enter(self, output: Any) -> Any:
        """Write what forward wrote into the caller's objects, and return the output with them."""
        self._plan.write_back(self._flat, self._columns, self._loans)
        if self._borrowed is None:
            return output
        self._borrowed.enter()
        return self._borrowed.resolve(output)


class ThreadStream:
    """Starts the batches of one stream in the lanes of a session.

    The model is read before the first batch.
    """

    has_room = None

    def __init__(self, session: Session, entry: Entry, prepare: Prepare | None) -> None:
        self.most = 4 * len(session.devices)
        self._session = session
        self._entry = entry
        self._prepare = prepare
        self._ready: Ready | None = None
        # One lane tells how long batches take, since the stream began
        self._lane = session.lanes.all[0]
        self._tasks, self._busy_ns = self._lane.tasks, self._lane.busy_ns

    def start(self, number: int, batch: Any, tell: Tell | None, /) -> Pending:
        """Start a batch.

        An error goes into the pending call, and is raised in place of the output.
        """
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

        Each time that the caller wakes, it takes the interpreter lock from a lane that has just
        begun the next batch. The other half of the batches in flight keeps the lanes at work.
        """
        tasks, busy_ns = self._lane.tasks - self._tasks, self._lane.busy_ns - self._busy_ns
        each_ns = busy_ns // tasks if tasks > 0 else 0
        half = max(1, len(flying) // 2)
        if each_ns < _TINY_NS:  # the caller is the slower one
            return half
        count = max(1, min(half, _DELAY_NS // each_ns))
        last = next(islice(flying, count - 1, None))
        if isinstance(last, WholeCall):
            # No longer: forward may wait for something that the caller does with the first output
            has_ended = last.ended.acquire(timeout=_DELAY_NS / 1e9)
            if has_ended:  # the lock stays open for the next thread that waits
                last.ended.release()
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
            replicas.unkept.warn()
            # The state of the stream itself: another thread may refresh the replicas right now
            if ready.state.generation != replicas.state.generation:
                raise ReplicaError(_CHANGED)
            if [*map(version_of, ready.state.params)] != ready.versions:
                replicas.refuse_write(ready.versions, ready.state)


def _are_on_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if not kwargs and TENSORS.issuperset(map(type, args)):
        return all(map(_is_cpu, args))
    return all(device_of(leaf) in (None, _CPU) for leaf in flatten((args, kwargs))[0])
