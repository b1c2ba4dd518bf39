"""A call that one lane runs whole: a batch of a stream, or a submitted call.

A session reads the caller's modes and the state of the model once, for `Ready`. The lane that takes
a `WholeCall` runs it so::

    WholeCall.__call__              wait for a cut call that holds whole calls back
      WholeCall._run_in_lane        keep the outcome
        WholeCall._run_in_modes     a quiet model and tensors on the CPU: run forward alone
          WholeCall._run_watched    any other call: look for writes of forward. With streams, the
                                    arguments are those that `WholeCall._stage` has copied
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch

from parawrap._private_names import version_of
from parawrap.backends import backend_of, drop_own_frames, record_use
from parawrap.engine.borrowed import NOTHING, lend, replace_new_entries, rules_of_entries
from parawrap.engine.call import ONE_SHARD, Calls, Entry
from parawrap.engine.device_streams import Moment, Reached
from parawrap.engine.join import join
from parawrap.engine.lanes import Lane, Modes, here
from parawrap.engine.lent_containers import Path, paths_of_containers
from parawrap.engine.model_state import ModelState
from parawrap.engine.output_handover import hand_over
from parawrap.engine.placed_call import PlacedCall
from parawrap.engine.replica import Replica
from parawrap.engine.streams import Prepare, Tell, as_call
from parawrap.engine.trace import record_call
from parawrap.errors import ReplicaError, add_note
from parawrap.tree import TENSORS, flatten

CHANGED = (
    "the model changed while a stream of batches or a submitted call was open, which read it when "
    "it began. Read the outputs first, and change the model then"
)


class Ready(NamedTuple):
    """Facts that whole calls need, read once for a stream, or for a submitted call.

    Attributes:
        modes: The modes of the caller.
        versions: The versions of the parameters.
        state: The state of the model. A call is refused if it meets another generation.
        is_quiet: True if calls of tensors write nothing, and return what forward returns.
        in_order: True if one lane must run all calls.
        prepares: For each lane, the function that computes the arguments; None without `prepare`.
        first_call_lock: The first call keeps it, and looks for writes of parameters through
            ``.data``; None if no call must.
    """

    modes: Modes
    versions: list[int]
    state: ModelState[Replica]
    is_quiet: bool
    in_order: bool
    prepares: Sequence[Prepare] | None
    first_call_lock: threading.Lock | None


def use_after(reached: Reached, value: Any) -> None:
    """Let the calling thread's streams use a value after these events, and keep its memory for it.

    In a lane, the host waits instead: a callback may pass the value to a thread with other streams.
    """
    for device, event in reached:
        stream = backend_of(device.type).stream(device)
        if stream is None or here.lane is not None:
            event.synchronize()
        else:
            stream.wait_event(event)
    record_use(flatten(value)[0])


class LaneFuture(Future[Any]):
    """A future of a submitted call. The thread that reads the result may use it on its streams.

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
                use_after(self.reached, None)
            del self  # the future has the error, whose traceback holds this frame: a cycle
            raise
        if self.reached:
            use_after(self.reached, value)
        return value


class WholeCall:
    """A call that one lane runs whole. Streams read it like a future.

    A `Future` would make a condition and take it five times per call: 3 us of CPU per batch of a
    stream. Here `ended` is locked until the call has an outcome. The thread that gets `_claim`
    keeps it: a lane that runs the call, or a caller that cancels it. `tell` is called with the call
    when it has ended.

    The call borrows its arguments, until it has ended. `result` hands the output over.
    """

    __slots__ = (
        "_claim",
        "_error",
        "_output",
        "_tell",
        "args",
        "calls",
        "ended",
        "entry",
        "future",
        "kwargs",
        "moment",
        "reached",
        "ready",
        "rows",
        "staged",
    )

    def __init__(
        self,
        calls: Calls,
        entry: Entry,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        ready: Ready,
        future: LaneFuture | None = None,
        tell: Tell | None = None,
    ) -> None:
        self.calls = calls
        self.entry = entry
        self.args, self.kwargs = args, kwargs
        self.ready = ready
        self.rows = 0
        self.future = future  # of a submitted call; None for a batch of a stream
        self.moment: Moment | None = None  # None: everything is on the CPU
        self.staged: Staged | None = None  # None: the lane uses the caller's own arguments
        self._output: Any = None
        self._error: BaseException | None = None
        self.reached: list[Any] = []  # events that follow the work on its devices
        # Given with the call, so that the call cannot end before it has the function
        self._tell = tell
        self._claim = threading.Lock()
        self.ended = threading.Lock()
        self.ended.acquire()

    def __call__(self, lane: Lane) -> None:
        """Run the call in a lane's thread, unless it was cancelled."""
        # A submitted call belongs to the thread that sets its future running. If it was cancelled,
        # no thread waits for `ended`, which stays locked
        if self.future is not None and not self.future.set_running_or_notify_cancel():
            return
        if not self._claim.acquire(blocking=False):
            return
        while True:
            with lane.gate:
                # A cut call sets the flag before it takes the gates, and this thread reads the flag
                # with the gate held: either this call ends first, or it finds the flag set
                if not self.calls.holds_whole_calls:
                    self._run_in_lane(lane)
                    break
            self.calls.wait_for_cut_call()
        # First: when the caller gets the output, the memory of the arguments is free
        self.args, self.kwargs, self.staged = (), {}, None
        if self.future is not None:
            self._resolve(self.future)
        # Before `_tell`, which may read the outcome at once
        self.ended.release()
        if self._tell is not None:
            self._report_end(self._tell)

    def _run_in_lane(self, lane: Lane) -> None:
        """Run the call in a lane, and keep its outcome."""
        replicas, start = self.calls.replicas, perf_counter_ns()
        with lane.lock:
            before, here.lane = here.lane, lane
            try:
                work = partial(self._run_in_modes, lane)
                self._output = self.ready.modes.run(work, lane.device, replicas.state.home)
            except BaseException as error:  # noqa: BLE001  # the reader of the outcome raises it
                drop_own_frames(error)
                add_note(error, f"in {lane}")
                self._error = error
                replicas.mark_dirty(lane.index)
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
        self._error = self._output = None  # the reader owns them from here on
        if self.reached:
            # Also after an error: work that was queued before it may still read the model
            use_after(self.reached, output)
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback holds this frame
        return output

    def cancel(self) -> bool:
        """Drop the call if no lane has started it. Return True if so."""
        if not self._claim.acquire(blocking=False):
            return False
        self._error = CancelledError()
        self.args, self.kwargs = (), {}
        self.ended.release()
        if self._tell is not None:
            self._report_end(self._tell)
        return True

    def _report_end(self, tell: Tell) -> None:
        """Call `tell`, once, in the thread that has the claim."""
        self._tell = None  # the function may hold the call, and a cycle would keep the output
        tell(self)

    def _resolve(self, future: LaneFuture) -> None:
        """Give the outcome to the future. Its callbacks run in this thread."""
        try:
            # First: a thread that waits for the result reads the events as soon as it is set
            future.reached = self.reached
            if self._error is None:
                future.set_result(self._output)
            else:
                future.set_exception(self._error)
        except BaseException:  # noqa: BLE001  # a callback that exits does not end the lane
            failure = threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread()))
            threading.excepthook(failure)
        self._error = self._output = self.future = None

    # The steps in the lane

    def _run_in_modes(self, lane: Lane) -> Any:
        """Run the call, with the modes of the caller in force, and return the output."""
        calls, ready, args = self.calls, self.ready, self.args
        state = calls.replicas.state
        # Another call may have refreshed the replicas since `ready` was read
        if not state.replicas or ready.state.generation != state.generation:
            raise ReplicaError(CHANGED)
        is_simple = self.moment is None and not self.kwargs
        writes_nothing = ready.is_quiet and TENSORS.issuperset(map(type, args))
        if is_simple and writes_nothing:
            replica = state.replicas[lane.index]
            replica.are_tensors_held = True  # a graph may hold them
            output = self.entry.of(replica.target)(*args)
            # A stream looks once for all of its calls, at its end
            if self.future is not None and [*map(version_of, state.params)] != ready.versions:
                raise ReplicaError(CHANGED)
            lane.whole_calls += 1
            dim = calls.rules.dim
            # A tensor without that dim has no rows. By `size`: a nested tensor has no shape
            if args and -args[0].ndim <= dim < args[0].ndim:
                lane.rows += args[0].size(dim)
            return output  # not handed over: a quiet model returns no object that the lane keeps
        if self.moment is None:
            return self._run_watched(lane)
        work, stage = partial(self._run_watched, lane), partial(self._stage, lane)
        return lane.streams.run_staged(work, stage, self.moment, self.reached)

    def _run_watched(self, lane: Lane) -> Any:
        """Run the model on the arguments of the call, and return the caller's output."""
        calls, entry, ready = self.calls, self.entry, self.ready
        replicas = calls.replicas
        replica = replicas.state.replicas[lane.index]

        # Current?
        replicas.prepare(replica)
        replica.has_graph = replica.has_graph or ready.modes.grad

        # Scatter: place the arguments, or lend the caller's own
        staged, loan = self.staged, NOTHING
        if staged is None:
            self._prepare_arguments(lane)
            if self.kwargs or not TENSORS.issuperset(map(type, self.args)):
                given = self.args, self.kwargs
                _, spec = flatten(given)
                loan = lend(given, paths_of_containers(spec))
        else:
            # They were copied on another stream of the lane
            record_use(flatten((self.args, self.kwargs))[0])

        # Apply
        record = None
        if calls.recorder.traces:
            record = partial(calls.recorder.record, entry.method, entry.batch, self.rows)
        contents = None
        # Lanes may begin several calls at the same moment. One call gets the lock, and keeps it. It
        # reads the parameters here: a model that writes them for a moment runs in one lane alone,
        # so no other call is at work on them now
        lock = ready.first_call_lock
        is_first = lock is not None and lock.acquire(blocking=False)
        if is_first:
            contents = replicas.read_contents()
        function = entry.of(replica.target)
        output = record_call(record, lane.index, function, *self.args, **self.kwargs)

        # Gather
        if staged is None:
            # Forward may have put objects of the lane into the caller's own containers
            replace_new_entries(loan, partial(hand_over, replica=replica))
            output = hand_over(output, replica)
            if not calls.rules.keep_single:
                output = join([output], ONE_SHARD, calls.rules)
        else:
            output = staged.join_output(output)

        # Settle
        replicas.settle_whole(replica, ready.versions)
        if contents is not None:
            replicas.check_contents(contents)
        # Last: if the writes of forward are refused, the caller's arguments stay as they are
        if staged is not None:
            output = staged.enter(output)
        lane.whole_calls += 1
        lane.rows += self.rows
        return output

    def _stage(self, lane: Lane) -> None:
        """Compute the arguments, and copy them to the lane's device.

        On devices with streams, this overlaps the earlier work of the lane.
        """
        self._prepare_arguments(lane)
        self.staged = Staged(self, lane)

    def _prepare_arguments(self, lane: Lane) -> None:
        """Compute the arguments in the lane if the stream has `prepare`, and count their rows."""
        calls, entry = self.calls, self.entry
        if self.ready.prepares is not None:
            record = None
            if calls.recorder.traces:
                record = partial(calls.recorder.record, "prepare", entry.batch, None)
            prepare = self.ready.prepares[lane.index]
            replica = calls.replicas.state.replicas[lane.index]
            replica.are_tensors_held = True  # `prepare` may have parts of the lane
            made = record_call(record, lane.index, prepare, *self.args)
            self.args, self.kwargs = as_call(made)
        cutter = calls.cutters[entry.method]
        if self.args and type(self.args[0]) is torch.Tensor:
            self.rows = cutter.rows(self.args)
        else:
            plan, _ = cutter.whole(self.args, self.kwargs)
            self.rows = plan.rows


class Staged(PlacedCall):
    """The arguments of a whole call on the lane's device: a placed call with one part.

    A model without tensors has no home: its output stays on the device of the lane.
    """

    def __init__(self, call: WholeCall, lane: Lane) -> None:
        """Replace the arguments of `call` by copies on the lane's device."""
        calls, self._given = call.calls, (call.args, call.kwargs)
        state = calls.replicas.state
        plan, flat = calls.cutters[call.entry.method].whole(*self._given)
        columns = plan.columns(flat, copy=False)
        self._replica = state.replicas[lane.index]
        device = calls.output_device or state.home
        super().__init__(plan, flat, columns, [self._replica], calls.rules, device)
        shard = plan.place(flat, columns, 0, lane.device)
        self.shards = [shard]
        call.args, call.kwargs = shard.args, shard.kwargs

    def join_output(self, output: Any) -> Any:
        """Return the output on the caller's device, and join the changes of arguments there.

        The caller's own objects are not written yet.
        """
        self.join_arguments(self._given, [output])
        # With join="list", the output stays as it is
        if self._borrowed is not None and self._rules.join != "list":
            output = self._borrowed.mark_returned(output, 0)
        return self._join([hand_over(output, self._replica)])

    def _join(self, outputs: Sequence[Any]) -> Any:
        return join(outputs, ONE_SHARD, self._rules, self.device)

    def _join_entries(self, values: Sequence[Any], place: Path | None, key: Any) -> Any:
        (value,) = values
        rules = rules_of_entries(self._rules, place, key)
        return join([hand_over(value, self._replica)], ONE_SHARD, rules, self.device)
