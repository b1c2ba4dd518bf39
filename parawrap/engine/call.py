"""A cut call, from the stub that takes it to the output that the caller gets.

Read it in this order; each function names the steps of the package's docstring that it takes::

    Stub.__call__             find the calls of the block that the stub belongs to
      Calls.call              plain?, plan, current?
        must_run_plainly      plain?
        Calls._plan           plan: look it up (`cut.py`)
        Calls._call_in_lanes  scatter, apply, gather, settle
          Calls._decide_turns which parts run one after another
          Lanes.run           apply (`lanes.py`)
          Calls._cat_rows     gather rows of one tensor, the usual output

Most calls have tensors on the CPU alone, and enter no other function of this file. Any other call
gets a `PlacedCall` (`placed_call.py`) for scatter and gather. A `Probe` watches the first call of
each plan, and does so again after a change of the model.

Each call of the target runs this code, so it enters few functions. It has maps where a
comprehension would read better: up to Python 3.11, each comprehension enters a function.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import cycle
from operator import attrgetter, is_, itemgetter
from os import getpid
from typing import Any, NamedTuple

import torch
import wrapt

from parawrap._private_names import (
    DeviceContext,
    count_dispatch_modes,
    count_function_modes,
    forward_ad_level,
    function_modes,
    functorch_level,
    global_hooks,
    profiler_runs,
    saved_tensor_hooks,
    tracing_state,
    version_of,
)
from parawrap.backends import Backend, device_of, warn_caller
from parawrap.engine.apply import apply_tasks
from parawrap.engine.borrowed import WRITTEN_WHOLE
from parawrap.engine.called_code import draws_from_generator
from parawrap.engine.cut import Cutter, ShardPlan
from parawrap.engine.device_streams import Moment, moments_of
from parawrap.engine.flat_call import FlatCall
from parawrap.engine.forward_writes import contents_of
from parawrap.engine.join import join
from parawrap.engine.join_rules import JoinRules
from parawrap.engine.lane_errors import note_fixed_devices, raise_first_failure
from parawrap.engine.lanes import Lanes, Turns, here
from parawrap.engine.output_handover import hand_over, hand_over_joined
from parawrap.engine.placed_call import PlacedCall
from parawrap.engine.replicas import CopiesOfParts, CopyOptions, Replicas
from parawrap.engine.trace import Recorder, record_call
from parawrap.errors import ShardError
from parawrap.tree import TENSOR, TENSORS, WholeLeaf, flatten

_MOST_PROBED = 1024  # as many plans as a `Cutter` keeps
# In C: a map of one of these enters no function of Python
_requires_grad = attrgetter("requires_grad")
_device_of = attrgetter("device")
_target_of = attrgetter("target")
_shape_of = attrgetter("shape")
_form_of = attrgetter("dtype", "ndim")
_attributes_of = attrgetter("__dict__")
_TURNS = (
    "a model in eval mode is called with gradients enabled, so its lanes on the CPU run one after "
    "another. For inference, call it inside torch.inference_mode(), where they run at the same time"
)


ONE_SHARD = (1,)
"""The sizes that `join` gets for a call that was not cut, whatever its row count."""


def _find_no_calls() -> None:
    """Stand for a weak reference to an object that is gone, so a stub checks for None alone."""


NOWHERE: Any = (_find_no_calls, None)
"""The route of a stub before a block opens and after it has ended: the stub calls plainly."""


class Stub(wrapt.CallableObjectProxy[Callable[..., Any]]):
    """A method of a module inside a block. It has the signature of the plain method.

    `copy`, `deepcopy`, and `pickle` see the plain method in its place.

    `name` is the stub's key in the module's ``__dict__``, and `under` the earlier value of that
    key. The route is a weak reference to the calls of the block, and the entry of the method.
    """

    # torch.compile breaks its graph here. torch.compiler.disable leaves the same marks
    _torchdynamo_disable = True
    _torchdynamo_disable_msg = "calls inside a parallel block run in lanes"

    def __init__(self, plain: Callable[..., Any], under: Any, name: str) -> None:
        super().__init__(plain)
        # wrapt keeps names that begin with _self_ in the stub. All other names are the method's
        self._self_name = name
        self._self_under = under
        # One tuple, so that another thread reads both or neither
        self._self_route: tuple[Callable[[], Any], Entry] = NOWHERE

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        find_calls, entry = self._self_route
        calls = find_calls()
        # Under a compiler, the call becomes part of the graph, and runs plainly
        if calls is None or torch.compiler.is_compiling():
            return self.__wrapped__(*args, **kwargs)
        # By `dict.get`: the view of the module's ``__dict__`` hides the stubs (`patch.py`)
        outermost = dict.get(calls.target.__dict__, entry.method)
        if outermost is not self and not self._is_below(outermost):
            # Other code has wrapped the stub, and the wrapper has called it. Replicas have the
            # wrapper too, so a call in lanes would run the wrapper twice
            return calls.run_plainly(entry, args, kwargs)
        return calls.call(entry, args, kwargs)

    def _is_below(self, outermost: Any) -> bool:
        """True if only stubs of other blocks lie over this one."""
        method = outermost
        while type(method) is Stub and method is not self:
            method = method._self_under
        return method is self

    def __copy__(self) -> Any:
        return self.__wrapped__

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.__wrapped__, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__wrapped__.__reduce_ex__(protocol)


class Entry(NamedTuple):
    """The functions that run a call of the target.

    ``model(x)`` has the method "forward": the hooks of the model itself run in the caller, around
    the stub, and lanes run the hooks of its submodules. ``p.map`` has None: lanes call the replica,
    which runs all hooks.

    Attributes:
        plain: The call without parawrap.
        method: The name of a method of a replica; None calls the replica itself.
        batch: The number of the batch in a stream that is traced; None for any other call.
    """

    plain: Callable[..., Any]
    method: str | None = None
    batch: int | None = None

    def of(self, replica: Any) -> Callable[..., Any]:
        """Return the function that runs a call in a replica."""
        if self.method is None:
            return replica  # type: ignore[no-any-return]
        return getattr(replica, self.method)  # type: ignore[no-any-return]


class Calls:
    """The cut calls and the plain calls of one target, on lanes in threads of this process.

    Thread-safe. `devices` has one entry per lane. A call with more parts than lanes runs part i in
    lane ``i % lanes``. `labels` name the lanes. `shares_hooks` and `copies_of_parts` are as in
    `CopyOptions`.
    """

    def __init__(
        self,
        target: Callable[..., Any],
        devices: Sequence[torch.device],
        *,
        cutters: Mapping[str | None, Cutter],
        rules: JoinRules,
        output_device: torch.device | None = None,
        shares_hooks: bool = False,
        labels: Sequence[str] | None = None,
        copies_of_parts: CopiesOfParts | None = None,
    ) -> None:
        self.target = target
        self.devices = tuple(devices)
        self.cutters = cutters
        self.rules = rules
        self.output_device = output_device  # None: `_choose_device` finds it for each call
        self.lanes = Lanes(devices, labels)
        methods = [method for method in cutters if method is not None]
        options = CopyOptions(methods, shares_hooks=shares_hooks, copies_of_parts=copies_of_parts)
        self.replicas = Replicas(target, devices, options)
        self.recorder = Recorder(target)
        self.plain_calls = self.cut_calls = 0
        self.shards: tuple[int, ...] = ()  # the sizes of the last cut call
        self.stays_on_cpu = False  # True if the lanes, the output, and the model are on the CPU
        # True while a cut call runs: whole calls wait. A whole call reads it with its lane's gate
        # held. This flag and the next are written with `_lock` held
        self.holds_whole_calls = False
        self.runs_whole_calls = False  # True from the first stream or submitted call on
        # True if this build of torch knows the CPU alone, whatever the machine has
        self._has_only_cpu = torch.accelerator.current_accelerator() is None
        # Held by each cut call: a replica runs one call at a time. It protects the replicas and
        # the counters of cut calls. Reentrant: `refresh` and `apply` take it inside a call
        self._lock = threading.RLock()
        self._counting = threading.Lock()  # of `plain_calls`; never held while user code runs
        # Two threads may read one of these at the same time, and both give the warning
        self._warns_of_turns = devices[0].type == "cpu" and self.lanes.share_devices
        self._has_warned_of_plan = False

    def call(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call: cut it, run its parts in the lanes, and join their outputs; or plainly."""
        lanes, replicas = self.lanes, self.replicas
        if here.lane is not None:  # this call is part of another one
            return entry.plain(*args, **kwargs)
        # As `Lanes.is_alive`, which would be one more function to enter
        has_lanes = lanes.is_open and lanes.pid == getpid()
        if not has_lanes or must_run_plainly(lanes.backend):
            return self.run_plainly(entry, args, kwargs)
        planned = self._plan(entry, args, kwargs)
        if planned is None:
            return self.run_plainly(entry, args, kwargs)
        plan, flat = planned
        with self._lock:
            if not lanes.is_open:  # another thread has closed the block in between
                return self.run_plainly(entry, args, kwargs)
            try:
                # No whole call may run in a replica that this call writes. A whole call takes its
                # lane's gate, reads the flag, and keeps the gate to its end. So if this thread gets
                # a gate, no whole call runs in that lane, and the next one finds the flag
                self.holds_whole_calls = True
                # While this is false, the first whole call waits for `_lock` (`Session.get_ready`)
                if self.runs_whole_calls:
                    for lane in lanes.all:
                        with lane.gate:
                            pass
                if not replicas.state.is_current():
                    self.refresh()
                    if not replicas.state.replicas:
                        # A lazy layer, for example, gets its shape in this call. The calls of other
                        # threads wait for `_lock`, since each would give it a shape
                        return self.run_plainly(entry, args, kwargs)
                return self._call_in_lanes(entry, plan, flat, (args, kwargs))
            finally:
                self.holds_whole_calls = False

    def _plan(
        self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[ShardPlan, FlatCall] | None:
        """Return the plan of a call, and the call taken apart; None if it runs plainly.

        It takes no lock: at worst, two threads make the same plan.
        """
        count = self.lanes.count
        if count == 1 and self._is_here(args, kwargs):
            return None
        cutter = self.cutters[entry.method]
        plan = None if kwargs else cutter.plan_of_tensors(args, count)
        if plan is not None:
            flat = FlatCall(args, plan.spec, on_cpu=True)  # without extents, as the plan is made
        else:
            flat = cutter.flatten(args, kwargs)
            plan = cutter.plan(flat, count)
        if plan.hint is not None and not self._has_warned_of_plan:
            self._has_warned_of_plan = True
            warn_caller(plan.hint)
        if len(plan.sizes) == 1 and self._is_here(args, kwargs):
            return None
        return plan, flat

    def _is_here(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """True if the target, the arguments, and the output are on the device of the first lane."""
        if self._has_only_cpu:
            return True
        device = self.devices[0]
        if not kwargs and TENSORS.issuperset(map(type, args)):
            devices = {self.output_device, *map(_device_of, args)}
        else:
            devices = {self.output_device, *map(device_of, flatten((args, kwargs))[0])}
        # None: an argument without a device, such as a number
        return devices <= {None, device} and self.replicas.is_at_home(device)

    def _call_in_lanes(
        self, entry: Entry, plan: ShardPlan, flat: FlatCall, given: tuple[Any, ...]
    ) -> Any:
        """Run the parts of a call on replicas that are up to date, while no other cut call runs.

        `given` are the args and kwargs of the caller.
        """
        lanes, replicas, sizes, rules = self.lanes, self.replicas, plan.sizes, self.rules
        state = replicas.state
        used = state.replicas[: len(sizes)]
        grad = torch.is_grad_enabled()

        # Look: may forward write, and what would show it? A quiet model writes nothing, unless an
        # argument or a hook brings other code (`possible_writes.py`)
        only_tensors = flat.on_cpu or TENSORS.issuperset(map(type, flat.leaves))
        brings_code = any(global_hooks) or not only_tensors
        may_write = brings_code or not state.possible_writes.is_quiet
        # Lanes share parameters and whole arguments, so no lane may write them. A single lane may
        # write arguments, as the plain call does
        versions = [*map(version_of, state.params)]
        is_cut = len(sizes) > 1
        versions_of_whole = plan.read_versions(flat) if is_cut and None in plan.dims else []
        turns = self._decide_turns(flat.leaves, only_tensors) if lanes.count > 1 else None
        probe = None
        if plan not in state.possible_writes.watched_plans:
            probe = Probe(self, plan, flat, may_write, turns)

        # Scatter
        columns = plan.columns(flat, copy=grad)
        placed = None
        moments: Sequence[Moment] = ()
        is_simple = flat.on_cpu and self.stays_on_cpu and not self.recorder.traces
        if is_simple and len(sizes) <= lanes.count:
            functions = map(_target_of, used)
            if entry.method is not None:
                functions = map(attrgetter(entry.method), functions)
            # Task i is replica i with part i of each argument
            tasks: Sequence[Callable[[], Any]] = [*map(partial, functions, *columns)]
        else:
            device = self._choose_device(flat)
            placed = PlacedCall(plan, flat, columns, state.replicas, rules, device)
            tasks = self._make_tasks(entry, placed)
            moments = self._read_moments(flat.leaves, len(sizes))

        # Apply
        if may_write:  # until the look below, which an interrupt may leave out
            for replica in used:
                replica.is_dirty = True
        if grad or brings_code:  # a graph, an argument, or a hook may keep tensors of a lane
            for replica in used:
                replica.are_tensors_held = True
        try:
            outputs, errors = lanes.run(tasks, turns, state.home, moments)
        except BaseException:
            # An interrupt, after which parts may still run. The next call finds these flags and
            # refreshes: `Lanes.run_idle` waits for the parts, and replicas drop their writes
            for replica in used:
                replica.is_dirty = replica.are_tensors_held = True
            raise

        # First, as the next lines may raise: the next call restores the replicas that are dirty
        if may_write:
            for replica in used:
                replica.is_dirty = not replica.snapshot.is_same()
        if grad:
            for replica in used:
                replica.has_graph = True
        if errors:
            for replica in used:
                replica.are_tensors_held = True  # by the frames of a traceback
            note_fixed_devices(errors, state.home, self.devices)
            raise_first_failure(errors, len(sizes), lanes.all, plan.describe)
        if versions_of_whole and versions_of_whole != plan.read_versions(flat):
            raise ShardError(WRITTEN_WHOLE)

        # Gather. The caller's objects are written after all joins, since a join may refuse
        output: Any = None
        if placed is not None:
            placed.join_arguments(given, outputs)
        if placed is None or placed.device is None:
            output = self._cat_rows(outputs, plan, columns, flat.leaves)
        if output is None:
            joining = placed or PlacedCall(plan, flat, columns, state.replicas, rules, None)
            output = joining.join_outputs(outputs, lanes.backend.type)
        if may_write:
            is_joined_tensor = is_cut and type(output) is torch.Tensor
            is_per_lane = type(output) is list and len(output) == len(used)
            if rules.join == "list" and is_per_lane:
                output = [*map(hand_over, output, used)]  # an item per lane, each of its replica
            elif not is_joined_tensor:
                output = hand_over_joined(output, outputs, used)
            elif used[0].tensors:  # else a lane keeps no tensor
                # It is new, or a tensor that all lanes returned, which lane 0's replica knows too
                output = hand_over(output, used[0])

        # Settle: the writes of forward reach the model and the arguments, or are refused
        if may_write:
            replicas.settle_call(used, versions)
        elif [*map(version_of, state.params)] != versions:  # by another thread
            replicas.refuse_write(versions, state)
        if probe is not None:
            probe.end()
        if placed is not None:
            output = placed.enter(output)
        elif grad:  # parts were copies; without gradients they are views of the argument
            plan.write_back(flat, columns, ())
        self.cut_calls += 1
        self.shards = sizes
        # No lane counts now: this call is over, and whole calls wait
        for lane, rows in zip(cycle(lanes.all), sizes, strict=False):
            lane.rows += rows
        return output

    def _decide_turns(self, leaves: Sequence[Any], only_tensors: bool) -> Turns:
        """Return which parts take turns, because gradients or random numbers need an order.

        Arguments that require gradients count in `torch.no_grad` too: a reentrant checkpoint runs
        forward there first, and later again with gradients.
        """
        survey = self.replicas.state.survey
        if survey.in_turns or survey.generators:
            return "all"
        tensors = leaves
        if not only_tensors:
            if draws_from_generator(leaves):
                return "all"
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        model_learns = torch.is_grad_enabled() and any(map(_requires_grad, survey.params))
        if model_learns and self._warns_of_turns:
            is_in_eval_mode = getattr(self.target, "training", True) is False
            if is_in_eval_mode:
                self._warns_of_turns = False
                warn_caller(_TURNS)
        # A profiler records the calling thread alone, which runs all parts that take turns
        if torch.are_deterministic_algorithms_enabled() or profiler_runs():
            return "all"
        # With gradients, a part may draw random numbers that checkpointing draws again
        learns = model_learns or any(map(_requires_grad, tensors))
        return "device" if learns and self.lanes.share_devices else None

    def _cat_rows(
        self,
        outputs: list[Any],
        plan: ShardPlan,
        columns: Sequence[Sequence[Any]],
        leaves: Sequence[Any],
    ) -> torch.Tensor | None:
        """Return the outputs of the lanes as one tensor; None if `join` must join or refuse them.

        Each output must be a plain tensor on the CPU with the rows of its shard. If the outputs are
        the parts of one argument, return that argument.
        """
        dim, sizes = self.rules.row_dim_of_tensor, plan.sizes
        if dim is None or not TENSOR.issuperset(map(type, outputs)):
            return None
        if outputs[0].is_quantized or len({*map(_form_of, outputs)}) > 1:
            return None
        # Autocast would cast the outputs; attributes of a tensor are joined one by one
        if any(map(_attributes_of, outputs)) or torch.is_autocast_enabled("cpu"):
            return None
        for leaf, column, cut_on in zip(leaves, columns, plan.dims, strict=True):
            if cut_on == dim and all(map(is_, outputs, column)):
                return leaf  # type: ignore[no-any-return]
        # Nested tensors, tensors without that dim, and tensors of other shapes raise
        with suppress(RuntimeError, IndexError):
            shapes = map(_shape_of, outputs)
            has_rows = tuple(map(itemgetter(dim), shapes)) == sizes
            # The larger sizes come first, so these two are equal only if all are
            is_proven = sizes[0] != sizes[-1] or not self.rules.needs_proof
            if has_rows and is_proven:
                return torch.cat(outputs, dim)
        return None

    # Other arguments than tensors on the CPU, and other devices

    def _make_tasks(self, entry: Entry, placed: PlacedCall) -> Sequence[Callable[[], Any]]:
        """Return one task per part. A task places its shard in its lane, and runs forward there."""
        run = partial(self._run_part, entry, placed)
        sizes = placed.plan.sizes
        if not self.recorder.traces:
            return [partial(run, index) for index in range(len(sizes))]
        tasks = []
        for index, rows in enumerate(sizes):
            record = partial(self.recorder.record, entry.method, entry.batch, rows)
            tasks.append(partial(record_call, record, index % self.lanes.count, run, index))
        return tasks

    def _run_part(self, entry: Entry, placed: PlacedCall, index: int) -> Any:
        replicas, count = self.replicas, self.lanes.count
        replica = replicas.state.replicas[index % count]
        if index >= count:
            # An earlier part of this call has run in this replica, and may have written into it
            replica.is_dirty = not replica.snapshot.is_same()
            replicas.prepare(replica)
        device = self.devices[index % count]
        shard = placed.plan.place(placed.flat, placed.columns, index, device)
        placed.shards[index] = shard
        return entry.of(replica.target)(*shard.args, **shard.kwargs)

    def _read_moments(self, leaves: Sequence[Any], count: int) -> Sequence[Moment]:
        """Return the caller's moment for the lane of each part; nothing if all is on the CPU."""
        if self.stays_on_cpu and all(map(_is_on_cpu, leaves)):
            return ()
        sources = (self.replicas.state.home, self.output_device, *map(device_of, leaves))
        return moments_of(self.devices[:count], sources)

    def _choose_device(self, flat: FlatCall) -> torch.device | None:
        """Return the device of outputs; None if they stay on the CPU, where lanes make them.

        The device is the first of these: `output_device`, the model's home, the device of the first
        tensor among the arguments, and that of lane 0.
        """
        home = self.replicas.state.home
        if self.stays_on_cpu and (flat.on_cpu or home is not None):
            return None
        devices = (self.output_device, home, *map(device_of, flat.leaves), *self.devices)
        device = next(filter(None, devices))
        is_there = self.stays_on_cpu and device.type == "cpu"
        return None if is_there else device

    # Calls that are not cut

    def run_plainly(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the target itself in this thread.

        It holds no lock meanwhile: plain calls are as safe in threads as the model is by itself.
        """
        if here.lane is not None:
            return entry.plain(*args, **kwargs)
        function = entry.plain
        if self.recorder.traces:
            rows = lane = None  # no lane runs the call
            record = partial(self.recorder.record, entry.method, entry.batch, rows)
            function = partial(record_call, record, lane, entry.plain)
        try:
            # If the target calls itself, that call is part of this one, and runs plainly
            here.lane = self.lanes.all[0]
            output = function(*args, **kwargs)
        finally:
            here.lane = None
            if getattr(self.target, "training", False):
                self.replicas.doubt_buffers()
        # A forked child counts nothing: a thread of the parent may hold the lock, and is not here
        if self.lanes.pid == getpid():
            with self._counting:
                self.plain_calls += 1
        return output if self.rules.keep_single else join([output], ONE_SHARD, self.rules)

    def apply_replicas(
        self, entry: Entry, args: Sequence[tuple[Any, ...]], kwargs: Sequence[dict[str, Any]]
    ) -> list[Any]:
        """Call replica i with args i and kwargs i, in lane i; return the outputs in lane order.

        Raises:
            ReplicaError: If the model cannot be copied, or if forward wrote a parameter.
            BaseException: If a lane fails: the error of the first such lane, with a note on lane
                and device. All other lanes have finished.
        """
        replicas = self.replicas
        with self._lock:
            if not replicas.state.is_current():
                self.refresh()
            state = replicas.state
            if not state.replicas:  # such as a lazy layer without a shape yet
                calls = zip(args, kwargs, strict=True)
                # Not `self.run_plainly`: that of a subclass may call this method
                return [Calls.run_plainly(self, entry, part, named) for part, named in calls]
            used = state.replicas[: len(args)]
            versions = [*map(version_of, state.params)]
            grad = torch.is_grad_enabled()
            tasks = []
            for replica, part, named in zip(used, args, kwargs, strict=True):
                tasks.append(partial(entry.of(replica.target), *part, **named))
                replica.are_tensors_held = True  # a graph, an argument, or a hook may keep them
                replica.has_graph = replica.has_graph or grad
                # Also after an error or an interrupt, after which parts may still run
                replica.is_dirty = True
            outputs = self.apply(tasks, flatten((list(args), list(kwargs)))[0])
            for replica in used:
                replica.is_dirty = not replica.snapshot.is_same()
            replicas.settle_call(used, versions)
            return [*map(hand_over, outputs, used)]

    def apply(self, tasks: Sequence[Callable[[], Any]], leaves: Sequence[Any]) -> list[Any]:
        """Run task i in lane i, and return their values in lane order.

        `leaves` are the arguments of all tasks.
        """
        with self._lock:
            turns = self._decide_turns(leaves, only_tensors=False)
            home = self.replicas.state.home
            return apply_tasks(self.lanes, tasks, leaves, turns, home, self.output_device)

    # For whole calls (`session.py`)

    def is_ready(self) -> bool:
        """True if a call of this thread may go to the lanes.

        False inside a lane, after `close`, in a forked child, and where `must_run_plainly` is true.
        """
        is_open = here.lane is None and self.lanes.is_alive
        return is_open and not must_run_plainly(self.lanes.backend)

    def wait_for_cut_call(self) -> None:
        """Wait until the cut call ends that holds whole calls back."""
        with self._lock:  # held by the cut call
            pass

    def refresh(self) -> None:
        """Bring the replicas up to date with the model, while no lane runs.

        Raises:
            ReplicaError: If the model cannot be copied.
        """
        with self._lock:
            self.lanes.run_idle(self.replicas.refresh, self.replicas.state.home)
            places = (*self.devices, self.output_device, self.replicas.state.home)
            self.stays_on_cpu = all(place is None or place.type == "cpu" for place in places)


class Probe:
    """A closer look at one call. It finds three faults that no version and no replica shows.

    These are writes of parameters through ``.data``, writes into whole arguments that are inference
    tensors, and draws of several lanes from one random generator. The first call of each plan has a
    probe, and the first after a change of the model.
    """

    def __init__(
        self, calls: Calls, plan: ShardPlan, flat: FlatCall, may_write: bool, turns: Turns
    ) -> None:
        state = calls.replicas.state
        self._calls = calls
        self._plan = plan
        self._probed = state.possible_writes.watched_plans
        self._contents: list[Any] | None = None
        # It sums each parameter, which takes time. So only the first plan gets this look, unless
        # code of the model can write a parameter without a new version
        looks_at_contents = not self._probed or state.survey.writes_data
        if may_write and looks_at_contents:
            self._contents = calls.replicas.read_contents()
        # A single lane may write into the arguments
        whole = [flat.leaves[index] for index in plan.whole_tensors] if len(plan.sizes) > 1 else []
        self._inference_tensors = [tensor for tensor in whole if tensor.is_inference()]
        self._contents_of_whole = [*map(contents_of, self._inference_tensors)]
        # Lanes that take turns draw in order
        self._generators = calls.lanes.read_generators() if turns is None else None

    def end(self) -> None:
        """Look again after the call, and note that the plan has been probed.

        Raises:
            ShardError: If forward wrote an argument that every lane gets whole.
            ReplicaError: If forward wrote a parameter.
        """
        if [*map(contents_of, self._inference_tensors)] != self._contents_of_whole:
            raise ShardError(WRITTEN_WHOLE)
        if self._contents is not None:
            self._calls.replicas.check_contents(self._contents)
        if self._generators is not None:
            self._calls.lanes.warn_of_draws(self._generators)
        if len(self._probed) >= _MOST_PROBED:
            self._probed.clear()
        self._probed.add(self._plan)


def must_run_plainly(backend: Backend) -> bool:
    """True if something watches the calling thread and cannot follow into a lane."""
    # A function mode acts in one thread. Of these, lanes take over a default device alone
    if count_function_modes() > 0:
        is_device = (isinstance(mode, DeviceContext) for mode in function_modes())
        if not all(is_device):
            return True
    # Tracers and compilers record what one thread does
    if tracing_state() is not None or torch.compiler.is_compiling():
        return True
    # Dispatch modes (a FLOP counter, fake tensors) and transforms of functorch act in one thread
    if count_dispatch_modes() > 0 or functorch_level() is not None:
        return True
    # Hooks on saved tensors depend on the order of their calls
    if saved_tensor_hooks(False) is not None:
        return True
    # Copies of parameters lose the tangents of forward-mode autograd
    if forward_ad_level() >= 0:
        return True
    # A CUDA graph records one thread
    return backend.type != "cpu" and backend.is_capturing()


def _is_on_cpu(leaf: Any) -> bool:
    """True for a tensor on the CPU, and for a value without tensors."""
    is_without_tensors = not isinstance(leaf, WholeLeaf)  # which may hold some, on any device
    return getattr(leaf, "is_cpu", is_without_tensors)
