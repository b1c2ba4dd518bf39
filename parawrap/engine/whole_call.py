"""A call that one lane runs whole: a batch of a stream, or a submitted call.

A session reads the state of the model once, for `Ready`. The lane that takes a `WholeCall` runs it
in one of three ways::

    WholeCall.__call__        wait for cut calls, which hold whole calls back
      WholeCall._run_in       keep the outcome
        WholeCall._run        a quiet model and tensors on the CPU: run forward, and nothing else
          WholeCall._run_on   any other call on the CPU; or on the lane's streams, with
                              arguments that `WholeCall._stage` has copied there
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
from parawrap.engine.call import Calls, Entry
from parawrap.engine.device_streams import Moment, Reached
from parawrap.engine.join import join
from parawrap.engine.lanes import Lane, Modes, here
from parawrap.engine.lent_containers import paths_of_containers
from parawrap.engine.model_state import ModelState
from parawrap.engine.output_handover import hand_over
from parawrap.engine.replica import Replica
from parawrap.engine.replicas import Replicas
from parawrap.engine.streams import Prepare, Tell, as_call
from parawrap.engine.trace import record_call
from parawrap.errors import ReplicaError, add_note
from parawrap.tree import TENSORS, flatten

CHANGED = (
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
    per batch. Here `ended` is locked until the call has an outcome, and `_claim` belongs to the
    thread that gets it first: a lane that runs the call, or a caller that cancels it.
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
        self.future = future  # of a submitted call
        self.moment: Moment | None = None  # None: everything is on the CPU
        self.staged: Staged | None = None  # the arguments on the lane's device, if they came there
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
        # only the future is waited for: `ended` stays locked
        if self.future is not None and not self.future.set_running_or_notify_cancel():
            return
        if not self._claim.acquire(blocking=False):
            return
        while True:
            with lane.gate:
                # The flag is set before a cut call waits for the gates, and read with the gate
                # held: either this call ends first, or it sees the flag
                if not self.calls.holds_whole_calls:
                    self._run_in(lane)
                    break
            self.calls.wait_for_cut_call()
        # Before the call ends: a caller that has the output may count on it that the memory of the
        # arguments is free
        self.args, self.kwargs, self.staged = (), {}, None
        if self.future is not None:
            self._land(self.future)
        # Before the function of `_tell`, which may read the outcome at once
        self.ended.release()
        if self._tell is not None:
            self._tell_of_end(self._tell)

    def _run_in(self, lane: Lane) -> None:
        """Run the call in a lane, and keep its outcome."""
        replicas, start = self.calls.replicas, perf_counter_ns()
        with lane.lock:
            before, here.lane = here.lane, lane
            try:
                work = partial(self._run, lane)
                self._output = self.ready.modes.run(work, lane.device, replicas.state.home)
            except BaseException as error:  # noqa: BLE001  # a lane outlives its calls
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
        # Only the reader owns the output from here on
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
        """Report the end of the call, once, in the thread that has the claim."""
        self._tell = None  # the function may hold the call, and a cycle would keep the output
        tell(self)

    def _land(self, future: LaneFuture) -> None:
        """Give the outcome to the future, whose callbacks run in this thread."""
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

    def _run(self, lane: Lane) -> Any:
        """Run the call in the modes of the caller, and return the output."""
        calls, ready, args = self.calls, self.ready, self.args
        state = calls.replicas.state
        # Another call may have refreshed the replicas since `ready` was read
        if not state.replicas or ready.state.generation != state.generation:
            raise ReplicaError(CHANGED)
        is_simple = self.moment is None and not self.kwargs
        writes_nothing = ready.is_quiet and TENSORS.issuperset(map(type, args))
        if is_simple and writes_nothing:
            replica = state.replicas[lane.index]
            replica.are_tensors_held = True  # by a graph
            output = self.entry.of(replica.target)(*args)
            # A stream looks once for all of its calls, at its end
            if self.future is not None and [*map(version_of, state.params)] != ready.versions:
                raise ReplicaError(CHANGED)
            lane.whole_calls += 1
            # A tensor without the dim of the rows has none. A nested tensor has no shape
            dim = calls.rules.dim
            if args and -args[0].ndim <= dim < args[0].ndim:
                lane.rows += args[0].size(dim)
            return output  # a quiet model returns nothing of its own
        if self.moment is None:
            return self._run_on(lane)
        work, stage = partial(self._run_on, lane), partial(self._stage, lane)
        return lane.streams.run_staged(work, stage, self.moment, self.reached)

    def _run_on(self, lane: Lane) -> Any:
        """Run the model on the arguments of the call, and return the caller's output."""
        calls, entry, ready = self.calls, self.entry, self.ready
        replicas = calls.replicas
        replica = replicas.state.replicas[lane.index]
        replicas.prepare(replica)
        replica.has_graph = replica.has_graph or ready.modes.grad
        staged, loan = self.staged, NOTHING
        if staged is None:
            self._prepare(lane)
            if self.kwargs or not TENSORS.issuperset(map(type, self.args)):
                given = self.args, self.kwargs
                _, spec = flatten(given)
                loan = lend(given, paths_of_containers(spec))
        else:
            # They were copied on another stream of the lane
            record_use(flatten((self.args, self.kwargs))[0])
        record = None
        if calls.recorder.traces:
            record = partial(calls.recorder.record, entry.method, entry.batch, self.rows)
        contents = None if ready.first is None else ready.first.read_contents()
        function = entry.of(replica.target)
        output = record_call(record, lane.index, function, *self.args, **self.kwargs)
        lane.whole_calls += 1
        if staged is None:
            # The caller's own containers: forward may have put the lane's into them
            replace_new_entries(loan, partial(hand_over, replica=replica))
            output = hand_over(output, replica)
            if not calls.rules.keep_single:
                output = join([output], (1,), calls.rules)
        else:
            output = staged.join(output, replica)
        replicas.settle_whole(replica, ready.versions)
        if contents is not None:
            replicas.check_contents(contents)
        # Last: if the writes of forward are refused, the caller's arguments stay as they are
        return output if staged is None else staged.enter(output)

    def _stage(self, lane: Lane) -> None:
        """Compute the arguments, and copy them to the lane's device.

        On devices with streams, this overlaps the earlier work of the lane.
        """
        self._prepare(lane)
        self.staged = Staged(self, lane.device)

    def _prepare(self, lane: Lane) -> None:
        """Compute the arguments in the lane, and count their rows."""
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
        lane.rows += self.rows


class Staged:
    """The arguments of a whole call on the lane's device, borrowed from the caller.

    A `PlacedCall` does the same for the shards of a cut call.
    """

    def __init__(self, call: WholeCall, device: torch.device) -> None:
        """Copy the arguments of `call` to the device, in their place."""
        calls, given = call.calls, (call.args, call.kwargs)
        self._rules = calls.rules
        self._home = calls.output_device or calls.replicas.state.home
        self._plan, self._flat = calls.cutters[call.entry.method].whole(*given)
        self._columns = self._plan.columns(self._flat, copy=False)
        shard = self._plan.place(self._flat, self._columns, 0, device)
        call.args, call.kwargs = shard.args, shard.kwargs
        self._loans = [shard.loan]
        self._borrowed = self._plan.find_borrowed(self._flat, given, self._loans)

    def join(self, output: Any, replica: Replica) -> Any:
        """Return the output on the caller's device, and bring what forward did to arguments there.

        The caller's own objects are not written yet.
        """
        rules, home = self._rules, self._home
        if self._borrowed is not None:

            def join_entry(values: Sequence[Any], place: Any, key: Any) -> Any:
                entry = hand_over(values[0], replica)
                return join([entry], (1,), rules_of_entries(rules, place, key), home)

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
