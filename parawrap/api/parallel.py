"""`parallel`: a target that is data-parallel inside a ``with`` block."""

from __future__ import annotations

import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    NamedTuple,
    ParamSpec,
    TypeVar,
    cast,
    overload,
)

import torch
import wrapt

from parawrap._public import public
from parawrap.api._check_arguments import (
    check_in_dims,
    check_integer,
    check_methods,
    check_target,
    check_workers,
    is_platform,
    parameters_of,
    refuse_options_on_cores,
)
from parawrap.api._map_and_submit import MapAndSubmit, OpenMethod
from parawrap.backends import DeviceLike, Devices, names_cores, resolve_device, resolve_devices
from parawrap.engine.call import Entry
from parawrap.engine.cut import Cutter
from parawrap.engine.in_dims import InDim
from parawrap.engine.join_rules import JoinRules, OutDims, PadValue, Reduce
from parawrap.engine.patch import PatchedMethods
from parawrap.engine.session import Session
from parawrap.engine.shard_sizes import Sizes, sizes_of_block
from parawrap.engine.stats import Stats
from parawrap.engine.trace import Trace
from parawrap.errors import SessionError, ShardError
from parawrap.tree import UNDECLARED, entries_of

if TYPE_CHECKING:
    from parawrap.launch import Platform
    from parawrap.neuroncores import NeuronCore
    from parawrap.workers import WorkerSession

# Calls of such functions return before their body has run
_RUN_LATER = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)

P = ParamSpec("P")
T = TypeVar("T")
TargetT = TypeVar("TargetT", bound=Callable[..., Any])


@public
class Parallel(MapAndSubmit, Generic[TargetT]):
    """Make a model, or any callable, data-parallel inside a ``with`` block.

    `parallel` and `Parallel` are one class.

    Each call cuts its batch into one shard per lane, runs the shards at the same time, and joins
    their outputs. The output and the gradients equal those of the plain call up to rounding, if the
    target treats rows independently.

    A module changes in place: every reference to it is parallel inside the block, and the block
    restores it at its end. Call any other callable through the object that ``with ... as`` returns.
    For a module, it is also a decorator: each call of a function under ``@parallel(model)`` runs
    inside the block.

    Without `out_dims`, the shards of a call are never all of one size (8 rows on 2 lanes: 5 and 3).
    So the sizes of outputs show which of them follow the rows. Calls of up to 4 rows run plainly.
    With `out_dims`, the sizes are balanced. With gradients, lanes that share a device run one after
    another, so a seed gives the same random numbers every time.

    Arguments are borrowed: writes into tensors, and what the target adds to a dict, list,
    dataclass, or registered object, reach the caller's own objects. New entries are joined like
    outputs. Outputs are handed over: no later call writes them.

    Lanes and replicas start at first use. They live until the block ends; without a ``with``
    statement, until `close`. A `Parallel` is thread-safe. It is reentrant, and reusable after its
    block has ended.

    Args:
        target: A module (also scripted or compiled), or any callable.
        devices: The devices of the lanes.

            - A sequence has one entry per lane: strings such as ``"cuda:1"`` or ``"cpu"``, indices,
              or torch devices. All are of one type. A device may repeat.
            - None or ``"auto"`` uses every visible accelerator; without one, a single CPU lane,
              which is the plain call.
            - A kind such as ``"cuda"`` uses every device of that kind. ``"gpu"`` is another name of
              ``"cuda"``.
            - A number uses that many devices of the best kind.
            - ``"nc:0"`` is a NeuronCore with two lanes, for a model that `parawrap.neuron.trace`
              compiled. ``"neuron"`` uses every NeuronCore. If torch has devices of kind "neuron",
              ``"neuron:0"`` is such a device.
            - ``Platform(device="ray", n_nodes=4, n_gpus=8)`` runs 32 workers on a Ray cluster, for
              inference only.
        dim: The dim of inputs and outputs that the rows lie on.
        in_dims: Exceptions to `dim` by parameter name: another dim, None for a value that every
            lane gets whole, or "items" for a sequence with one item per row. For a list without
            tensors, 0 means the same as "items". A dict, tuple, or dataclass of these declares the
            parts of an argument: ``{"batch": {"mask": None}}``. A dict may name some items of a
            list or tuple by index. A tuple for ``*args`` has one entry per argument that they
            collect. Name a tensor that has as many rows as the batch by chance:
            ``{"weights": None}``.
        out_dims: The dim of outputs that the rows lie on. None is a value that is the same in every
            lane, "items" a list with one item per row, and "ragged" any number of rows in order.
            Give a tuple, dict, or dataclass of these to match a nested output: an LSTM has
            ``out_dims=(0, (1, 1))``. An undeclared output has its rows on `dim`.
        methods: The methods of a module that are parallel inside the block. `map`, `submit`, and
            the call of the `Parallel` use the only one; with several, choose with
            ``p.method(name)``.
        output_device: The device of joined outputs; by default the device of the module's
            parameters.
        reduce: How to join 0-d tensors and numbers, such as a loss. "mean" weights each shard by
            its rows, "sum" adds, "stack" returns one value per lane, and a function reduces that
            vector. A tuple, dict, or dataclass of these matches a nested output; an entry in it
            also reduces a tensor without rows, such as a confusion matrix. By default, numbers are
            refused.
        join: "cat" concatenates. "pad" first pads the other dims to the longest lane. "list"
            returns the outputs of the lanes as a list.
        pad_value: What ``join="pad"`` fills with: a number for every output, or a tuple, dict, or
            dataclass of numbers that matches a nested output, such as ``{"logits": 0.0, "mask":
            False, "labels": -100}``. By default, one output of floating-point numbers is filled
            with 0, and other outputs are refused.
        unit: The number of rows that stay together in one lane, such as the frames of a clip. The
            batch must be a multiple.
        workers: "thread" runs each lane in a thread. "process" runs each lane in a separate
            process, without a shared interpreter lock, for inference only.
        retries: With ``workers="process"``, how often a call runs again after its worker died.

    Raises:
        DeviceListError: If `devices` is empty, mixes types, or has an entry that is not a device.
        DeviceUnavailableError: If this machine does not have one of `devices`.
        ShardError: If `in_dims` or `methods` names a parameter or method that the target does not
            have; at the call, if an argument cannot be cut, or if the target changes an argument
            and the change cannot be joined.
        GatherError: If `out_dims`, `reduce`, or `join` is not a known value; at the call, if
            outputs cannot be joined. The message names all of them, and the options that join them.
        ReplicaError: At the first call, if the module cannot be replicated.

    Example:
        >>> import torch
        >>> from parawrap import parallel
        >>> model = torch.nn.Linear(3, 2)
        >>> x = torch.randn(5, 3)
        >>> with parallel(model, ["cpu", "cpu"]) as p:
        ...     y = model(x)
        ...     model(x).sum().backward()
        >>> torch.allclose(y, model(x), atol=1e-6), p.stats().shards
        (True, (3, 2))
    """

    # True until the end of `__init__`: `__del__` does not warn of a block that `__init__` refused
    _was_used = True

    def __init__(
        self,
        target: TargetT,
        devices: Devices | Platform = None,
        *,
        dim: int = 0,
        in_dims: Mapping[str, InDim] | None = None,
        out_dims: OutDims = UNDECLARED,
        methods: Sequence[str] = ("forward",),
        output_device: DeviceLike | None = None,
        reduce: Reduce | Mapping[Any, Any] | tuple[Any, ...] | list[Any] | None = None,
        join: Literal["cat", "list", "pad"] = "cat",
        pad_value: PadValue = None,
        unit: int = 1,
        workers: Literal["thread", "process"] = "thread",
        retries: int = 1,
    ) -> None:
        # Check
        check_target(target)
        check_methods(target, methods)
        check_integer("dim", dim, "the dim that the rows lie on, such as 0")
        check_integer("unit", unit, "the number of rows that stay together, at least 1", 1)
        check_integer("retries", retries, "a number of further attempts, at least 0", 0)
        check_workers(workers)
        on_cores = not is_platform(devices) and names_cores(devices)
        if on_cores:
            refuse_options_on_cores(workers, unit)
            # Shapes of a compiled model are fixed: the sizes of shards cannot show which outputs
            # have rows
            if out_dims is UNDECLARED:
                out_dims = dim
        parameters = parameters_of(target, methods)
        in_dims = check_in_dims(in_dims, parameters.values(), target)
        rules = JoinRules(dim, out_dims, reduce, join, pad_value)
        output = None if output_device is None else resolve_device(output_device)

        # Plan
        sizes: Sizes = sizes_of_block(unit, are_uneven=rules.needs_proof)
        if on_cores:
            plan = _plan_on_cores(target, devices, dim)
        else:
            plan = _plan_on_devices(target, devices, workers, retries, sizes)
        self._devices = plan.devices
        # A call with a shard that is much larger than a balanced shard gets a hint to declare
        # out_dims=dim. The hint would be wrong for outputs that have their rows on another dim
        has_rows_on_dim = all(
            each is UNDECLARED or each == dim for each in entries_of(rules.out_dims)
        )
        warns = rules.needs_proof and has_rows_on_dim
        make_cutter = partial(Cutter, dim, in_dims, sizes=plan.sizes, unit=unit, warns=warns)
        cutters = {method: make_cutter(taken) for method, taken in parameters.items()}
        self._new_session = partial(
            plan.open_session, cutters=cutters, rules=rules, output_device=output
        )

        # The state of a block that is not open
        self.target = target
        self._methods = tuple(dict.fromkeys(methods))
        # The stubs that make the methods parallel in place; None if the target is not a module
        self._in_place = (
            PatchedMethods(target, self._methods) if isinstance(target, torch.nn.Module) else None
        )
        # Protects the session, the depth, and the stubs in the module. Reentrant: `__exit__` calls
        # `_leave` with the lock held. Sessions are closed without the lock: see `_detach_session`
        self._lock = threading.RLock()
        self._session: Session | WorkerSession | None = None
        self._last: Session | WorkerSession | None = None  # for stats() after the block
        self._depth = 0  # the number of `with` blocks and calls that are open, in all threads
        self._closed = False
        self._was_used = False

    def __del__(self) -> None:
        if not self._was_used and not sys.is_finalizing():
            warnings.warn(
                f"{self!r} had no effect: open it with `with`, call it, or use it as a decorator",
                stacklevel=2,
            )

    @property
    def devices(self) -> tuple[torch.device, ...] | tuple[NeuronCore, ...]:
        """The device of each lane, or the NeuronCores of a block on NeuronCores."""
        self._was_used = True  # a block made only to read its devices has had its use
        return self._devices

    def __repr__(self) -> str:
        name = getattr(self.target, "__name__", type(self.target).__name__)
        return f"parallel({name}, {[str(device) for device in self._devices]})"

    def __enter__(self) -> Parallel[TargetT]:
        try:
            self._enter()
            return self
        except BaseException:
            # Ctrl-C may come between these two lines, and then Python does not call `__exit__`
            self.close()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        try:
            with self._lock:
                self._leave()
                session = self._detach_session() if self._depth == 0 else None
            if session is not None:
                if error is not None:  # nothing reads the results of calls that have not started
                    session.cancel()
                session.close()
        except BaseException:
            # After Ctrl-C in the middle, the model must not stay parallel. A second `close` changes
            # nothing
            self.close()
            raise

    def close(self) -> None:
        """Restore the model, wait for running tasks, and end the lanes.

        A second call does nothing.
        """
        self._was_used = True  # no warning of `__del__`
        with self._lock:
            if self._depth and self._in_place is not None:
                self._in_place.uninstall()
            self._depth = 0
            session = self._detach_session()
        if session is not None:
            session.close()

    @overload
    def __call__(self, function: Callable[P, T], /) -> Callable[P, T]: ...

    @overload
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the target, or the only method that `methods` names, in parallel.

        Before the block is open, a function as the only argument of a block over a module is
        decorated instead: each call of the function then runs inside the block.
        """
        may_decorate = self._in_place is not None and self._session is None
        if may_decorate and not kwargs and len(args) == 1:
            (function,) = args
            if inspect.isroutine(function):
                return self._decorate(function)
        if self._in_place is None:
            return self._open_session().call(Entry(self.target), args, kwargs)
        return self._call_method(self._only_method(), args, kwargs)

    def method(self, name: str) -> ParallelMethod:
        """Return one of the methods that `methods` names, with its own call, `map`, and `submit`.

        Raises:
            ShardError: If `methods` does not name it, or the target is not a module.

        Example:
            >>> import torch
            >>> from parawrap import parallel
            >>> class Net(torch.nn.Linear):
            ...     def embed(self, x):
            ...         return self(x).tanh()
            >>> methods = ("forward", "embed")
            >>> with torch.no_grad(), parallel(Net(3, 2), ["cpu", "cpu"], methods=methods) as p:
            ...     outputs = list(p.method("embed").map(torch.ones(4, 3).split(2)))
            >>> [tuple(output.shape) for output in outputs]
            [(2, 2), (2, 2)]
        """
        if self._in_place is None:
            msg = (
                f"{name!r} is not a method of the target, which is not a module. Call, map, or "
                "submit the block itself"
            )
            raise ShardError(msg)
        if name not in self._methods:
            msg = (
                f"methods={self._methods!r} does not name {name!r}. Name it in parallel(..., "
                f"methods=(..., {name!r}))"
            )
            raise ShardError(msg)
        return ParallelMethod(self, name)

    def refresh(self) -> None:
        """Copy the model to the lanes again at the next call.

        Inference calls reuse the copies on other devices until a tensor's version, its memory, or
        the model's structure changes. An in-place write through ``tensor.data`` changes none of
        these, so call `refresh` after it.

        Example:
            >>> import torch
            >>> from parawrap import parallel
            >>> model = torch.nn.Linear(3, 1)
            >>> with torch.no_grad(), parallel(model, ["cpu", "cpu"]) as p:
            ...     _ = model(torch.ones(9, 3))
            ...     _ = model.weight.data.zero_()
            ...     p.refresh()
            ...     bool((model(torch.ones(9, 3)) == model.bias).all())
            True
        """
        self._open_session().renew()

    def stats(self) -> Stats:
        """Return the counters of the block; after its end, those of its last session.

        `print` shows them as a table.

        Raises:
            SessionError: If the block was closed before its first use.

        Example:
            >>> import torch
            >>> from parawrap import parallel
            >>> with parallel(torch.nn.ReLU(), ["cpu", "cpu"]) as p:
            ...     _ = p(torch.ones(7, 3))
            >>> p.stats().shards
            (4, 3)
        """
        with self._lock:
            if self._session is None and self._last is not None:
                return self._last.stats()
        return self._open_session().stats()

    def trace(self, path: str | Path) -> Trace:
        """Record when each lane works, inside ``with p.trace("lanes.html") as trace:``.

        At the end of the block, `path` holds a page for browsers (.html), or a trace for
        ui.perfetto.dev and chrome://tracing (.json). ``trace.spans`` holds the same data.

        Raises:
            ShardError: If no file can be written at `path`, or its name does not end with .html or
                .json.
            SessionError: If the block is closed.

        Example:
            >>> import tempfile, torch
            >>> from pathlib import Path
            >>> from parawrap import parallel
            >>> folder = tempfile.TemporaryDirectory()
            >>> page = Path(folder.name, "lanes.html")
            >>> with parallel(torch.nn.ReLU(), ["cpu", "cpu"]) as p, p.trace(page) as trace:
            ...     _ = p(torch.ones(7, 3))
            >>> page.exists(), len(trace.spans) > 1
            (True, True)
            >>> folder.cleanup()
        """
        return self._open_session().trace(path)

    def _open_method(self, name: str | None = None) -> OpenMethod:
        """Open the session, and return a method; by default the only one that `methods` names."""
        session = self._open_session()
        owner = _name_of(self.target)
        if self._in_place is None:
            return OpenMethod(session, Entry(self.target), owner)
        if name is None:
            name = self._only_method()
        if name == "forward":  # only the call of the module itself runs its hooks
            return OpenMethod(session, Entry(self.target), f"{owner}.forward")
        call = partial(_call_named, self.target, name)
        return OpenMethod(session, Entry(call, name), f"{owner}.{name}")

    def _only_method(self) -> str:
        name, *others = self._methods
        if others:
            msg = f"methods={self._methods!r} names several methods. Choose one: p.method({name!r})"
            raise ShardError(msg)
        return name

    def _call_method(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method as inside the block: the module is parallel until the call ends."""
        self._open_session()  # refuses a closed block, which `_enter` would open again
        try:
            self._enter()
        except BaseException:  # after Ctrl-C at its end, the model must not stay parallel
            self.close()
            raise
        try:
            if name == "forward":  # only the call of the module itself runs its hooks
                return self.target(*args, **kwargs)
            return _call_named(self.target, name, *args, **kwargs)
        finally:
            try:
                self._leave()
            except BaseException:  # after Ctrl-C in the middle, likewise
                self.close()
                raise

    def _detach_session(self) -> Session | WorkerSession | None:
        """Mark the block as closed, and hand its session over to the caller, who closes it.

        The caller holds the lock here, but not while it closes the session: a lane that still runs
        may need the lock.
        """
        session, self._session = self._session, None
        self._closed = True
        if session is not None:
            self._last = session
        return session

    def _open_session(self) -> Session | WorkerSession:
        """Return the session, which opens on first use. Refuse a block that is closed."""
        with self._lock:
            if self._session is None and self._closed:
                msg = f"{self!r} is closed. Use it inside its `with` block, or make a new one"
                raise SessionError(msg)
            return self._open()

    def _open(self) -> Session | WorkerSession:
        """Return the session; open one if there is none. The caller holds the lock."""
        if self._session is None:
            self._was_used = True
            self._session = self._new_session()
        return self._session

    def _enter(self) -> None:
        """Open the session, and make the module parallel. `_leave` ends what this method begins."""
        with self._lock:
            session = self._open()
            if self._depth == 0 and self._in_place is not None:
                try:
                    self._in_place.install(session)
                except BaseException:  # after Ctrl-C, some of the methods may have their stubs
                    self._in_place.uninstall()
                    raise
            self._depth += 1

    def _leave(self) -> None:
        """Undo one `_enter`. The last one restores the module."""
        with self._lock:
            if self._depth == 1 and self._in_place is not None:
                self._in_place.uninstall()
            # It is 0 already if the block was closed inside its `with` statement
            self._depth = max(0, self._depth - 1)

    def _decorate(self, function: Callable[P, T]) -> Callable[P, T]:
        """Return the function with a block around each of its calls."""
        self._was_used = True
        if any(runs_later(function) for runs_later in _RUN_LATER):
            name = function.__qualname__
            msg = (
                f"{name} is a coroutine or a generator, which would run after its block has "
                "ended. Open the block inside it"
            )
            raise ShardError(msg)

        def call(wrapped: Callable[..., T], instance: Any, args: Any, kwargs: Any) -> T:
            with self:
                return wrapped(*args, **kwargs)

        return cast("Callable[P, T]", wrapt.FunctionWrapper(function, call))


class _SessionPlan(NamedTuple):
    """The devices of a block, and how its session opens on them.

    Attributes:
        devices: The device of each lane, or the NeuronCores.
        open_session: Opens a session on the devices.
        sizes: Chooses the sizes of the shards of a call.
    """

    devices: tuple[torch.device, ...] | tuple[NeuronCore, ...]
    open_session: Callable[..., Session | WorkerSession]
    sizes: Sizes


def _plan_on_devices(
    target: Any, devices: Devices | Platform, workers: str, retries: int, sizes: Sizes
) -> _SessionPlan:
    """Plan lanes in threads, in processes of this machine, or on Ray."""
    if is_platform(devices):
        # Imported here, because blocks in threads need no module of launches
        from parawrap.workers import WorkerSession, devices_of

        open_session = partial(WorkerSession, target, devices, retries=retries)
        return _SessionPlan(tuple(devices_of(devices)), open_session, sizes)
    resolved = resolve_devices(devices)
    if workers == "process":
        from parawrap.workers import WorkerSession

        open_session = partial(WorkerSession, target, resolved, retries=retries)
        return _SessionPlan(resolved, open_session, sizes)
    return _SessionPlan(resolved, partial(Session, target, resolved), sizes)


def _plan_on_cores(target: Any, devices: object, dim: int) -> _SessionPlan:
    """Plan lanes on NeuronCores. The compiled model decides the sizes of shards."""
    # Imported here, because other blocks need no runtime of NeuronCores
    from parawrap.neuroncores import CoreSession, Placement, resolve_cores, runtime

    cores = resolve_cores(devices, runtime().core_count())
    placement = Placement(target, cores, dim)
    return _SessionPlan(cores, partial(CoreSession, target, placement), placement.cut)


class ParallelMethod(MapAndSubmit):
    """One method of the model of a block, as `Parallel.method` returns it.

    It is usable as long as its block, and as thread-safe.
    """

    def __init__(self, block: Parallel[Any], name: str) -> None:
        self._block = block
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method in parallel."""
        return self._block._call_method(self._name, args, kwargs)

    def __repr__(self) -> str:
        return f"{self._block!r}.method({self._name!r})"

    def _open_method(self) -> OpenMethod:
        return self._block._open_method(self._name)


def _name_of(target: Any) -> str:
    """Return the module and the name of a function, or of the class of an object."""
    if isinstance(target, partial):
        return f"partial of {_name_of(target.func)}"
    named = target if hasattr(target, "__qualname__") else type(target)
    # A method of a C class, such as torch.Tensor.neg, has no module
    module = getattr(named, "__module__", None)
    return f"{module}.{named.__qualname__}"


def _call_named(target: object, name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a method. Reading it at the call finds the stub of an open block."""
    return getattr(target, name)(*args, **kwargs)


parallel = Parallel
