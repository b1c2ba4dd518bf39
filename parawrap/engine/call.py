"""A call, whole: all that a warm call runs, besides the plan (`cut.py`), one look at the model (`holdings.py`), and lanes.

::

    Stub ──► Calls.call ──► plan, fresh?, scatter ──► Lanes.run ──► what was written, gather

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
from operator import attrgetter, itemgetter
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
    saved_tensor_hooks,
    tracing_state,
    version_of,
)
from parawrap.backends import Backend, device_of, record_use, warn_caller
from parawrap.engine.called_code import draws_from_generator
from parawrap.engine.cut import Cutter, Shard, ShardPlan
from parawrap.engine.device_streams import Moment, moments_of
from parawrap.engine.flat_call import FlatCall
from parawrap.engine.join import join
from parawrap.engine.join_rules import JoinRules
from parawrap.engine.lanes import Lanes, here, without_autocast
from parawrap.engine.replica import Replica, is_dirty
from parawrap.engine.replicas import CopiesOfParts, Replicas
from parawrap.engine.trace import Recorder, timed
from parawrap.errors import ShardError, add_note
from parawrap.tree import WholeLeaf, flatten

_TENSOR = frozenset({torch.Tensor})
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_MOST_PROBED = 1024  # plans; as many as a cutter keeps
_requires_grad = attrgetter("requires_grad")
_device_of = attrgetter("device")
_target_of = attrgetter("target")
_shape_of = attrgetter("shape")
_form_of = attrgetter("dtype", "ndim")
_attributes_of = attrgetter("__dict__")
_WRITTEN = (
    "the model wrote in place into a tensor that every lane gets whole, so each lane wrote once. Pass one copy per row, "
    "cut the tensor with in_dims, or use an out-of-place operation"
)
_TURNS = (
    "a model in eval mode is called with gradients enabled, so its lanes on the CPU run one after another. For inference, "
    "call it inside torch.inference_mode(), where they run at the same time"
)


NOWHERE: Any = (lambda: None, None)
"""The route of a stub before a block opens and after it has ended: the stub calls plainly."""


class Stub(wrapt.CallableObjectProxy[Callable[..., Any]]):
    """A method of a module inside a block. A copy or a pickle of it is one of the plain method.

    It has the signature and the name of the method. `under` is what the module's ``__dict__`` had in its place. Its
    route is a weak reference to the caller, and the entry of the method.
    """

    _torchdynamo_disable = True  # torch.compile breaks its graph here; torch.compiler.disable leaves the same mark
    _torchdynamo_disable_msg = "calls inside a parallel block run in lanes"

    def __init__(self, plain: Callable[..., Any], under: Any) -> None:
        super().__init__(plain)
        self._self_under = under
        self._self_route: tuple[Callable[[], Any], Entry] = NOWHERE

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        find, entry = self._self_route
        calls = find()
        if calls is None or torch.compiler.is_compiling():  # the call becomes part of the graph, and runs plainly
            return self.__wrapped__(*args, **kwargs)
        return calls.call(entry, args, kwargs)

    def __copy__(self) -> Any:
        return self.__wrapped__

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.__wrapped__, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__wrapped__.__reduce_ex__(protocol)


class Entry(NamedTuple):
    """The functions that run a call of the target.

    `plain` is the call without parawrap. `method` is the name of a method of a replica; None calls the replica itself,
    including its hooks. `batch` is the number of a batch in its stream, for traces.
    """

    plain: Callable[..., Any]
    method: str | None = None
    batch: int | None = None

    def of(self, replica: Any) -> Callable[..., Any]:
        """Return the function that runs a call in a replica."""
        return replica if self.method is None else getattr(replica, self.method)  # type: ignore[no-any-return]


class Calls:
    """The cut calls and the plain calls of one target, on lanes in threads of this process. Thread-safe.

    `call` runs scatter, replicate, apply, and gather. A call depends on its arguments, the options, the target, and the
    modes of torch, and never on earlier calls. `devices` has one entry per lane. A call with more parts than lanes runs
    part i in lane ``i % lanes``. `labels` name the lanes; `copies_of_parts` is as in `Replicas`.
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
        self.output_device = output_device  # None: the device of the module, or of a callable's first tensor
        self.lanes = Lanes(devices, labels)
        methods = [method for method in cutters if method is not None]
        self.replicas = Replicas(target, devices, methods, shares_hooks=shares_hooks, copies_of_parts=copies_of_parts)
        self.recorder = Recorder(target)
        self.plain_calls = self.cut_calls = 0
        self.shards: tuple[int, ...] = ()
        self.stays_on_cpu = False  # True if the lanes, the output, and the model are on the CPU
        self.holds_whole_calls = False
        self.runs_whole_calls = False  # True from the first one on
        self._has_only_cpu = torch.accelerator.current_accelerator() is None  # this build of torch, whatever the machine
        self._lock = threading.RLock()  # calls of several threads wait for each other
        self._before_plain: list[threading.Thread] | None = None  # the threads that ran before the plain call of now
        self._probed: set[ShardPlan] = set()
        self._warns_of_turns = devices[0].type == "cpu" and self.lanes.share_devices
        self._has_warned_of_plan = False

    def call(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call: cut it, run its parts in the lanes, and join their outputs; or run it plainly."""
        lanes, replicas = self.lanes, self.replicas
        if here.lane is not None or not lanes.is_open or lanes.pid != getpid():
            return entry.plain(*args, **kwargs)
        if must_run_plainly(lanes.backend):
            self.plain_calls += 1
            return entry.plain(*args, **kwargs)
        if (others := self._before_plain) is not None and threading.current_thread() not in others:
            return entry.plain(*args, **kwargs)  # in a thread that the plain call of now has started, and may wait for
        with self._lock:
            if not lanes.is_open:  # it was closed meanwhile
                return entry.plain(*args, **kwargs)
            planned = self._plan(entry, args, kwargs)
            if planned is None and replicas.is_quiet:
                return self.run_plainly(entry, args, kwargs)
            self.holds_whole_calls = True  # they would find, or write, what this call leaves in the model or in a replica
            try:
                for lane in lanes.all if self.runs_whole_calls else ():
                    with lane.gate:  # a whole call that has begun ends first
                        pass
                if planned is None:
                    return self.run_plainly(entry, args, kwargs)
                if (
                    replicas.must_refresh
                    or not replicas.model.is_same()
                    or [*map(version_of, replicas.tracked)] != replicas.versions
                    or True in map(_requires_grad, replicas.tracked)
                    or True in map(is_dirty, replicas.all)
                    or (not self.stays_on_cpu and replicas.has_moved())
                ):
                    self.refresh()
                    if replicas.is_lazy:
                        return self.run_plainly(entry, args, kwargs)
                return self._call_in_lanes(entry, *planned)
            finally:
                self.holds_whole_calls = False

    def _plan(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[ShardPlan, FlatCall] | None:
        """Return the plan of this kind of call, and the call taken apart; None if it runs plainly."""
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
        return None if len(plan.sizes) == 1 and self._is_here(args, kwargs) else (plan, flat)

    def _call_in_lanes(self, entry: Entry, plan: ShardPlan, flat: FlatCall) -> Any:
        """Run the parts of a call on replicas that are up to date, while no other thread calls the target."""
        lanes, replicas, sizes, leaves = self.lanes, self.replicas, plan.sizes, flat.leaves
        used = replicas.all[: len(sizes)]
        only_tensors = flat.on_cpu or _TENSORS.issuperset(map(type, leaves))
        looks = not (replicas.is_quiet and only_tensors) or any(global_hooks)
        watched = plan.written(flat) if None in plan.dims else []
        versions = [*map(version_of, replicas.params)] if looks else []

        # The parts of a device run in turns if gradients or random numbers need an order
        tensors = leaves if only_tensors else [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        shares_generator = not only_tensors and draws_from_generator(leaves)
        turns = self._decide_turns(tensors, shares_generator=shares_generator) if lanes.count > 1 else None

        # Facts that a comparison cannot show: read for each new plan, and after each change of the model
        is_probe = plan not in self._probed
        contents = replicas.read_contents() if is_probe and looks and replicas.is_new else None
        draws = lanes.read_draws() if is_probe and turns is None else None

        # Scatter, apply
        grad = torch.is_grad_enabled()
        columns = plan.columns(flat, copy=grad)
        shards: list[Shard] = []
        moments: Sequence[Moment] = ()
        if flat.on_cpu and self.stays_on_cpu and len(sizes) <= lanes.count and not self.recorder.traces:
            functions: Iterable[Callable[..., Any]] = map(_target_of, used)
            if entry.method is not None:
                functions = map(attrgetter(entry.method), functions)
            tasks: Sequence[Callable[[], Any]] = [*map(partial, functions, *columns)]
        else:
            tasks = self._place_parts(entry, plan, flat, columns, shards)
            if not (self.stays_on_cpu and all(map(_is_on_cpu, leaves))):
                sources = (replicas.home, self.output_device, *map(device_of, leaves))
                moments = moments_of(self.devices[: len(sizes)], sources)
        try:
            outputs, errors = lanes.run(tasks, turns, replicas.home, moments)
        except BaseException:  # an interrupt: parts may still run, and their writes are put back
            for replica in used:
                replica.is_dirty = True
            raise

        # The writes of the lanes, then the output
        if looks:
            for replica in used:
                replica.is_dirty = not replica.holdings.is_same()
        if grad:
            for replica in used:
                replica.has_graph = True
        if errors:
            raise_first_failure(errors, len(sizes), lanes.all, plan.describe)
        if watched and watched != plan.written(flat):
            raise ShardError(_WRITTEN)
        if looks:
            replicas.settle_call(used, versions)
        if is_probe:
            if contents is not None:
                replicas.check_contents(contents)
            if draws is not None:
                lanes.warn_of_draws(draws)
            replicas.is_new = False
            if len(self._probed) >= _MOST_PROBED:
                self._probed.clear()
            self._probed.add(plan)
        if grad:
            plan.write_back(flat, columns)
        if shards:
            plan.update(flat, shards)
        output = None if shards else self._cat_rows(outputs, sizes)
        if output is None:
            output = self._gather(outputs, plan, flat, shards)
        self.cut_calls += 1
        self.shards = sizes
        for lane, rows in zip(cycle(lanes.all), sizes, strict=False):
            lane.rows += rows
        return output

    def run_plainly(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the target itself in this thread, one such call at a time, while the first lane is idle."""
        if here.lane is not None or not self.lanes.is_alive:
            return entry.plain(*args, **kwargs)
        lane, function = self.lanes.all[0], entry.plain
        if self.recorder.traces:
            function = partial(timed, partial(self.recorder.record, entry.method, entry.batch, None), None, entry.plain)
        with self._lock, lane.lock:
            try:
                self._before_plain = threading.enumerate()
                here.lane = lane
                output = function(*args, **kwargs)
            finally:
                here.lane = None
                self._before_plain = None
                if getattr(self.target, "training", False):
                    self.replicas.suspect_buffers()
            self.plain_calls += 1
        return output if self.rules.keep_single else join([output], (1,), self.rules)

    def is_ready(self) -> bool:
        """True if a call of this thread may go to the lanes: not inside a lane, after `close`, or while it is traced."""
        return here.lane is None and self.lanes.is_alive and not must_run_plainly(self.lanes.backend)

    def refresh(self) -> None:
        """Bring the replicas up to date with the model, while no lane runs.

        Raises:
            ReplicaError: If the model cannot be copied.
        """
        with self._lock:
            with self.lanes.idle(self.replicas.home):
                self.replicas.refresh()
            if self.replicas.is_new:
                self._probed.clear()
            places = (*self.devices, self.output_device, self.replicas.home)
            self.stays_on_cpu = all(place is None or place.type == "cpu" for place in places)

    def apply_replicas(self, entry: Entry, args: Sequence[tuple[Any, ...]], kwargs: Sequence[dict[str, Any]]) -> list[Any]:
        """Call replica i with args i and kwargs i, in lane i, and return the outputs in lane order.

        Raises:
            ReplicaError: If the model cannot be copied, or as for a cut call.
            BaseException: If a lane fails: the error of the first such lane, with a note on lane and device. All other
                lanes have finished.
        """
        replicas = self.replicas
        with self._lock:
            if replicas.is_stale():
                self.refresh()
            if replicas.is_lazy:
                return [self.run_plainly(entry, part, named) for part, named in zip(args, kwargs, strict=True)]
            used = replicas.all[: len(args)]
            versions = [*map(version_of, replicas.params)]
            calls = [
                partial(entry.of(replica.target), *part, **named)
                for replica, part, named in zip(used, args, kwargs, strict=True)
            ]
            try:
                outputs = self.apply(calls, flatten((list(args), list(kwargs)))[0])
            finally:
                for replica in used:
                    replica.is_dirty = not replica.holdings.is_same()
                    replica.has_graph = replica.has_graph or torch.is_grad_enabled()
            replicas.is_new = False
            replicas.settle_call(used, versions)
        return outputs

    def apply(self, calls: Sequence[Callable[[], Any]], leaves: Sequence[Any]) -> list[Any]:
        """Run call i in lane i, and return their values in lane order. `leaves` are the arguments of all calls."""
        with self._lock:
            turns = self._decide_turns((), shares_generator=draws_from_generator(leaves))
            return apply_tasks(self.lanes, calls, leaves, turns, self.replicas.home, self.output_device)

    def _decide_turns(self, tensors: Sequence[torch.Tensor], *, shares_generator: bool) -> str | None:
        """Return the parts that run one after another: "all", those of each "device", or None.

        The arguments `tensors` count without gradients too: a reentrant checkpoint runs forward without, and once more with
        them. `shares_generator` is True if an argument is a generator of random numbers.
        """
        if shares_generator or self.replicas.in_turns or self.replicas.generators:
            return "all"
        learns = torch.is_grad_enabled() and True in map(_requires_grad, self.replicas.learners)
        if learns and self._warns_of_turns and getattr(self.target, "training", True) is False:
            self._warns_of_turns = False
            warn_caller(_TURNS)
        return self.lanes.decide_turns(learns=learns or True in map(_requires_grad, tensors))

    def _is_here(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """True if the target, the arguments, and the output are on the device of the first lane."""
        if self._has_only_cpu:
            return True
        device = self.devices[0]
        if not kwargs and _TENSORS.issuperset(map(type, args)):
            places = {self.output_device, *map(_device_of, args)}
        else:
            places = {self.output_device, *map(device_of, flatten((args, kwargs))[0])}
        return places <= {None, device} and self.replicas.is_at_home(device)

    def _place_parts(
        self, entry: Entry, plan: ShardPlan, flat: FlatCall, columns: Sequence[Sequence[Any]], shards: list[Shard]
    ) -> list[Callable[[], Any]]:
        """Return one task per shard, which enters the shard into `shards` once it is on the device of its lane."""
        replicas, count, record = self.replicas, self.lanes.count, self.recorder.record
        shards[:] = [Shard((), {}, 0)] * len(plan.sizes)

        def run(index: int) -> Any:
            replica = replicas.all[index % count]
            if index >= count:  # the lane has run another part of this call, and this one starts from the model's state
                replica.is_dirty = not replica.holdings.is_same()
                replicas.prepare(replica)
            shard = shards[index] = plan.place(flat, columns, index, self.devices[index % count])
            return entry.of(replica.target)(*shard.args, **shard.kwargs)

        if not self.recorder.traces:
            return [partial(run, index) for index in range(len(plan.sizes))]
        return [
            partial(timed, partial(record, entry.method, entry.batch, rows), index % count, run, index)
            for index, rows in enumerate(plan.sizes)
        ]

    def _cat_rows(self, outputs: list[Any], sizes: tuple[int, ...]) -> torch.Tensor | None:
        """Return outputs on the CPU next to each other, if each is a plain tensor with the rows of its shard."""
        dim = self.rules.row_dim_of_tensor
        if dim is None or not _TENSOR.issuperset(map(type, outputs)) or torch.is_autocast_enabled("cpu"):
            return None
        if outputs[0].is_quantized or len({*map(_form_of, outputs)}) > 1 or any(map(_attributes_of, outputs)):
            return None
        with suppress(RuntimeError, IndexError):  # nested, without that dim, or of other shapes
            has_rows = (*map(itemgetter(dim), map(_shape_of, outputs)),) == sizes
            if has_rows and (sizes[0] != sizes[-1] or not self.rules.needs_proof):
                return torch.cat(outputs, dim)
        return None

    def _gather(self, outputs: list[Any], plan: ShardPlan, flat: FlatCall, shards: Sequence[Shard]) -> Any:
        """Join the outputs of the lanes on the output device."""
        home, device = self.replicas.home, None  # all outputs are already on the CPU
        if not (self.stays_on_cpu and (flat.on_cpu or home is not None)):
            places = chain((self.output_device, home), map(device_of, flat.leaves), self.devices)
            device = next(filter(None, places))
            record_use(flatten(outputs)[0])
        originals = partial(_originals_of, self.replicas.all, plan, flat, shards)
        with without_autocast(self.lanes.backend.type):
            return join(outputs, plan.sizes, self.rules, device, originals)


def apply_tasks(
    lanes: Lanes,
    tasks: Sequence[Callable[[], Any]],
    leaves: Sequence[Any],
    turns: str | None = None,
    home: torch.device | None = None,
    output_device: torch.device | None = None,
) -> list[Any]:
    """Run task i in lane i, and return their values in lane order. `leaves` are the arguments of all tasks.

    Lanes that share a device run in turns if one of `leaves` requires gradients.

    Raises:
        BaseException: If a lane fails: the error of the first such lane, with a note on lane and device. All other lanes
            have finished.
    """
    learns = any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)
    turns = turns or lanes.decide_turns(learns=learns)
    moments = moments_of([lane.device for lane in lanes.all[: len(tasks)]], (home, output_device, *map(device_of, leaves)))
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
    """Raise the error of the first lane that failed, with notes on its place and on the errors of other lanes.

    `describe` returns the contents of a shard for the first note. An interrupt or an exit comes before any error,
    because no task failed with it. The list is emptied: the traceback holds frames that hold it, and a cycle would keep
    the tensors.
    """
    errors.sort(key=lambda each: (isinstance(each[1], Exception), each[0]))
    (shard, first), *others = errors
    errors.clear()
    place = f"in {lanes[shard % len(lanes)]}, shard {shard} of {count}"
    add_note(first, place if describe is None else f"{place}: {describe(shard)}")
    for index, other in others:
        if other is not first:
            text = "".join(traceback.format_exception_only(other)).strip()  # also if its __str__ fails
            add_note(first, f"also in {lanes[index % len(lanes)]}, shard {index} of {count}: {text}")
    try:
        raise first
    finally:
        del first, others  # the traceback holds this frame


def must_run_plainly(backend: Backend) -> bool:
    """True if something watches the calling thread and cannot follow into a lane: the call must then run plainly.

    Tracers and compilers record what one thread does. A dispatch mode (a FLOP counter, fake tensors), a function mode, and
    a functorch transform live in one thread. Copies of parameters lose the tangents of forward-mode autograd. Hooks on
    saved tensors depend on the order of their calls. A graph of CUDA records one thread.
    """
    return (
        tracing_state() is not None
        or count_dispatch_modes() > 0
        or saved_tensor_hooks(False) is not None
        or functorch_level() is not None
        or forward_ad_level() >= 0
        or torch.compiler.is_compiling()
        or (count_function_modes() > 0 and not all(isinstance(mode, DeviceContext) for mode in function_modes()))
        or (backend.type != "cpu" and backend.is_capturing())
    )


def _is_on_cpu(leaf: Any) -> bool:
    return getattr(leaf, "is_cpu", not isinstance(leaf, WholeLeaf))


def _originals_of(
    replicas: Sequence[Replica], plan: ShardPlan, flat: FlatCall, shards: Sequence[Shard]
) -> Sequence[Callable[[Any], Any]]:
    """Return one function per part. It maps a lane's copy of a value to the caller's value, or to None."""
    same = {id(value): value for leaf in plan.whole(flat) for value in (leaf, getattr(leaf, "value", leaf))}
    origins = [{**same, **shard.origins} for shard in shards] or [same] * len(plan.sizes)
    return [partial(_find_origin, found, replica) for found, replica in zip(origins, cycle(replicas), strict=False)]


def _find_origin(origins: Mapping[int, Any], replica: Replica, value: Any) -> Any:
    found = origins.get(id(value))
    return replica.original_of(value) if found is None and isinstance(value, torch.Tensor) else found
