"""A call, whole: all that a warm call runs, besides one look at the model (`holdings.py`) and at the plan (`cut.py`).

::

    Stub ──► Calls.call ──► plan, fresh?, scatter ──► Lanes.run ──► Job.run in each lane ──► what was written, gather

From the top: the stub that takes the call, the calls of one target, and below them the lanes and the modes that they
inherit from the caller.

Guarantees of the lanes:

- A lane runs one part at a time: the thread that works in it holds ``lane.lock``.
- The caller runs lane 0's part, and then every part that no thread has begun. With gradients, the caller runs all parts of
  a device itself, in order.
- The outcome of a part reaches the caller whatever the part raises; the lane lives on.
- A part never waits for a lane: `here.lane` is set in it, and calls of the model run plainly. A part that waits for another
  thread, which itself makes a call, waits forever.
- An interrupted caller leaves at once. Its parts that have not started are dropped.
- Threads start when first needed. They end with `close`, with the last reference to the lanes, or with the interpreter.
- A forked child has no lanes: all calls run plainly there.
"""

from __future__ import annotations

import contextvars
import copy
import functools
import threading
import traceback
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import cycle
from operator import attrgetter, itemgetter
from os import getpid
from queue import SimpleQueue
from time import monotonic, perf_counter_ns
from typing import Any, NamedTuple

import torch
import wrapt

from parawrap._private_names import (
    DeviceContext,
    InferenceMode,
    count_dispatch_modes,
    count_function_modes,
    forward_ad_level,
    function_modes,
    functorch_level,
    global_hooks,
    profiler_runs,
    saved_tensor_hooks,
    set_grad_enabled,
    tracing_state,
    version_of,
)
from parawrap.backends import Backend, backend_of, device_of, drop_own_frames, record_use, warn_caller
from parawrap.engine.cut import Cutter, Shard, ShardPlan
from parawrap.engine.device_streams import LaneStreams, Moment, moment_of, wait_for_moment
from parawrap.engine.extents import FlatCall
from parawrap.engine.join import join
from parawrap.engine.join_rules import JoinRules
from parawrap.engine.replica import Replica, is_dirty
from parawrap.engine.replicas import CopiesOfParts, Replicas
from parawrap.engine.trace import Recorder, timed
from parawrap.errors import SessionError, ShardError, add_note
from parawrap.tree import WholeLeaf, flatten

_CPU = torch.device("cpu")
_TENSOR = frozenset({torch.Tensor})
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_EXIT_PATIENCE_S = 5.0  # at the exit of the program; threads are daemons, so none blocks it
_requires_grad = attrgetter("requires_grad")
_target_of = attrgetter("target")
_shape_of = attrgetter("shape")
_form_of = attrgetter("dtype", "ndim")
_attributes_of = attrgetter("__dict__")
_WRITTEN = (
    "the model wrote in place into a tensor that every lane gets whole, so each lane wrote once. Pass one copy per row, "
    "cut the tensor with in_dims, or use an out-of-place operation"
)
_DRAWS = (
    "lanes that share a random generator drew from it at the same time, so a seed does not reproduce this call. With "
    "torch.use_deterministic_algorithms(True), lanes run one after another, in order. If the call draws no random numbers, "
    "another thread did"
)
_TURNS = (
    "a model in eval mode is called with gradients enabled, so its lanes on the CPU run one after another. For inference, "
    "call it inside torch.inference_mode(), where they run at the same time"
)


class _Here(threading.local):
    """The lane that the calling thread works in. The class has a value because looking for none takes a microsecond."""

    lane: Lane | None = None


here = _Here()


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
        self.plain_calls = self.watched_calls = self.cut_calls = 0
        self.shards: tuple[int, ...] = ()
        self._lock = threading.RLock()  # calls of several threads wait for each other
        self._before_plain: list[threading.Thread] | None = None  # the threads that ran before the plain call of now
        self._lanes_are_on_cpu = all(each is None or each.type == "cpu" for each in (*devices, output_device))
        self._row_dim = rules.row_dim_of_tensor  # None if one tensor per lane needs a second look
        self.stays_on_cpu = False  # True if the lanes, the output, and the model are on the CPU
        self._note_home()
        self.holds_whole_calls = False
        self._probed: set[ShardPlan] = set()
        self._warns_of_turns = devices[0].type == "cpu" and self.lanes.share_devices
        self._has_warned_of_plan = False

    def call(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call: cut it, run its parts in the lanes, and join their outputs; or run it plainly."""
        lanes, replicas = self.lanes, self.replicas
        if here.lane is not None or not lanes.is_open or lanes.pid != getpid():
            return entry.plain(*args, **kwargs)
        if must_run_plainly(lanes.backend):
            self.watched_calls += 1
            return entry.plain(*args, **kwargs)
        if (others := self._before_plain) is not None and threading.current_thread() not in others:
            return entry.plain(*args, **kwargs)  # in a thread that the plain call of now has started, and may wait for
        with self._lock:
            if not lanes.is_open:  # it was closed meanwhile
                return entry.plain(*args, **kwargs)
            if replicas.is_quiet:
                return self._call_in_turn(entry, args, kwargs)
            self.holds_whole_calls = True  # they would find, or write, what this call leaves in a replica
            try:
                for lane in lanes.all:
                    with lane.gate:  # a whole call that has begun ends first
                        pass
                return self._call_in_turn(entry, args, kwargs)
            finally:
                self.holds_whole_calls = False

    def _call_in_turn(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call, while no other thread calls the target."""
        lanes, replicas = self.lanes, self.replicas
        # The plan of this kind of call
        if len(lanes.all) == 1 and self._is_there(args, kwargs):
            return self.run_plainly(entry, args, kwargs)
        cutter = self.cutters[entry.method]
        plan = None if kwargs else cutter.plan_of_tensors(args, lanes.count)
        if plan is None:
            flat = cutter.flatten(args, kwargs)
            plan = cutter.plan(flat, lanes.count)
        else:
            flat = FlatCall(args, plan.spec, (), on_cpu=True)
        if plan.hint is not None and not self._has_warned_of_plan:
            self._has_warned_of_plan = True
            warn_caller(plan.hint)
        sizes = plan.sizes
        if len(sizes) == 1 and self._is_whole_here(flat):
            return self.run_plainly(entry, args, kwargs)

        # The replicas are what the model is
        if (
            replicas.must_refresh
            or not replicas.model.is_same()
            or [*map(version_of, replicas.tracked)] != replicas.versions
            or True in map(_requires_grad, replicas.tracked)
            or True in map(is_dirty, replicas.all)
            or (not self.stays_on_cpu and replicas.has_moved())
        ):
            was_quiet = replicas.is_quiet
            self.refresh()
            if replicas.is_lazy:
                return self.run_plainly(entry, args, kwargs)
            if was_quiet and not replicas.is_quiet:
                return self.call(entry, args, kwargs)
        used = replicas.all[: len(sizes)]
        leaves = flat.leaves
        only_tensors = flat.on_cpu or _TENSORS.issuperset(map(type, leaves))
        looks = not (replicas.is_quiet and only_tensors) or any(global_hooks)
        watched = plan.written(flat) if None in plan.dims else []
        versions = [*map(version_of, replicas.params)] if looks else []

        # The parts of a device run in turns if gradients or random numbers need an order
        turns = self._decide_turns(leaves, only_tensors=only_tensors) if lanes.count > 1 else None
        probe = self._read_probe(looks=looks, turns=turns) if replicas.is_new or plan not in self._probed else None

        # Scatter, apply
        grad = torch.is_grad_enabled()
        columns = plan.columns(flat, copy=grad)
        shards: list[Shard] = []
        moments: Sequence[Moment] = ()
        if flat.on_cpu and self.stays_on_cpu:
            functions: Iterable[Callable[..., Any]] = map(_target_of, cycle(used))
            if entry.method is not None:
                functions = map(attrgetter(entry.method), functions)
            tasks: Sequence[Callable[[], Any]] = [*map(partial, functions, *columns)]
        else:
            shards = [Shard((), {}, 0)] * len(sizes)
            tasks = self._place_parts(entry, plan, flat, columns, shards)
            if not (self.stays_on_cpu and all(map(_is_on_cpu, flat.leaves))):
                sources = (*map(device_of, flat.leaves), self.output_device)
                moments = lanes.read_moments(sources, replicas.home, len(sizes))
        if self.recorder.traces:
            tasks = self._record(entry, tasks, sizes)
        if len(sizes) > lanes.count:
            tasks = self._separate(tasks)
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
        if grad and self._learns(leaves):
            for replica in used:
                replica.has_graph = True
        if errors:
            raise_first_failure(errors, len(sizes), lanes.all, plan.describe)
        if watched and watched != plan.written(flat):
            raise ShardError(_WRITTEN)
        if looks:
            replicas.settle_call(used, versions)
        if probe is not None:
            self._check_probe(plan, probe)
        if grad:
            plan.write_back(flat, columns)
        if shards:
            plan.update(flat, shards)
        output = None
        dim = None if shards else self._row_dim
        if dim is not None and _TENSOR.issuperset(map(type, outputs)) and not torch.is_autocast_enabled("cpu"):
            is_one_form = (
                not outputs[0].is_quantized
                and len({*map(_form_of, outputs)}) == 1
                and not any(map(_attributes_of, outputs))
            )
            with suppress(RuntimeError, IndexError):  # nested, without that dim, or of other shapes
                has_rows = (*map(itemgetter(dim), map(_shape_of, outputs)),) == sizes
                if is_one_form and has_rows and (sizes[0] != sizes[-1] or not self.rules.needs_proof):
                    output = torch.cat(outputs, dim)
        if output is None:
            output = self._gather(outputs, plan, flat, shards)
        self.cut_calls += 1
        self.shards = sizes
        for lane, rows in zip(cycle(lanes.all), sizes, strict=False):
            lane.cut_rows += rows  # whole calls may run at the same time, and count their own
        return output

    def run_plainly(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the target itself in this thread, one such call at a time, while the first lane is idle."""
        lane = self.lanes.all[0]
        if here.lane is not None or not self.lanes.is_open or self.lanes.pid != getpid():
            return entry.plain(*args, **kwargs)
        function = entry.plain
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

    def refresh(self) -> None:
        """Bring the replicas up to date with the model, while no lane runs.

        Raises:
            ReplicaError: If the model cannot be copied.
        """
        with self._lock, self.lanes.idle(self.replicas.home):
            self.replicas.refresh()
            self.lanes.share_lock(shares=self.replicas.in_turns)
            self._note_home()
        if self.replicas.is_new:
            self._probed.clear()

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
            turns = self._decide_turns(leaves, only_tensors=False)
            return self.lanes.apply(calls, leaves, turns, self.replicas.home, self.output_device)

    # Decisions

    def _decide_turns(self, leaves: Sequence[Any], *, only_tensors: bool) -> str | None:
        """Return the parts that run one after another: "all", those of each "device", or None."""
        replicas = self.replicas
        if replicas.in_turns or replicas.generators or torch.are_deterministic_algorithms_enabled() or profiler_runs():
            return "all"
        if not only_tensors and any(type(leaf) is torch.Generator for leaf in leaves):
            return "all"
        if not self.lanes.share_devices:
            return None
        if torch.is_grad_enabled() and True in map(_requires_grad, replicas.learners):
            if self._warns_of_turns and getattr(self.target, "training", True) is False:
                self._warns_of_turns = False
                warn_caller(_TURNS)
            return "device"
        # Also without gradients: a reentrant checkpoint runs forward without, and once more with them
        if only_tensors:
            return "device" if True in map(_requires_grad, leaves) else None
        return "device" if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves) else None

    def _learns(self, leaves: Sequence[Any]) -> bool:
        """True if a tensor of the model, or an argument, requires gradients."""
        if True in map(_requires_grad, self.replicas.learners):
            return True
        return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)

    def _is_there(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """True if target, arguments, and output are on the device of the one lane. False if it takes long to find out."""
        device = self.devices[0]
        if self._lanes_are_on_cpu:
            return self.replicas.is_at_home(device)
        is_there = not kwargs and all(type(each) is torch.Tensor and each.device == device for each in args)
        return is_there and self.output_device in (None, device) and self.replicas.is_at_home(device)

    def _is_whole_here(self, flat: FlatCall) -> bool:
        """True if the module, the arguments, and the output of a call that is not cut are on the device of lane 0."""
        device = self.devices[0]
        return (
            self.replicas.is_at_home(device)
            and self.output_device in (None, device)
            and ((flat.on_cpu and device.type == "cpu") or all(device_of(leaf) in (None, device) for leaf in flat.leaves))
        )

    def _note_home(self) -> None:
        home = self.replicas.home
        self.stays_on_cpu = self._lanes_are_on_cpu and (home is None or home.type == "cpu")

    # Facts that the comparison in each call cannot show: read for each new plan, and after each change of the model

    def _read_probe(self, *, looks: bool, turns: str | None) -> tuple[Any, Any]:
        contents = self.replicas.read_contents() if looks and self.replicas.is_new else None
        return contents, self.lanes.read_draws() if turns is None else None

    def _check_probe(self, plan: ShardPlan, probe: tuple[Any, Any]) -> None:
        contents, draws = probe
        if contents is not None:
            self.replicas.check_contents(contents)
        if draws is not None:
            self.lanes.warn_of_draws(draws)
        self.replicas.is_new = False
        if len(self._probed) > _MOST_PROBED:
            self._probed.clear()
        self._probed.add(plan)

    # Scatter and gather beyond tensors on the CPU

    def _place_parts(
        self, entry: Entry, plan: ShardPlan, flat: FlatCall, columns: Sequence[Sequence[Any]], shards: list[Shard]
    ) -> list[Callable[[], Any]]:
        """Return one task per shard, which first copies the shard to the device of its lane."""
        devices = self.devices
        if self.stays_on_cpu and all(map(_is_on_cpu, flat.leaves)):
            devices = (_CPU,)

        def run(function: Callable[..., Any], index: int, device: torch.device) -> Any:
            shard = shards[index] = plan.place(flat, columns, index, device)
            return function(*shard.args, **shard.kwargs)

        functions = (entry.of(replica.target) for replica in cycle(self.replicas.all))
        lanes = zip(functions, range(len(plan.sizes)), cycle(devices), strict=False)
        return [partial(run, *each) for each in lanes]

    def _record(self, entry: Entry, tasks: Sequence[Callable[[], Any]], sizes: Sequence[int]) -> list[Callable[[], Any]]:
        record = self.recorder.record
        return [
            partial(timed, partial(record, entry.method, entry.batch, rows), index % self.lanes.count, task)
            for index, (task, rows) in enumerate(zip(tasks, sizes, strict=True))
        ]

    def _separate(self, tasks: Sequence[Callable[[], Any]]) -> list[Callable[[], Any]]:
        """Return tasks that start from the model's state, also if their lane has run another part of the same call."""
        count = self.lanes.count
        later = zip(cycle(self.replicas.all), tasks[count:], strict=False)
        return [*tasks[:count], *(partial(self._run_again, replica, task) for replica, task in later)]

    def _run_again(self, replica: Replica, task: Callable[[], Any]) -> Any:
        replica.is_dirty = not replica.holdings.is_same()
        self.replicas.prepare(replica)
        return task()

    def _gather(self, outputs: list[Any], plan: ShardPlan, flat: FlatCall, shards: Sequence[Shard]) -> Any:
        """Join the outputs of the lanes on the output device."""
        device = None  # all outputs are already on the CPU
        if not (self.stays_on_cpu and (self.replicas.home is not None or self.output_device is not None or flat.on_cpu)):
            of_leaves = next(filter(None, map(device_of, flat.leaves)), None)
            device = self.output_device or self.replicas.home or of_leaves or self.devices[0]
            record_use(flatten(outputs)[0])
        originals = partial(_originals_of, self.replicas.all, plan, flat, shards)
        kind = self.lanes.backend.type
        if not torch.is_autocast_enabled("cpu") and (kind == "cpu" or not torch.is_autocast_enabled(kind)):
            return join(outputs, plan.sizes, self.rules, device, originals)
        with without_autocast(kind):
            return join(outputs, plan.sizes, self.rules, device, originals)


_MOST_PROBED = 1024  # plans; as many as a cutter keeps


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


# Lanes


class Lane:
    """One device slot and, once it was needed, its thread.

    `device` is where its tensors lie; `label` names it, by the device by default. `taking` is locked while its thread runs
    whole calls, or is about to.
    """

    def __init__(
        self, index: int, device: torch.device, label: str | None = None, shared: deque[Any] | None = None
    ) -> None:
        self.index = index
        self.device = device
        self.label = str(device) if label is None else label
        self.lock = threading.Lock()  # of the thread that works in the lane
        self.gate = threading.Lock()  # held by a whole call
        self.inbox: SimpleQueue[Any] = SimpleQueue()
        self.taking = threading.Lock()
        self.tasks = self.rows = self.cut_rows = self.whole_calls = self.busy_ns = 0
        self.thread: threading.Thread | None = None
        self.streams = LaneStreams(device, index)
        self._shared = deque() if shared is None else shared  # whole calls, oldest first

    def __repr__(self) -> str:
        return f"lane {self.index} on {self.label}"

    @property
    def load(self) -> tuple[bool, int, int]:
        """How much the lane has to do, for a comparison with other lanes."""
        return self.lock.locked(), self.streams.unfinished(), self.tasks

    def start(self, threads: int | None) -> None:
        """Start the lane's thread, and wait until its count of intra-op threads is set."""
        ready = threading.Event()
        name = f"parawrap-{self}"
        self.thread = threading.Thread(target=self._serve, args=(threads, ready), name=name, daemon=True)
        self.thread.start()
        ready.wait()

    def take(self, _: Lane) -> None:
        """Run whole calls, the oldest first, until none waits, or something else waits for this lane."""
        while self.inbox.empty():
            try:
                work = self._shared.popleft()
            except IndexError:
                self.taking.release()
                if not (self._shared and self.taking.acquire(blocking=False)):
                    return  # if a call came meanwhile, its sender has put this method into the inbox
                continue  # a call came, and its sender saw this lane at work
            work(self)
            del work
        self.inbox.put(self.take)

    def _serve(self, threads: int | None, ready: threading.Event) -> None:
        """Run the lane's thread. It refers to nothing but the lane, so abandoned lanes can be collected."""
        if threads is not None:
            torch.get_num_threads()  # without this, the thread's first parallel operator undoes the setting
            torch.set_num_threads(threads)
        here.lane = self  # for good: callbacks of futures run in this thread too, and must not wait for lanes
        ready.set()
        while (work := self.inbox.get()) is not None:
            work(self)
            del work  # a waiting lane keeps nothing of its last call alive
        while self._shared:
            with suppress(IndexError):  # another lane was quicker
                self._shared.popleft()(self)


class Job:
    """The parts of one call, in groups. One thread runs a group in order; the caller runs each that no thread has begun."""

    __slots__ = (
        *("asleep", "done", "errors", "groups", "home", "lanes", "missing", "modes", "moments", "outputs", "tasks"),
    )

    def __init__(
        self,
        lanes: Sequence[Lane],
        tasks: Sequence[Callable[[], Any]],
        groups: dict[int, tuple[int, ...]],
        home: torch.device | None,
        moments: Sequence[Moment],
    ) -> None:
        self.lanes = lanes  # not their pool: a job that waits in an inbox would keep it alive
        self.tasks = tasks
        self.asleep: list[Lane] = []  # the lanes that are not woken yet, the next one last
        self.groups = groups  # by lane: its thread would run the group; the thread that pops a group runs it
        self.home = home
        self.moments = moments
        self.modes: Modes  # of the caller, if a part runs elsewhere than in the caller's own modes
        self.outputs: list[Any] = [None] * len(tasks)
        self.errors: list[tuple[int, BaseException]] = []
        self.missing = [*range(len(groups))]  # popped after each group; the last one opens `done`
        self.done = threading.Lock()
        self.done.acquire()

    def __call__(self, lane: Lane) -> None:
        """Run the group of a lane in its thread, unless the caller was quicker."""
        group = self.groups.pop(lane.index, None)
        if self.asleep and self.groups:
            self.wake_next()
        if group is not None:
            self.modes.run(partial(self.run, group), lane.device, self.home)

    def wake_next(self) -> None:
        """Wake the next lane. It wakes the one after it, so that small parts wake few threads for nothing.

        While lanes run whole calls, all of them are woken at once: the next one may be at work for long. A lane that has
        ended leaves its group to the caller.
        """
        with suppress(IndexError):  # there is none, or another lane was quicker
            while True:
                lane = self.asleep.pop()
                lane.inbox.put(self)
                if not lane.taking.locked():
                    return

    def run(self, group: tuple[int, ...]) -> None:
        """Run the parts of a group, each as its lane's work. The first failure ends it."""
        failed = False
        context = contextvars.copy_context() if len(group) > 1 else None
        for at, index in enumerate(group):
            at_lane = index % len(self.lanes)
            lane, task = self.lanes[at_lane], self.tasks[index]
            if context is not None and at > 0:  # a part finds no variable that the one before it has set
                task = partial(context.copy().run, task)
            with lane.lock:  # no interrupt comes between this line and the next
                start = perf_counter_ns()
                before = here.lane
                try:
                    here.lane = lane
                    if self.moments:
                        self.outputs[index] = lane.streams.run(task, self.moments[at_lane])
                    else:
                        self.outputs[index] = task()
                except BaseException as error:  # noqa: BLE001  # a lane outlives its tasks
                    drop_own_frames(error)
                    self.errors.append((index, error))
                    failed = True
                finally:
                    here.lane = before
                    lane.tasks += 1
                    lane.busy_ns += perf_counter_ns() - start
            if failed:
                break
        if self.missing.pop() == 0:
            self.done.release()

    def drop(self) -> None:
        """Drop the groups that no thread has begun."""
        with suppress(KeyError):
            while True:
                self.groups.popitem()
                if self.missing.pop() == 0:
                    self.done.release()


class Lanes:
    """The lanes of one session, or of one function. Any number of threads may use them at once."""

    def __init__(self, devices: Sequence[torch.device], labels: Sequence[str] | None = None) -> None:
        names = [None] * len(devices) if labels is None else labels
        self._shared: deque[Any] = deque()
        self.all = tuple(
            Lane(index, device, name, self._shared) for index, (device, name) in enumerate(zip(devices, names, strict=True))
        )
        self.count = len(self.all)
        self.backend: Backend = backend_of(devices[0].type)
        self.share_devices = len(set(devices)) < len(devices)
        self.pid = getpid()
        self.is_open = True
        self._threads = self.backend.intra_op_threads(len(devices))
        self._only_cpu = all(device.type == "cpu" for device in devices)
        self._groups: dict[tuple[int, str | None], dict[int, tuple[int, ...]]] = {}
        self._own_locks = [lane.lock for lane in self.all]
        self._gate = threading.Lock()
        self._changed: Moment = {}
        self._warns_of_draws = self.count > 1
        self._end = weakref.finalize(self, _end_threads, self.all, _EXIT_PATIENCE_S)

    def run(
        self,
        tasks: Sequence[Callable[[], Any]],
        turns: str | None = None,
        home: torch.device | None = None,
        moments: Sequence[Moment] = (),
    ) -> tuple[list[Any], list[tuple[int, BaseException]]]:
        """Run task i in lane ``i % lanes``, at the same time or in `turns`. Return the values, and the errors with indices.

        A task in turns may use all intra-op threads. `moments` has an entry per lane if devices are to do with them.
        """
        key = len(tasks), turns
        groups = dict(self._groups.get(key) or self._group(key))
        job = Job(self.all, tasks, groups, home, moments)
        first = groups.pop(0)
        before = torch.get_num_threads()
        lowers = bool(groups) and self._threads is not None and self._threads != before
        if lowers:
            torch.set_num_threads(self._threads)  # type: ignore[arg-type]
        try:
            self._run_job(job, first, [*groups])
        finally:
            if lowers:
                torch.set_num_threads(before)
        if moments and not torch.is_grad_enabled():
            for lane in self.all[: len(tasks)]:
                lane.streams.be_waited_for()
        job.tasks = ()  # a lane may sleep for long before its next line
        outputs, job.outputs = job.outputs, []
        return outputs, job.errors

    def _run_job(self, job: Job, first: tuple[int, ...], others: Sequence[int]) -> None:
        """Run the first group, and each group that no thread has begun; wait for the rest."""
        lane, home = self.all[0], job.home
        is_home = home is None or home == lane.device
        if others or not is_home:
            job.modes = Modes.capture(self.backend.type)
        try:
            if others:
                if self.all[others[0]].thread is None:
                    with self._gate:
                        self._start(self.all)
                job.asleep = [self.all[index] for index in reversed(others)]
                job.wake_next()
            if is_home:
                job.run(first)  # the caller's modes are in force as they are
            else:
                job.modes.run(partial(job.run, first), lane.device, home)
            if job.errors and not isinstance(job.errors[0][1], Exception):  # Ctrl-C or an exit
                job.drop()
            for index in reversed(others):  # the last lane was woken last
                group = job.groups.pop(index, None)
                if group is not None:
                    job.modes.run(partial(job.run, group), self.all[index].device, home)
            job.done.acquire()
        except BaseException:
            job.drop()
            raise

    def apply(
        self,
        tasks: Sequence[Callable[[], Any]],
        leaves: Sequence[Any],
        turns: str | None = None,
        home: torch.device | None = None,
        output_device: torch.device | None = None,
    ) -> list[Any]:
        """Run task i in lane i, and return their values in lane order. `leaves` are the arguments of all tasks.

        Lanes that share a device run in turns if one of `leaves` requires gradients.

        Raises:
            BaseException: If a lane fails: the error of the first such lane, with a note on lane and device. All other
                lanes have finished.
        """
        if torch.are_deterministic_algorithms_enabled() or profiler_runs():
            turns = "all"
        elif (
            turns is None
            and self.share_devices
            and any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)
        ):
            turns = "device"
        moments = self.read_moments((*map(device_of, leaves), output_device), home, len(tasks))
        draws = self.read_draws() if turns is None else None
        outputs, errors = self.run(tasks, turns, home, moments)
        if errors:
            raise_first_failure(errors, len(tasks), self.all)
        if draws is not None:
            self.warn_of_draws(draws)
        if moments:
            record_use(flatten(outputs)[0])
        return outputs

    def read_draws(self) -> list[torch.Tensor] | None:
        """Return the states of the generators that lanes share; None if a warning of draws was given."""
        if not self._warns_of_draws:
            return None
        shared = [device for device, count in Counter(lane.device for lane in self.all).items() if count > 1]
        states = [backend_of(device.type).rng_state(device) for device in shared if device.type != "cpu"]
        return [torch.default_generator.get_state(), *(state for state in states if state is not None)]

    def warn_of_draws(self, before: list[torch.Tensor]) -> None:
        """Warn once if lanes that ran at the same time drew from a shared generator. `before` is from `read_draws`."""
        if not all(map(torch.equal, before, self.read_draws() or before)):
            self._warns_of_draws = False
            warn_caller(_DRAWS)

    def is_ready(self) -> bool:
        """True if a call of this thread may go to the lanes: not inside a lane, after `close`, or while it is traced."""
        return here.lane is None and self.is_alive and not must_run_plainly(self.backend)

    @property
    def is_alive(self) -> bool:
        """False after `close`, and in a forked child."""
        return self.is_open and self.pid == getpid()

    def send(self, work: Callable[[Lane], None], *, in_order: bool = False) -> None:
        """Run work in the lane that is free first, the oldest first; `in_order` in the first lane alone.

        Raises:
            SessionError: If the lanes are closed.
        """
        with self._gate:
            if not self.is_alive:
                msg = "the lanes are closed: call inside the `with` block, or make a new parallel(...)"
                raise SessionError(msg)
            self._shared.append(work)
            chosen = None
            for lane in self.all[:1] if in_order else self.all:
                if not lane.taking.locked():
                    # A caller may be at work in the first, or its device may be behind
                    chosen = lane if chosen is None else min(chosen, lane, key=attrgetter("load"))
                    if self._only_cpu and not chosen.lock.locked():
                        break
            if chosen is not None and chosen.taking.acquire(blocking=False):
                if chosen.thread is None:
                    self._start([chosen])
                chosen.inbox.put(chosen.take)

    def queued(self) -> list[Any]:
        """Return the work that no lane has begun, oldest first."""
        return [*self._shared.copy()]  # lanes take from it meanwhile, and only a copy is atomic

    @contextmanager
    def idle(self, home: torch.device | None = None) -> Iterator[None]:
        """Keep every lane idle inside the block, and the devices done with what lanes queued."""
        with ExitStack() as held:
            for lock in {id(lane.lock): lane.lock for lane in self.all}.values():
                held.enter_context(lock)
            if self._only_cpu and home in (None, _CPU):
                yield
                return
            for lane in self.all:
                lane.streams.be_waited_for()
            wait_for_moment(self._changed)  # of another thread, perhaps, on other streams
            yield
            devices = {home, *(lane.device for lane in self.all)}
            self._changed = moment_of(filter(None, devices), shared=False)
            for lane in self.all:
                lane.streams.wait_next(self._changed)

    def share_lock(self, *, shares: bool) -> None:
        """Let all lanes share one lock, so that only one of them runs at a time; or give each its own. Inside `idle`."""
        for lane, own in zip(self.all, self._own_locks, strict=True):
            lane.lock = self._own_locks[0] if shares else own

    def read_moments(
        self, sources: Iterable[torch.device | None], home: torch.device | None, count: int
    ) -> Sequence[Moment]:
        """Return the position of the caller in its streams, as it concerns each lane; nothing if all is on the CPU.

        `sources` are devices with data for the calls, or None.
        """
        found = {device for device in (home, *sources) if device is not None}
        if self._only_cpu and all(device.type == "cpu" for device in found):
            return ()
        lanes = self.all[:count]
        moment = moment_of([*found.union(lane.device for lane in lanes)], shared=torch.is_grad_enabled())
        return [{device: mark for device, mark in moment.items() if device in (*found, lane.device)} for lane in lanes]

    def close(self) -> None:
        """End the threads once they have finished what was sent to them. May be called again."""
        if self.pid != getpid():  # there, another thread's hold on the gate would never end
            self._end.detach()
            self.is_open = False
            return
        with self._gate:
            was_open = self._end.detach() is not None
            self.is_open = False
        if was_open:
            _end_threads(self.all)
            for lane in self.all:
                lane.streams.be_waited_for()

    def _start(self, lanes: Sequence[Lane]) -> None:
        with intra_op_threads(None):  # a lane sets the count for new threads too: leaving the block restores it
            for lane in lanes:
                if lane.thread is None:
                    lane.start(self._threads)

    def _group(self, key: tuple[int, str | None]) -> dict[int, tuple[int, ...]]:
        """Return the indices of the parts that one thread runs, by the first of them, which is that of its lane."""
        count, turns = key
        groups: dict[Any, list[int]] = {}
        for index, lane in zip(range(count), cycle(self.all), strict=False):
            thread = None if turns == "all" else lane.device if turns == "device" else lane.index
            groups.setdefault(thread, []).append(index)
        found = self._groups[key] = {group[0]: tuple(group) for group in groups.values()}
        return found


def _end_threads(lanes: Sequence[Lane], patience: float | None = None) -> None:
    for lane in lanes:
        lane.inbox.put(None)
    until = None if patience is None else monotonic() + patience
    for lane in lanes:
        if lane.thread is not None and lane.thread is not threading.current_thread():
            with suppress(RuntimeError):  # an interrupt came while it started: it ends by itself
                lane.thread.join(None if until is None else max(0.0, until - monotonic()))


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


# Inherited by lanes from the caller


_Autocast = tuple[str, bool, torch.dtype]
"""A kind of device, True if autocast is enabled there, and its dtype."""


class Modes(NamedTuple):
    """The modes of one thread at one moment, to be entered in a lane. Immutable; any number of threads may use it at once.

    A new thread starts with torch's defaults: gradients on, no inference mode, no autocast, no default device, an empty
    context.
    """

    grad: bool
    inference: bool
    autocast: tuple[_Autocast, ...]  # empty if it is off for every kind
    autocast_cache: bool
    default_device: torch.device | None
    context: contextvars.Context

    @classmethod
    def capture(cls, kind: str) -> Modes:
        """Return the calling thread's modes; autocast for the CPU and for that kind of device."""
        kinds = _kinds_with_autocast(kind)
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            _autocast(kinds) if any(map(torch.is_autocast_enabled, kinds)) else (),
            torch.is_autocast_cache_enabled(),
            _default_device() if count_function_modes() else None,
            contextvars.copy_context(),
        )

    def run(self, work: Callable[[], Any], device: torch.device, home: torch.device | None) -> Any:
        """Run `work` in this thread under these modes, and restore the thread's own.

        If the default device is the model's home, it means "where the model is", which in a lane is the lane's device. No
        default device is the CPU, so the same holds for a model on the CPU.
        """
        default_device = self.default_device
        if home is not None and device != home and (default_device or _CPU) == home:
            default_device = device
        context = self.context.copy()  # a context can be entered by one thread at a time
        before = torch.is_grad_enabled()
        guard = InferenceMode(self.inference)
        guard.__enter__()
        set_grad_enabled(self.grad)
        try:
            if not self.autocast and default_device is None:
                return context.run(work)
            return self._run_with_more(partial(context.run, work), default_device)
        finally:
            guard.__exit__(None, None, None)
            set_grad_enabled(before)

    def _run_with_more(self, work: Callable[[], Any], default_device: torch.device | None) -> Any:
        """Run work under autocast and a default device."""
        before, cache_before = _autocast(kind for kind, *_ in self.autocast), torch.is_autocast_cache_enabled()
        torch.autocast_increment_nesting()
        try:
            _set_autocast(self.autocast, cache=self.autocast_cache)
            if default_device is None:
                return work()
            with default_device:
                return work()
        finally:
            # The casts that this lane cached belong to this call: the last one out of the nest clears them.
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()
            _set_autocast(before, cache=cache_before)


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


@contextmanager
def without_autocast(kind: str) -> Iterator[None]:
    """Run the block without autocast on the CPU and on that kind of device."""
    with ExitStack() as stack:
        for each in _kinds_with_autocast(kind):
            if torch.is_autocast_enabled(each):
                stack.enter_context(torch.autocast(each, enabled=False))
        yield


def _default_device() -> torch.device | None:
    """Return the innermost default device, of ``torch.set_default_device`` or of ``with torch.device(...)``."""
    devices = [mode.device for mode in function_modes() if isinstance(mode, DeviceContext)]
    return devices[-1] if devices else None


@functools.cache
def _kinds_with_autocast(kind: str) -> tuple[str, ...]:
    """Return the CPU and that kind if they have autocast."""
    return tuple(each for each in dict.fromkeys(("cpu", kind)) if torch.amp.is_autocast_available(each))


def _autocast(kinds: Iterable[str]) -> tuple[_Autocast, ...]:
    return tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)


def _set_autocast(states: Iterable[_Autocast], *, cache: bool) -> None:
    for kind, is_enabled, dtype in states:
        torch.set_autocast_enabled(kind, is_enabled)
        torch.set_autocast_dtype(kind, dtype)
    torch.set_autocast_cache_enabled(cache)


@contextmanager
def intra_op_threads(threads: int | None) -> Iterator[None]:
    """Let operators of the calling thread use that many threads inside the block (None: as many as before).

    The count is that of the calling thread, and of threads that run their first operator later. Both are restored.
    """
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
