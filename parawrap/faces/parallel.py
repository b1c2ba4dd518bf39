"""`parallel`: inside the block the same object is parallel."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, TypeVar, cast

import torch
import wrapt

from parawrap.backends import DeviceLike, Devices, backend_of, names_cores, resolve_device, resolve_devices
from parawrap.engine import Entry, InPlace, Plan, PlannedSession, Session, Stats, Trace, plan_of, stream
from parawrap.errors import PlanError, SessionError, ShardError
from parawrap.faces._arguments import Joining, checked_in_dims, checked_methods, parameters_of
from parawrap.faces._progress import Progress
from parawrap.shards import Cutter, GatherRules, Reduce, Sizes, balanced

if TYPE_CHECKING:
    from parawrap.backends.neuron import NeuronCore

__all__ = ["Parallel", "parallel"]

P = ParamSpec("P")
T = TypeVar("T")
TargetT = TypeVar("TargetT", bound=Callable[..., Any])

_BATCHES_PER_LANE = 2


class Parallel(Generic[TargetT]):
    """A parallel block over one target; what `parallel` returns.

    Lanes and replicas start when they are first needed and live until the block ends; used without ``with``, until
    `close`. Any number of threads may use it at once; it may be entered while it is entered, and again after it ended.

    Example:
        >>> import torch
        >>> from parawrap import Parallel
        >>> with Parallel(torch.tanh, ["cpu", "cpu"]) as p:
        ...     p(torch.zeros(3))
        tensor([0., 0., 0.])
    """

    def __init__(
        self,
        target: TargetT,
        devices: Devices = None,
        *,
        dim: int = 0,
        in_dims: Mapping[str, int | None] | None = None,
        methods: Sequence[str] = ("forward",),
        output_device: DeviceLike | None = None,
        reduce: Reduce = "mean",
        join: Literal["cat", "list"] = "cat",
        verify: bool = False,
        plan: Plan | Literal["auto", "default", "lanes"] | None = None,
    ) -> None:
        if not callable(target):
            msg = f"parallel takes a module or another callable, not {target!r}"
            raise ShardError(msg)
        self.target = target
        self._cores: tuple[NeuronCore, ...] = ()
        self._devices: tuple[torch.device, ...] = ()
        if names_cores(devices):
            from parawrap.faces._on_cores import cores_of

            self._cores = cores_of(devices)
        else:
            self._devices = resolve_devices(devices)
        module: torch.nn.Module | None = target if isinstance(target, torch.nn.Module) else None
        self._in_place = None if module is None else InPlace(module, checked_methods(module, methods), self)
        parameters = parameters_of(target, methods)
        in_dims = checked_in_dims(in_dims, parameters.values(), target)
        if in_dims and self._cores:
            msg = (
                "in_dims is not taken on NeuronCores: a compiled model has the rows of all inputs on one dim. What is the "
                "same for all rows can be a constant of the model that is traced"
            )
            raise ShardError(msg)
        self._plan = plan_of(plan)
        if plan is not None and self._cores:
            msg = f"plan={plan!r} is not taken on NeuronCores: how a compiled model is run is settled when it is compiled"
            raise PlanError(msg)
        self._dim = dim
        self._in_dims = in_dims
        self._parameters = parameters
        # Kept from block to block: what was compiled for the shards of one is there for those of the next.
        self._device_cutters = self._cutters() if self._devices else {}
        self._joining = Joining(
            rules=GatherRules(dim, reduce, join),
            output_device=None if output_device is None else resolve_device(output_device),
            verify=verify,
        )
        self._lock = threading.RLock()
        self._session: Session | None = None
        self._last: Session | None = None  # for what it counted
        self._depth = 0
        self._closed = False

    @property
    def devices(self) -> tuple[torch.device, ...] | tuple[NeuronCore, ...]:
        """What the lanes are on."""
        return self._cores or self._devices

    def __repr__(self) -> str:
        name = getattr(self.target, "__name__", type(self.target).__name__)
        return f"parallel({name}, {[str(device) for device in self.devices]})"

    def __enter__(self) -> Parallel[TargetT]:
        with self._lock:
            if self._session is None:
                self._session = self._new_session()
            self._rewrite()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._lock:
            self._write_back()
            session = self._taken_out() if self._depth == 0 else None
        if session is not None:
            if error is not None:
                session.cancel()
            session.close()

    def close(self) -> None:
        """Give the model its methods back and end the lanes, once they have finished. Calling it twice does no harm.

        Raises:
            SessionError: a block that was opened later on the same model is still open; nothing is changed then.
        """
        with self._lock:
            if self._depth and self._in_place is not None:
                self._in_place.uninstall()
            self._depth = 0
            session = self._taken_out()
        if session is not None:
            session.close()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the target in parallel; or, given nothing but a function, decorate it: the block is then the call."""
        if self._in_place is not None and len(args) == 1 and not kwargs and inspect.isroutine(args[0]):
            return self._decorated(args[0])
        session = self._opened()
        if self._in_place is None:
            return session.call(Entry(self.target), args, kwargs)
        with self._rewritten():
            return self.target(*args, **kwargs)

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run the call whole, not cut, in one lane, on the CPU in whichever is free first; a future of its output.

        An exception is raised by ``future.result()``. A future that has not begun can be cancelled; leaving the block by an
        exception cancels all of those.

        Raises:
            SessionError: the block is closed.

        Example:
            >>> import torch
            >>> from parawrap import parallel
            >>> with torch.no_grad(), parallel(torch.nn.Linear(3, 1), ["cpu", "cpu"]) as p:
            ...     futures = [p.submit(torch.zeros(rows, 3)) for rows in (4, 2)]
            ...     [len(future.result()) for future in futures]
            [4, 2]
        """
        return self._opened().submit(Entry(self.target), args, kwargs).future

    def map(self, batches: Iterable[Any], *, window: int | None = None, progress: bool = False) -> Iterator[Any]:
        """Stream whole batches through the lanes and yield their outputs in order.

        Batches are neither cut nor joined; each is run whole in one lane. A tuple batch is ``model(*batch)``, a
        dict ``model(**batch)``, anything else ``model(batch)``. An exception arrives in its batch's place; closing the
        generator drops what no lane has begun. On the CPU the calling thread runs short batches too, while it waits.

        Args:
            batches: any iterable; it is read in the caller's thread, at most `window` batches ahead of the results.
            window: batches in flight, 2 a lane by default; it bounds the memory.
            progress: draw a tqdm bar with the rows per second of each lane (``pip install 'parawrap[cli]'``).

        Raises:
            ShardError: a window below 1.
            SessionError: the block is closed, or ends before the generator does.

        Example:
            >>> import torch
            >>> from parawrap import parallel
            >>> model = torch.nn.Linear(3, 1).eval()
            >>> with torch.no_grad(), parallel(model, ["cpu", "cpu"]) as p:
            ...     outputs = list(p.map(torch.randn(10, 3).split(4)))
            >>> [tuple(output.shape) for output in outputs]
            [(4, 1), (4, 1), (2, 1)]
        """
        if window is not None and window < 1:
            msg = f"window={window}: at least one batch is in flight"
            raise ShardError(msg)
        session = self._opened()
        window = _BATCHES_PER_LANE * len(session.devices) if window is None else window
        return self._mapped(session, batches, window, progress)

    @property
    def plan(self) -> Plan:
        """What was measured and what was chosen; `print` shows a table."""
        return self._plan

    def stats(self) -> Stats:
        """What was done since the block was opened; after it ended, what had been done by then. `print` shows a table."""
        with self._lock:
            if self._session is None and self._last is not None:
                return self._last.stats()
        return self._opened().stats()

    def trace(self, path: str | Path) -> Trace:
        """Record when each lane works inside ``with p.trace("lanes.json") as trace:``.

        The file is in the format that chrome://tracing and ui.perfetto.dev open; ``trace.spans`` holds the same.
        """
        return self._opened().trace(path)

    def _taken_out(self) -> Session | None:
        """The session, which this block no longer has: to be closed without the lock, as lanes may still be at work."""
        session, self._session = self._session, None
        self._closed = True
        self._last = session or self._last
        return session

    def _new_session(self) -> Session:
        if self._cores:
            from parawrap.faces._on_cores import open_session

            return open_session(self.target, self._cores, self._dim, self._cutters, self._joining)
        return PlannedSession(self.target, self._devices, cutters=self._device_cutters, plan=self._plan, **self._joining)

    def _cutters(self, sizes: Sizes = balanced) -> dict[str | None, Cutter]:
        """One for each way into the target."""
        equal_sizes = bool(self._devices) and backend_of(self._devices[0].type).compiles_each_shape
        return {
            method: Cutter(self._dim, self._in_dims, taken, equal_sizes=equal_sizes, sizes=sizes)
            for method, taken in self._parameters.items()
        }

    def _opened(self) -> Session:
        """The session, started on first use."""
        with self._lock:
            if self._session is None:
                if self._closed:
                    msg = f"{self!r} is closed: use it inside its `with` block, or make a new one"
                    raise SessionError(msg)
                self._session = self._new_session()
            return self._session

    def call_through(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a stand-in does. One that somebody kept beyond the block calls plainly."""
        session = self._session
        return entry.plain(*args, **kwargs) if session is None else session.call(entry, args, kwargs)

    def _mapped(self, session: Session, batches: Iterable[Any], window: int, progress: bool) -> Iterator[Any]:
        entry = Entry(self.target)
        if not progress:
            yield from stream(session, entry, batches, window)
            return
        with Progress(batches) as bar:
            yield from stream(session, entry, batches, window, bar)

    def _rewrite(self) -> None:
        if self._depth == 0 and self._in_place is not None:
            try:
                self._in_place.install()
            except BaseException:
                self._in_place.uninstall()
                raise
        self._depth += 1

    def _write_back(self) -> None:
        if self._depth == 1 and self._in_place is not None:
            self._in_place.uninstall()
        self._depth = max(0, self._depth - 1)

    @contextmanager
    def _rewritten(self) -> Iterator[None]:
        with self._lock:
            self._rewrite()
        try:
            yield
        finally:
            with self._lock:
                self._write_back()

    def _decorated(self, function: Callable[P, T]) -> Callable[P, T]:
        def call(wrapped: Callable[..., T], instance: Any, args: Any, kwargs: Any) -> T:
            with self:
                return wrapped(*args, **kwargs)

        return cast("Callable[P, T]", wrapt.FunctionWrapper(function, call))


def parallel(
    target: TargetT,
    devices: Devices = None,
    *,
    dim: int = 0,
    in_dims: Mapping[str, int | None] | None = None,
    methods: Sequence[str] = ("forward",),
    output_device: DeviceLike | None = None,
    reduce: Reduce = "mean",
    join: Literal["cat", "list"] = "cat",
    verify: bool = False,
    plan: Plan | Literal["auto", "default", "lanes"] | None = None,
) -> Parallel[TargetT]:
    """Make a model, or any callable, data-parallel inside a ``with`` block.

    A call is cut into one shard a lane, the shards run at the same time, and their outputs are joined: the answer and
    the gradients are those of the plain call up to rounding, for a target that treats rows independently. A module is
    rewritten in place, so that every reference to it is parallel, and is what it was after the block. A callable that is
    no module is called through what ``as`` gives.

    Args:
        target: a module (also scripted or compiled), or any callable.
        devices: one entry a lane: a sequence of ``"cuda:1"``, ``"cpu"``, indices or torch devices, of one type; a device
            may be named several times. None or ``"auto"``: every visible accelerator, else the CPU; ``"cuda"``: all of
            that kind; a number: that many of the best kind. ``"nc:0"`` is a NeuronCore, with two lanes, for a model that
            `parawrap.neuron.trace` compiled; ``"neuron"`` is all of these.
        dim: the dim of inputs and outputs that the rows lie on.
        in_dims: for parameters of the target, by name, another dim, or None for a value that every lane gets whole.
            A list without tensors is cut by 0.
        methods: which methods of a module are parallel inside the block.
        output_device: where outputs are joined; by default where the module's parameters are.
        reduce: what becomes of 0-d outputs, a loss say: "mean" weighs each shard by its rows; "sum"; "stack" gives one
            value a lane; or a function of that vector.
        join: "cat" joins outputs along `dim`; "list" returns the list of the lanes' outputs.
        verify: run the first call of each structure plainly too, and compare.
        plan: in which way calls are run, where several give the same. None: on the CPU, a call that the lanes do not make
            faster is run plainly, which is seen from its first calls; on accelerators every call is cut. "auto": the
            fastest of all ways there are, which the first calls find out. "lanes": every call is cut. Or a `Plan`.

    Returns:
        A `Parallel`: a context manager, a decorator (``@parallel(model)``: the block is the call), and a callable with
        `map`, `submit`, `stats`, `trace` and `close`.

    Raises:
        DeviceListError, DeviceUnavailableError: of `devices`, here.
        ShardError: of `in_dims` or `methods`, here; of arguments that cannot be cut, at the call.
        GatherError: of outputs that cannot be joined, at the call.
        ReplicaError: of a module of which no replica can be made, at the first call.
        VerifyError: with `verify`, of outputs that differ, at the call.
        PlanError: of a plan that there is not, here.

    Example:
        >>> import torch
        >>> from parawrap import parallel
        >>> model = torch.nn.Linear(3, 2)
        >>> x = torch.randn(5, 3)
        >>> with parallel(model, ["cpu", "cpu"]) as p:
        ...     y = model(x)
        ...     model(x).sum().backward()
        >>> torch.allclose(y, model(x)), p.stats().shards
        (True, (3, 2))
    """
    return Parallel(
        target,
        devices,
        dim=dim,
        in_dims=in_dims,
        methods=methods,
        output_device=output_device,
        reduce=reduce,
        join=join,
        verify=verify,
        plan=plan,
    )
