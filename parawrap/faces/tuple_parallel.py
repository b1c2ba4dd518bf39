"""`TupleParallel` and `tuple_fn`: calls with arguments that are already cut into one part per device."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar, cast, overload

import torch
import wrapt

from parawrap.backends import DeviceLike, Devices, best_backend, resolve_devices
from parawrap.engine import Session
from parawrap.errors import ShardError
from parawrap.faces.data_parallel import DataParallel
from parawrap.faces.move_to_device import recursive_to
from parawrap.faces.tuples import transpose
from parawrap.lanes import here, intra_op_threads
from parawrap.shards import Cutter, JoinRules

__all__ = ["TupleParallel", "tuple_fn"]

T = TypeVar("T", bound=torch.nn.Module)
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


class TupleParallel(DataParallel[T]):
    """Run a module on arguments that are tuples with one part per device, and return a tuple of outputs.

    If ``forward`` returns a tuple, the call returns one tuple of parts per output:
    ``(a1, a2), (b1, b2) = model((x1, x2), (y1, y2))``. Attributes of `module` are available on the `TupleParallel`.

    Fewer parts than devices, as in a short last batch, use fewer lanes. On a machine without an accelerator, unless
    `device_ids` names the CPU, any number of parts runs one after another.

    Args:
        module: The module to replicate, as in `DataParallel`.
        device_ids: The devices of the lanes, as in `DataParallel`.
        output_device: The device of outputs, used only with `transfer_output`.
        dim: Accepted as in `DataParallel`, and not used: parts are not cut.
        transfer_input: Move each part to its device first. Use False if the parts are on their devices already.
        transfer_output: Move outputs to `output_device`. By default each output stays on its device.
        reduction: A function of the tuple of outputs, such as `cat`.

    Raises:
        ShardError: At the call, if an argument is not a tuple or list, if arguments have different numbers of parts, or if
            there are more parts than devices.

    Example:
        >>> import torch
        >>> from parawrap import TupleParallel, cat
        >>> model = TupleParallel(torch.nn.Linear(4, 2), ["cpu", "cpu"])
        >>> y1, y2 = model((torch.zeros(3, 4), torch.zeros(2, 4)))
        >>> y1.shape, y2.shape, model.out_features
        (torch.Size([3, 2]), torch.Size([2, 2]), 2)
    """

    def __init__(
        self,
        module: T,
        device_ids: Sequence[DeviceLike] | None = None,
        output_device: DeviceLike | None = None,
        dim: int = 0,
        *,
        transfer_input: bool = True,
        transfer_output: bool = False,
        reduction: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(module, device_ids, output_device, dim)
        self.transfer_input = transfer_input
        self.transfer_output = transfer_output
        self.reduction = reduction

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None:
                raise
            return getattr(module, name)

    def scatter(self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Sequence[Any]) -> Any:
        """Return the args and the kwargs of each lane: part i of every argument goes to lane i."""
        parts = _parts(inputs, kwargs or {}, len(self._lanes) or None)
        if self.transfer_input and self._lanes:
            parts = _on_lanes(parts, self._lanes)
        return tuple(args for args, _ in parts), tuple(named for _, named in parts)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call `module` once per part, each in its own lane, and return the tuple of outputs or its reduction."""
        with torch.autograd.profiler.record_function("TupleParallel.forward"):
            args, module_kwargs = self.scatter(inputs, kwargs, self.device_ids)
            outputs = self._outputs(args, module_kwargs)
            return self.gather(outputs, self.output_device if self._lanes else None)

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Return the outputs as a tuple. Move, transpose, and reduce them as configured."""
        if self.transfer_output and self._lanes:
            outputs = recursive_to(
                list(outputs), torch.device(output_device) if isinstance(output_device, str) else output_device
            )
        together = _together(outputs)
        return together if self.reduction is None else self.reduction(together)

    def _outputs(self, args: Sequence[Any], kwargs: Sequence[Any]) -> list[Any]:
        if not self._lanes or here.lane is not None or self._session().must_run_plainly():
            return [self.module(*part, **named) for part, named in zip(args, kwargs, strict=True)]
        self._check_placement()
        if not args:
            return []
        replicas = self.replicate(self.module, self.device_ids[: len(args)])
        return self.parallel_apply(replicas, args, kwargs)


@overload
def tuple_fn(fn: FunctionT, *, parallel: bool = ..., devices: Devices = ...) -> FunctionT: ...


@overload
def tuple_fn(fn: None = None, *, parallel: bool = ..., devices: Devices = ...) -> Callable[[FunctionT], FunctionT]: ...


def tuple_fn(fn: Any = None, *, parallel: bool = False, devices: Devices = None) -> Any:
    """Make a function accept tuples of parts as arguments and return a tuple of results, like `TupleParallel`.

    Args:
        fn: The function. Without it, return a decorator: ``@tuple_fn(parallel=True)``.
        parallel: Run the parts at the same time, in lanes. By default they run one after another.
        devices: The devices of the lanes; each part moves to its device. By default every visible accelerator. On a machine
            without one, one CPU lane per part.

    Raises:
        ShardError: If `fn` is not callable; at the call, as for `TupleParallel`.

    Example:
        >>> from parawrap import tuple_fn
        >>> @tuple_fn
        ... def loss(output, target):
        ...     return abs(output - target)
        >>> loss((1, 5), (2, 2))
        (1, 3)
    """
    if fn is None:
        return functools.partial(tuple_fn, parallel=parallel, devices=devices)
    if not callable(fn):
        msg = f"tuple_fn cannot decorate {fn!r}, which is not callable. Give it a function"
        raise ShardError(msg)
    run: Callable[..., Any] = _InLanes(devices) if parallel else _in_turn

    def call(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
        return run(wrapped, args, kwargs)

    return wrapt.FunctionWrapper(fn, call)


def _in_turn(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _together([function(*part, **named) for part, named in _parts(args, kwargs, None)])


class _InLanes:
    """Runs the parts of a function's calls in lanes. The lanes start at the first call and end with the function."""

    def __init__(self, devices: Devices) -> None:
        self._on_cpu = devices is None and best_backend().type == "cpu"
        self._lanes = () if self._on_cpu else resolve_devices(devices)
        self._session: Session | None = None
        self._changing = threading.Lock()

    def __call__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        parts = _parts(args, kwargs, None if self._on_cpu else len(self._lanes))
        session = self._session_for(len(parts)) if parts else None
        if session is None or session.must_run_plainly():
            return _in_turn(function, args, kwargs)
        if not self._on_cpu:
            parts = _on_lanes(parts, self._lanes)
        tasks = [partial(function, *part, **named) for part, named in parts]
        with intra_op_threads(session.pool.threads):
            return _together(session.apply(tasks))

    def _session_for(self, parts: int) -> Session:
        with self._changing:
            if self._session is None or len(self._session.devices) < parts:
                lanes = best_backend().first(parts) if self._on_cpu else self._lanes
                self._session = Session(_nothing, lanes, cutters={None: Cutter()}, rules=JoinRules())
            return self._session


def _nothing() -> None:
    """Do nothing: the target of a session that only uses `apply`."""


def _on_lanes(parts: Sequence[_Part], devices: Sequence[torch.device]) -> list[_Part]:
    """Move each part to its lane's device. Copies to the CPU block until they are complete."""
    return [
        recursive_to(part, device, non_blocking=device.type != "cpu") for part, device in zip(parts, devices, strict=False)
    ]


_Part = tuple[tuple[Any, ...], dict[str, Any]]


def _parts(args: tuple[Any, ...], kwargs: dict[str, Any], lanes: int | None) -> list[_Part]:
    """Return the args and kwargs of each part. A call without arguments has one part."""
    named = {**{f"args[{index}]": value for index, value in enumerate(args)}, **{f"{k}=": v for k, v in kwargs.items()}}
    for place, value in named.items():
        if not isinstance(value, (tuple, list)):
            msg = f"{place} is a {type(value).__name__}. Give a tuple or list with one part per device"
            raise ShardError(msg)
    counts = {place: len(value) for place, value in named.items()}
    if len(set(counts.values())) > 1:
        msg = f"the arguments have different numbers of parts: {counts}. Give each argument one part per device"
        raise ShardError(msg)
    count = next(iter(counts.values()), 1)
    if lanes is not None and count > lanes:
        msg = f"there are {count} parts for {lanes} devices. Cut into at most {lanes} parts, as tp_collate({lanes}) does"
        raise ShardError(msg)
    return [(tuple(a[i] for a in args), {k: v[i] for k, v in kwargs.items()}) for i in range(count)]


def _together(outputs: Sequence[Any]) -> Any:
    """Return the outputs as a tuple, transposed if they are tuples or lists."""
    if outputs and all(isinstance(output, (tuple, list)) for output in outputs):
        return cast("tuple[Any, ...]", transpose(outputs))
    return tuple(outputs)
