"""A call, whole: all that a warm call runs, besides the plan, the look at the model, and the lanes.

The plan is in `cut.py`, the look in `model_state.py`.

::

    Stub ──► Calls.call ──► plan, current?, scatter ──► Lanes.run ──► gather, settle

From the top: the stub that takes the call, and the calls of one target.
"""

from __future__ import annotations

import copy
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, cycle
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
from parawrap.backends import Backend, device_of, record_use, warn_caller
from parawrap.engine.borrowed import WRITTEN_WHOLE, Borrowed, rules_of_entries
from parawrap.engine.called_code import draws_from_generator
from parawrap.engine.cut import Cutter, Shard, ShardPlan
from parawrap.engine.device_streams import Moment, moments_of
from parawrap.engine.flat_call import FlatCall
from parawrap.engine.hand_over import hand_over
from parawrap.engine.join import join
from parawrap.engine.join_rules import JoinRules
from parawrap.engine.lanes import Lanes, here, without_autocast
from parawrap.engine.lent_containers import Path
from parawrap.engine.replica import Replica
from parawrap.engine.replicas import CopiesOfParts, CopyOptions, Replicas
from parawrap.engine.trace import Recorder, record_call
from parawrap.errors import ShardError, add_note
from parawrap.tree import TENSOR, TENSORS, WholeLeaf, flatten

_MOST_PROBED = 1024  # plans; as many as a cutter keeps
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


NOWHERE: Any = (lambda: None, None)
"""The route of a stub before a block opens and after it has ended: the stub calls plainly.

The lambda stands for a weak reference whose object is gone, so a stub checks for None alone.
"""


class Stub(wrapt.CallableObjectProxy[Callable[..., Any]]):
    """A method of a module inside a block. A copy or a pickle of it is one of the plain method.

    It has the signature of the method. `name` is its place in the module's ``__dict__``, and
    `under` what was there. Its route is a weak reference to the caller, and the entry of the
    method.
    """

    # torch.compile breaks its graph here. torch.compiler.disable leaves the same marks
    _torchdynamo_disable = True
    _torchdynamo_disable_msg = "calls inside a parallel block run in lanes"

    def __init__(self, plain: Callable[..., Any], under: Any, name: str) -> None:
        super().__init__(plain)
        self._self_name = name
        self._self_under = under
        self._self_route: tuple[Callable[[], Any], Entry] = NOWHERE

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        find, entry = self._self_route
        calls = find()
        # Under a compiler, the call becomes part of the graph, and runs plainly
        if calls is None or torch.compiler.is_compiling():
            return self.__wrapped__(*args, **kwargs)
        top = dict.get(calls.target.__dict__, entry.method)
        if top is not self and not self._is_below(top):
            # Somebody has put a wrapper over the stub, and the wrapper has called it. Replicas
            # have the wrapper too, so in lanes it would run twice
            return calls.run_plainly(entry, args, kwargs)
        return calls.call(entry, args, kwargs)

    def _is_below(self, top: Any) -> bool:
        """True if only stubs of other blocks lie over this one."""
        while type(top) is Stub and top is not self:
            top = top._self_under
        return top is self

    def __copy__(self) -> Any:
        return self.__wrapped__

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.__wrapped__, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__wrapped__.__reduce_ex__(protocol)


class Entry(NamedTuple):
    """The functions that run a call of the target.

    `plain` is the call without parawrap. `method` is the name of a method of a replica; None calls
    the replica itself, including its hooks. `batch` is the number of a batch in its stream, for
    traces.
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

    Thread-safe. A call depends on its arguments, the options, the target, and the modes of torch,
    and never on earlier calls. `devices` has one entry per lane. A call with more parts than lanes
    runs part i in lane ``i % lanes``. `labels` name the lanes; `copies_of_parts` is as in
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
        # None: the device of the module, or of a callable's first tensor
        self.output_device = output_device
        self.lanes = Lanes(devices, labels)
        methods = [method for method in cutters if method is not None]
        options = CopyOptions(methods, False, shares_hooks, copies_of_parts)
        self.replicas = Replicas(target, devices, options)
        self.recorder = Recorder(target)
        self.plain_calls = self.cut_calls = 0
        self.shards: tuple[int, ...] = ()
        self.stays_on_cpu = False  # True if the lanes, the output, and the model are on the CPU
        # Both are written with `_lock` held. A whole call reads the first with its lane's gate held
        self.holds_whole_calls = False
        self.runs_whole_calls = False  # True from the first stream or submitted call on
        # Of this build of torch, whatever the machine
        self._has_only_cpu = torch.accelerator.current_accelerator() is None
        self._lock = threading.RLock()  # cut calls of several threads wait for each other
        self._counting = threading.Lock()  # of `plain_calls`; never held while user code runs
        # Flags of warnings: two threads at the same time may give one twice
        self._warns_of_turns = devices[0].type == "cpu" and self.lanes.share_devices
        self._has_warned_of_plan = False

    def call(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call: cut it, run its parts in the lanes, and join their outputs; or plainly."""
        lanes, replicas = self.lanes, self.replicas
        if here.lane is not None:  # this call is part of another one
            return entry.plain(*args, **kwargs)
        if not lanes.is_open or lanes.pid != getpid() or must_run_plainly(lanes.backend):
            return self.run_plainly(entry, args, kwargs)
        planned = self._plan(entry, args, kwargs)
        if planned is None:
            return self.run_plainly(entry, args, kwargs)
        with self._lock:
            if not lanes.is_open:  # another thread has closed the block meanwhile
                return self.run_plainly(entry, args, kwargs)
            try:
                # Whole calls would find what this call leaves in a replica. Those that have begun
                # end first: each holds its lane's gate, and looks at the flag when it has it. If
                # there were none yet, the first one waits for `_lock` before it can begin
                self.holds_whole_calls = True
                for lane in lanes.all if self.runs_whole_calls else ():
                    with lane.gate:
                        pass
                if not replicas.state.is_current():
                    self.refresh()
                    if not replicas.state.lanes:
                        return self.run_plainly(entry, args, kwargs)
                plan, flat = planned
                return self._call_in_lanes(entry, plan, flat, (args, kwargs))
            finally:
                self.holds_whole_calls = False

    def _plan(
        self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[ShardPlan, FlatCall] | None:
        """Return the plan of this kind of call, and the call taken apart; None if it runs plainly.

        It takes no lock: at worst, two threads make the same plan.
        """
        count = self.lanes.count
        if count == 1 and self._is_here(args, kwargs):
            return None
        cutter = self.cutters[entry.method]
        plan = None if kwargs else cutter.plan_of_tensors(args, count)
        if plan is not None:
            flat = FlatCall(args, plan.spec, (), on_cpu=True)
        else:
            flat = cutter.flatten(args, kwargs)
            plan = cutter.plan(flat, count)
        if plan.hint is not None and not self._has_warned_of_plan:
            self._has_warned_of_plan = True
            warn_caller(plan.hint)
        if len(plan.sizes) == 1 and self._is_here(args, kwargs):
            return None
        return plan, flat

    def _call_in_lanes(self, entry: Entry, plan: ShardPlan, flat: FlatCall, call: Any) -> Any:
        """Run the parts of a call on replicas that are up to date, while no other cut call runs.

        `call` are the caller's own arguments.
        """
        lanes, replicas, sizes, leaves = self.lanes, self.replicas, plan.sizes, flat.leaves
        state = replicas.state
        used = state.lanes[: len(sizes)]
        only_tensors = flat.on_cpu or TENSORS.issuperset(map(type, leaves))
        # Listed layers of torch write nothing, unless an argument or a hook brings other code
        has_hooks = any(global_hooks)
        looks = not (state.edition.is_quiet and only_tensors) or has_hooks
        watched = plan.written(flat) if None in plan.dims else []
        versions = [*map(version_of, state.params)]
        turns = self._decide_turns(leaves, only_tensors) if lanes.count > 1 else None

        # Facts that no comparison shows: read for each new plan, and after each change of the model
        probed = state.edition.probed
        is_probe = plan not in probed
        contents = None
        if is_probe and looks and (not probed or state.survey.writes_data):
            contents = replicas.read_contents()
        draws = lanes.read_draws() if is_probe and turns is None else None

        # Scatter
        grad = torch.is_grad_enabled()
        columns = plan.columns(flat, copy=grad)
        shards: list[Shard] = []
        moments: Sequence[Moment] = ()
        is_simple = flat.on_cpu and self.stays_on_cpu and not self.recorder.traces
        if is_simple and len(sizes) <= lanes.count:
            functions: Iterable[Callable[..., Any]] = map(_target_of, used)
            if entry.method is not None:
                functions = map(attrgetter(entry.method), functions)
            tasks: Sequence[Callable[[], Any]] = [*map(partial, functions, *columns)]
        else:
            tasks = self._place_parts(entry, plan, flat, columns, shards)
            if not (self.stays_on_cpu and all(map(_is_on_cpu, leaves))):
                sources = (state.home, self.output_device, *map(device_of, leaves))
                moments = moments_of(self.devices[: len(sizes)], sources)

        # Apply
        if grad or has_hooks or not only_tensors:
            for replica in used:
                replica.are_tensors_held = True
        try:
            outputs, errors = lanes.run(tasks, turns, state.home, moments)
        except BaseException:  # an interrupt: parts may still run, and their writes are put back
            for replica in used:
                replica.is_dirty = replica.are_tensors_held = True
            raise

        # What did forward write?
        if looks:
            for replica in used:
                replica.is_dirty = not replica.snapshot.is_same()
        if grad:
            for replica in used:
                replica.has_graph = True
        if errors:
            for replica in used:
                replica.are_tensors_held = True  # by the frames of a traceback
            _note_fixed_devices(errors, state.home, self.devices)
            raise_first_failure(errors, len(sizes), lanes.all, plan.describe)
        if watched and watched != plan.written(flat):
            raise ShardError(WRITTEN_WHOLE)

        # Gather. Nothing of the caller's is written before all joins are done: each may be refused
        borrowed = self._join_arguments(plan, flat, call, shards, outputs) if shards else None
        is_here = not shards or self._output_place(flat) is None
        output = self._cat_rows(outputs, plan, columns, leaves) if is_here else None
        if output is None:
            output = self._gather(outputs, plan, flat, shards, borrowed)
        if looks and len(sizes) > 1 and type(output) is torch.Tensor:
            # The rows of several lanes in a new tensor, or lane 0's, which may be its own buffer
            if used[0].tensors:
                output = hand_over(output, used[0])
        elif looks:
            output = self._hand_over(output, used)

        # Settle: the writes of forward reach the model and the arguments, or are refused
        if looks:
            replicas.settle_call(used, versions)
        elif [*map(version_of, state.params)] != versions:  # another thread wrote it
            replicas.refuse_write(versions, state)
        if is_probe:
            if contents is not None:
                replicas.check_contents(contents)
            if draws is not None:
                lanes.warn_of_draws(draws)
            if len(probed) >= _MOST_PROBED:
                probed.clear()
            probed.add(plan)
        if grad or shards:
            plan.write_back(flat, columns, [shard.loan for shard in shards])
        if borrowed is not None:
            borrowed.enter()
            output = borrowed.resolve(output)
        self.cut_calls += 1
        self.shards = sizes
        for lane, rows in zip(cycle(lanes.all), sizes, strict=False):
            lane.rows += rows
        return output

    def run_plainly(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the target itself in this thread.

        No lock is held meanwhile: plain calls are as safe in threads as the model is by itself.
        """
        if here.lane is not None:
            return entry.plain(*args, **kwargs)
        function = entry.plain
        if self.recorder.traces:
            record = partial(self.recorder.record, entry.method, entry.batch, None)
            function = partial(record_call, record, None, entry.plain)
        try:
            here.lane = self.lanes.all[0]  # calls of the model by itself are part of this one
            output = function(*args, **kwargs)
        finally:
            here.lane = None
            if getattr(self.target, "training", False):
                self.replicas.suspect_buffers()
        with self._counting:
            self.plain_calls += 1
        return output if self.rules.keep_single else join([output], (1,), self.rules)

    def is_ready(self) -> bool:
        """True if a call of this thread may go to the lanes.

        Not inside a lane, after `close`, or while the thread is traced.
        """
        is_open = here.lane is None and self.lanes.is_alive
        return is_open and not must_run_plainly(self.lanes.backend)

    def refresh(self) -> None:
        """Bring the replicas up to date with the model, while no lane runs.

        Raises:
            ReplicaError: If the model cannot be copied.
        """
        with self._lock:
            self.lanes.run_idle(self.replicas.refresh, self.replicas.state.home)
            places = (*self.devices, self.output_device, self.replicas.state.home)
            self.stays_on_cpu = all(place is None or place.type == "cpu" for place in places)

    def apply_replicas(
        self, entry: Entry, args: Sequence[tuple[Any, ...]], kwargs: Sequence[dict[str, Any]]
    ) -> list[Any]:
        """Call replica i with args i and kwargs i, in lane i; return the outputs in lane order.

        Raises:
            ReplicaError: If the model cannot be copied, or as for a cut call.
            BaseException: If a lane fails: the error of the first such lane, with a note on lane
                and device. All other lanes have finished.
        """
        replicas = self.replicas
        with self._lock:
            if not replicas.state.is_current():
                self.refresh()
            state = replicas.state
            if not state.lanes:
                parts = zip(args, kwargs, strict=True)
                return [Calls.run_plainly(self, entry, part, named) for part, named in parts]
            used = state.lanes[: len(args)]
            versions = [*map(version_of, state.params)]
            calls = [
                partial(entry.of(replica.target), *part, **named)
                for replica, part, named in zip(used, args, kwargs, strict=True)
            ]
            for replica in used:
                replica.are_tensors_held = True
            try:
                outputs = self.apply(calls, flatten((list(args), list(kwargs)))[0])
            finally:
                for replica in used:
                    replica.is_dirty = not replica.snapshot.is_same()
                    replica.has_graph = replica.has_graph or torch.is_grad_enabled()
            replicas.settle_call(used, versions)
            return [*map(hand_over, outputs, used)]

    def apply(self, calls: Sequence[Callable[[], Any]], leaves: Sequence[Any]) -> list[Any]:
        """Run call i in lane i, and return their values in lane order.

        `leaves` are the arguments of all calls.
        """
        with self._lock:
            turns = self._decide_turns(leaves, only_tensors=False)
            home = self.replicas.state.home
            return apply_tasks(self.lanes, calls, leaves, turns, home, self.output_device)

    def _decide_turns(self, leaves: Sequence[Any], only_tensors: bool) -> str | None:
        """Return the parts that run one after another: "all", those of each "device", or None.

        Parts of a device take turns if gradients or random numbers need an order. Arguments that
        require gradients count without gradients too: a reentrant checkpoint runs forward without,
        and once more with them.
        """
        survey = self.replicas.state.survey
        if survey.in_turns or survey.generators:
            return "all"
        tensors = leaves
        if not only_tensors:
            if draws_from_generator(leaves):
                return "all"
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        learns = torch.is_grad_enabled() and True in map(_requires_grad, survey.params)
        if learns and self._warns_of_turns and getattr(self.target, "training", True) is False:
            self._warns_of_turns = False
            warn_caller(_TURNS)
        if torch.are_deterministic_algorithms_enabled() or profiler_runs():
            return "all"
        # A part that learns may draw random numbers that checkpointing recomputes
        learns = learns or True in map(_requires_grad, tensors)
        return "device" if learns and self.lanes.share_devices else None

    def _is_here(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """True if the target, the arguments, and the output are on the device of the first lane."""
        if self._has_only_cpu:
            return True
        device = self.devices[0]
        if not kwargs and TENSORS.issuperset(map(type, args)):
            places = {self.output_device, *map(_device_of, args)}
        else:
            places = {self.output_device, *map(device_of, flatten((args, kwargs))[0])}
        return places <= {None, device} and self.replicas.is_at_home(device)

    def _place_parts(
        self,
        entry: Entry,
        plan: ShardPlan,
        flat: FlatCall,
        columns: Sequence[Sequence[Any]],
        shards: list[Shard],
    ) -> list[Callable[[], Any]]:
        """Return one task per shard.

        Each task enters its shard into `shards` once the shard is on the device of its lane.
        """
        replicas, count, record = self.replicas, self.lanes.count, self.recorder.record
        shards[:] = [Shard((), {}, 0)] * len(plan.sizes)

        def run(index: int) -> Any:
            replica = replicas.state.lanes[index % count]
            if index >= count:
                # The lane has run another part of this call, and this one starts from the model
                replica.is_dirty = not replica.snapshot.is_same()
                replicas.prepare(replica)
            device = self.devices[index % count]
            # One step, into a place of its own: parts of several threads need no lock
            shard = shards[index] = plan.place(flat, columns, index, device)
            return entry.of(replica.target)(*shard.args, **shard.kwargs)

        if not self.recorder.traces:
            return [partial(run, index) for index in range(len(plan.sizes))]
        return [
            partial(
                record_call,
                partial(record, entry.method, entry.batch, rows),
                index % count,
                run,
                index,
            )
            for index, rows in enumerate(plan.sizes)
        ]

    # After the lanes

    def _join_arguments(
        self,
        plan: ShardPlan,
        flat: FlatCall,
        call: Any,
        shards: Sequence[Shard],
        outputs: Sequence[Any],
    ) -> Borrowed | None:
        """Join what forward put into copies of arguments. None for tensors alone."""
        borrowed = plan.note_borrowed(flat, call, [shard.loan for shard in shards])
        if borrowed is None:
            return None
        device, lanes = self._output_place(flat), self.replicas.state.lanes
        originals = partial(_originals_of, lanes, plan, flat, shards)

        def join_entries(values: Sequence[Any], place: Path | None, key: Any) -> Any:
            if device is not None:
                record_use(flatten(values)[0])
            rules = rules_of_entries(self.rules, place, key)
            return hand_over(join(values, plan.sizes, rules, device, originals), lanes[0])

        def join_outputs(shown: Sequence[Any]) -> Any:
            return join(shown, plan.sizes, self.rules, device, originals)

        borrowed.join_changes(join_entries, device, outputs, join_outputs)
        return borrowed

    def _cat_rows(
        self,
        outputs: list[Any],
        plan: ShardPlan,
        columns: Sequence[Sequence[Any]],
        leaves: Sequence[Any],
    ) -> torch.Tensor | None:
        """Return outputs on the CPU next to each other; None for other outputs than such rows.

        Each must be a plain tensor with the rows of its shard. Parts of one argument are that
        argument.
        """
        dim, sizes = self.rules.row_dim_of_tensor, plan.sizes
        if dim is None or not TENSOR.issuperset(map(type, outputs)):
            return None
        if outputs[0].is_quantized or len({*map(_form_of, outputs)}) > 1:
            return None
        if any(map(_attributes_of, outputs)) or torch.is_autocast_enabled("cpu"):
            return None
        for leaf, column, cut_on in zip(leaves, columns, plan.dims, strict=True):
            if outputs[0] is column[0] and cut_on == dim and all(map(is_, outputs, column)):
                return leaf  # type: ignore[no-any-return]
        # Nested tensors, tensors without that dim, and tensors of other shapes raise
        with suppress(RuntimeError, IndexError):
            has_rows = (*map(itemgetter(dim), map(_shape_of, outputs)),) == sizes
            is_proven = sizes[0] != sizes[-1] or not self.rules.needs_proof
            if has_rows and is_proven:
                return torch.cat(outputs, dim)
        return None

    def _gather(
        self,
        outputs: list[Any],
        plan: ShardPlan,
        flat: FlatCall,
        shards: Sequence[Shard],
        borrowed: Borrowed | None,
    ) -> Any:
        """Join the outputs of the lanes on the output device."""
        device = self._output_place(flat)
        if device is not None:
            record_use(flatten(outputs)[0])
        if borrowed is not None and self.rules.join != "list":
            outputs = [*map(borrowed.mark_returned, outputs, range(len(outputs)))]
        originals = partial(_originals_of, self.replicas.state.lanes, plan, flat, shards)
        with without_autocast(self.lanes.backend.type):
            return join(outputs, plan.sizes, self.rules, device, originals)

    def _output_place(self, flat: FlatCall) -> torch.device | None:
        """Return the device of outputs; None if the lanes leave them there, on the CPU."""
        home = self.replicas.state.home
        if self.stays_on_cpu and (flat.on_cpu or home is not None):
            return None
        places = chain((self.output_device, home), map(device_of, flat.leaves), self.devices)
        device = next(filter(None, places))
        return None if self.stays_on_cpu and device.type == "cpu" else device

    def _hand_over(self, output: Any, used: Sequence[Replica]) -> Any:
        """Return the output without what the lanes keep. What all lanes returned is lane 0's."""
        # With join="list", the output has an item per lane, each of another lane's replica
        is_per_lane = type(output) is list and len(output) == len(used)
        if self.rules.join == "list" and is_per_lane:
            return [*map(hand_over, output, used)]
        return hand_over(output, used[0])


def apply_tasks(
    lanes: Lanes,
    tasks: Sequence[Callable[[], Any]],
    leaves: Sequence[Any],
    turns: str | None = None,
    home: torch.device | None = None,
    output_device: torch.device | None = None,
) -> list[Any]:
    """Run task i in lane i, and return their values in lane order.

    `leaves` are the arguments of all tasks. Lanes that share a device run in turns if one of them
    requires gradients.

    Raises:
        BaseException: If a lane fails: the error of the first such lane, with a note on lane and
            device. All other lanes have finished.
    """
    if turns is None and (torch.are_deterministic_algorithms_enabled() or profiler_runs()):
        turns = "all"
    elif turns is None and lanes.share_devices:
        learns = any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)
        turns = "device" if learns else None
    on = [lane.device for lane in lanes.all[: len(tasks)]]
    moments = moments_of(on, (home, output_device, *map(device_of, leaves)))
    draws = lanes.read_draws() if turns is None else None
    outputs, errors = lanes.run(tasks, turns, home, moments)
    if errors:
        raise_first_failure(errors, len(tasks), lanes.all)
    if draws is not None:
        lanes.warn_of_draws(draws)
    if moments:
        record_use(flatten(outputs)[0])
    return outputs


def raise_first_failure(
    errors: list[tuple[int, BaseException]],
    count: int,
    lanes: Sequence[object],
    describe: Callable[[int], str] | None = None,
) -> None:
    """Raise the error of the first lane that failed, with notes on its place and on other errors.

    `describe` returns the contents of a shard for the first note. An interrupt or an exit comes
    before any error, because no task failed with it. The list is emptied: the traceback holds
    frames that hold it, and a cycle would keep the tensors.
    """
    errors.sort(key=lambda each: (isinstance(each[1], Exception), each[0]))
    (shard, first), *others = errors
    errors.clear()
    place = f"in {lanes[shard % len(lanes)]}, shard {shard} of {count}"
    add_note(first, place if describe is None else f"{place}: {describe(shard)}")
    for index, other in others:
        if other is not first:
            # Also if its __str__ fails
            text = "".join(traceback.format_exception_only(other)).strip()
            add_note(
                first, f"also in {lanes[index % len(lanes)]}, shard {index} of {count}: {text}"
            )
    try:
        raise first
    finally:
        del first, others  # the traceback holds this frame


def _note_fixed_devices(
    errors: Sequence[tuple[int, BaseException]],
    home: torch.device | None,
    devices: Sequence[torch.device],
) -> None:
    """Add the cure to torch's error about tensors on two devices, in a lane away from the model."""
    for shard, error in errors:
        device = devices[shard % len(devices)]
        is_of_device = isinstance(error, RuntimeError) and "device" in str(error)
        if is_of_device and home is not None and device != home:
            add_note(
                error,
                f"the lane works on {device}, and the model lies on {home}. In forward, make "
                "tensors on the device of an argument (device=x.device), not on a device that is "
                "kept in an attribute, and register constant tensors as buffers",
            )


def must_run_plainly(backend: Backend) -> bool:
    """True if something watches the calling thread and cannot follow into a lane.

    Tracers and compilers record what one thread does. A dispatch mode (a FLOP counter, fake
    tensors), a function mode, and a functorch transform live in one thread. Copies of parameters
    lose the tangents of forward-mode autograd. Hooks on saved tensors depend on the order of their
    calls. A graph of CUDA records one thread.
    """
    if count_function_modes() > 0:
        is_device = (isinstance(mode, DeviceContext) for mode in function_modes())
        if not all(is_device):
            return True
    return (
        tracing_state() is not None
        or count_dispatch_modes() > 0
        or saved_tensor_hooks(False) is not None
        or functorch_level() is not None
        or forward_ad_level() >= 0
        or torch.compiler.is_compiling()
        or (backend.type != "cpu" and backend.is_capturing())
    )


def _is_on_cpu(leaf: Any) -> bool:
    return getattr(leaf, "is_cpu", not isinstance(leaf, WholeLeaf))


def _originals_of(
    replicas: Sequence[Replica], plan: ShardPlan, flat: FlatCall, shards: Sequence[Shard]
) -> Sequence[Callable[[Any], Any]]:
    """Return one function per part, from a lane's copy of a value to the caller's, or None."""
    whole = plan.whole(flat)
    same = {id(value): value for leaf in whole for value in (leaf, getattr(leaf, "value", leaf))}
    origins = [{**same, **shard.origins} for shard in shards] or [same] * len(plan.sizes)
    pairs = zip(origins, cycle(replicas), strict=False)
    return [partial(_find_origin, found, replica) for found, replica in pairs]


def _find_origin(origins: Mapping[int, Any], replica: Replica, value: Any) -> Any:
    found = origins.get(id(value))
    if found is None and isinstance(value, torch.Tensor):
        return replica.original_of(value)
    return found
