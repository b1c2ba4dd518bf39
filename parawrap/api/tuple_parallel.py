"""`TupleParallel` and `tuple_fn`: calls with arguments that are cut into one part per device."""

from __future__ import annotations

import copy
import functools
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, Self, TypeVar, overload

import cloudpickle
import optree
import torch
import wrapt

from parawrap._public import public
from parawrap.api._containers import (
    Parts,
    container_kind,
    is_container,
    is_list_per_row,
    items_of,
    rebuild,
    transpose_rows,
)
from parawrap.api._decorated import is_global, is_sent_by_value, look_up
from parawrap.api.data_parallel import DataParallel
from parawrap.api.move_to_device import on_lane, recursive_to
from parawrap.api.scatter_gather import device_named
from parawrap.api.tuples import cat, cat_rows, rows_of_parts
from parawrap.backends import DeviceLike, Devices, best_backend, resolve_devices
from parawrap.engine.call import Calls, Entry
from parawrap.engine.cut import Cutter
from parawrap.engine.join_rules import JoinRules
from parawrap.engine.lanes import here
from parawrap.errors import GatherError, ShardError
from parawrap.tree import address

T = TypeVar("T", bound=torch.nn.Module)


class _PartOfCall(NamedTuple):
    """The arguments of a call on one device: part i of each argument."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@public
class TupleParallel(DataParallel[T]):
    """Run a module on tuples with one part per device, and return a tuple of outputs.

    Each argument has the format that `tp_collate` returns:

    ===========================================  ==========================================
    argument                                     part i
    ===========================================  ==========================================
    a tuple or list ``(x1, x2)``                 ``x1`` for the first device
    a dict ``{"x": (x1, x2), "y": (y1, y2)}``    ``{"x": x1, "y": y1}``
    a namedtuple ``Pair((x1, x2), (y1, y2))``    ``Pair(x1, y1)``
    ===========================================  ==========================================

    Dicts and namedtuples may be nested. The outermost tuple or list always holds the parts, so a
    batch ``(xs, ys)`` is passed as ``model(*batch)``. A part can be any value.

    If ``forward`` returns a tuple, or a list of tensors, the call returns one tuple of parts per
    output: ``(a1, a2), (b1, b2) = model((x1, x2), (y1, y2))``. A list of texts or dicts has one
    item per row, and is one output. Attributes of `module` are available on the `TupleParallel`.

    Fewer parts than devices, as in a short last batch, use fewer lanes. A call without arguments
    runs once per device. On a machine without an accelerator, unless `device_ids` names the CPU,
    any number of parts runs one after another.

    Lanes start at the first call, and end when the `TupleParallel` is deleted, closed, or used as a
    context manager and left. It is thread-safe.

    Args:
        module: The module to replicate. It moves to ``device_ids[0]``.
        device_ids: The devices of the lanes, as in `DataParallel`.
        transfer_output: Move outputs to `output_device`. By default each output stays on its
            device.
        transfer_input: Move each part to its device first. Use False if the parts are on their
            devices already.
        reduction: A function of the tuple of outputs, such as `cat`.
        output_device: With `transfer_output`, the device of outputs; ``device_ids[0]`` by default.
        dim: Accepts only 0, because parts are not cut.

    Raises:
        ShardError: If an option has a value that it does not take; at the call, if an argument does
            not have the format above, if arguments have different numbers of parts, or if there are
            more parts than devices.
        GatherError: At the call, if the module returns tuples of different lengths.
        DeviceListError, DeviceUnavailableError: As for `DataParallel`.

    Example:
        >>> import torch
        >>> from parawrap import TupleParallel, cat
        >>> with TupleParallel(torch.nn.Linear(4, 2), ["cpu", "cpu"]) as model:
        ...     y1, y2 = model((torch.zeros(3, 4), torch.zeros(2, 4)))
        >>> y1.shape, y2.shape, model.out_features
        (torch.Size([3, 2]), torch.Size([2, 2]), 2)
    """

    def __init__(
        self,
        module: T,
        device_ids: Sequence[DeviceLike] | None = None,
        transfer_output: bool = False,
        transfer_input: bool = True,
        reduction: Callable[[Any], Any] | None = None,
        *,
        output_device: DeviceLike | None = None,
        dim: int = 0,
    ) -> None:
        super().__init__(module, device_ids, output_device)
        self.transfer_input = transfer_input
        self.transfer_output = transfer_output
        self.reduction = reduction
        _check_options(self, output_device, dim)
        if self._lanes:
            self.module.to(self._lanes[0])

    def scatter(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Sequence[Any]
    ) -> Any:
        """Return the args and the kwargs of each lane: part i of every argument goes to lane i."""
        # Not `_lanes`, which the session sets later: users may change `device_ids` between calls
        lanes = list(map(device_named, device_ids))
        # Without lanes, any number of parts runs in turn
        parts = _split_arguments(inputs, kwargs or {}, len(lanes) or None)
        if not inputs and not kwargs:
            parts *= self.ndevices  # a call without arguments runs once per device
        if self.transfer_input and lanes:
            parts = _move_to_lanes(parts, lanes)
        return tuple(part.args for part in parts), tuple(part.kwargs for part in parts)

    @property
    def ndevices(self) -> int:
        """The number of devices, for `tp_collate`. 1 if calls run without lanes."""
        return len(self.device_ids) or 1

    @property
    def home_device(self) -> Any:
        """The device of `module`: ``device_ids[0]``, or the CPU if calls run without lanes."""
        return self.device_ids[0] if self.device_ids else torch.device("cpu")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call `module` once per part, each in its own lane.

        Return the tuple of outputs, or its reduction.
        """
        with torch.autograd.profiler.record_function("TupleParallel.forward"):
            args, module_kwargs = self.scatter(inputs, kwargs, self.device_ids)
            outputs = self._run_parts(args, module_kwargs)
            output_device = self.output_device if self._lanes else None
            if self.reduction is not cat:
                return self.gather(outputs, output_device)
            # `cat` by itself does not know the arguments, which show the rows of each part
            together = self._move_and_transpose(outputs, output_device)
            pairs = zip(args, module_kwargs, strict=True)
            values = [(*positional, *named.values()) for positional, named in pairs]
            return cat_rows(together, 0, rows_of_parts(values, 0, reads_lists=True))

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Return the outputs as a tuple. Move, transpose, and reduce them as configured."""
        together = self._move_and_transpose(outputs, output_device)
        return together if self.reduction is None else self.reduction(together)

    def _move_and_transpose(self, outputs: Sequence[Any], output_device: Any) -> Any:
        """Return the outputs before their reduction."""
        if self.transfer_output and self._lanes:
            outputs = recursive_to(list(outputs), output_device)
        return _transpose_outputs(outputs)

    def _run_parts(self, args: Sequence[Any], kwargs: Sequence[Any]) -> list[Any]:
        """Return the output of each part, in lanes if this call may use them."""
        # In this order: without lanes there is no session. A lane must not wait for other lanes
        if not self._lanes or here.lane is not None or not self._session().is_ready():
            return [self.module(*part, **named) for part, named in zip(args, kwargs, strict=True)]
        self._check_placement()
        return self._run_shards(args, kwargs) if args else []


@overload
def tuple_fn(
    fn: Callable[..., Any], *, parallel: bool = ..., devices: Devices = ...
) -> Callable[..., Any]: ...


@overload
def tuple_fn(
    fn: None = None, *, parallel: bool = ..., devices: Devices = ...
) -> Callable[[Callable[..., Any]], Callable[..., Any]]: ...


@public
def tuple_fn(fn: Any = None, *, parallel: bool = False, devices: Devices = None) -> Any:
    """Make a function accept tuples of parts and return a tuple of results, like `TupleParallel`.

    Args:
        fn: The function. Without it, return a decorator: ``@tuple_fn(parallel=True)``.
        parallel: Run the parts at the same time, in lanes. By default they run one after another.
            Lanes that share a device also do if an argument requires gradients, so that a seed
            gives the same random numbers. Otherwise, a function that draws random numbers gets a
            warning.
        devices: The devices of the lanes; each part moves to its device. By default every visible
            accelerator. On a machine without one, one CPU lane per part.

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
    return _TupleFunction(fn, _InLanes(devices) if parallel else _run_in_turn)


class _TupleFunction(wrapt.FunctionWrapper[..., Any]):
    """A function of `tuple_fn`. wrapt binds it to objects, and forwards its attributes.

    It is pickled like a `Decorated`. Never changed, so it is thread-safe.
    """

    def __init__(self, function: Callable[..., Any], run: Callable[..., Any]) -> None:
        def call(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
            return run(wrapped, args, kwargs)

        super().__init__(function, call)
        # wrapt keeps names that begin with _self_ here. All other names are the function's
        self._self_run = run

    # In Python, it may be read-only
    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        # cloudpickle takes an object of the class of functions for one, and would pickle the
        # function without its decorator. A proxy of a module stays one, so that it is a submodule
        kind = type(self.__wrapped__)
        return type(self) if kind is types.FunctionType else kind

    def __deepcopy__(self, memo: dict[int, Any]) -> _TupleFunction:
        return _TupleFunction(copy.deepcopy(self.__wrapped__, memo), self._self_run)

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        if is_global(self):
            return look_up, (self.__module__, self.__qualname__)
        return _reduce_by_value(self)


def _reduce_by_value(function: _TupleFunction) -> tuple[Any, ...]:
    return _TupleFunction, (function.__wrapped__, function._self_run)


def _reduce_for_cloudpickle(function: _TupleFunction) -> tuple[Any, ...]:
    if is_sent_by_value(function):
        return _reduce_by_value(function)
    return function.__reduce_ex__(4)  # the number is not used


_table: Any = cloudpickle.CloudPickler.dispatch_table
_table[_TupleFunction] = _reduce_for_cloudpickle


def _run_in_turn(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a function once per part, one after another, and return the transposed outputs."""
    parts = _split_arguments(args, kwargs, None)
    return _transpose_outputs([function(*part.args, **part.kwargs) for part in parts])


class _InLanes:
    """Runs the parts of a function's calls in lanes. Each lane has a copy of the function's state.

    The lanes start at the first call, and end when the function is deleted. Thread-safe.
    """

    def __init__(self, devices: Devices) -> None:
        self._devices = devices
        self._on_cpu = devices is None and best_backend().type == "cpu"
        self._lanes = () if self._on_cpu else resolve_devices(devices)
        self._calls: Calls | None = None
        # Protects `_calls`: threads that need other lanes at the same time start them once
        self._changing = threading.Lock()

    def __call__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        # On the CPU, each part gets a lane, and any number of parts may run
        most = None if self._on_cpu else len(self._lanes)
        parts = _split_arguments(args, kwargs, most)
        if not parts:
            return _run_in_turn(function, args, kwargs)
        calls = self._calls_for(function, len(parts))
        if not calls.is_ready():  # such as in a lane, or in a forked child
            return _run_in_turn(function, args, kwargs)
        if not self._on_cpu:
            parts = _move_to_lanes(parts, self._lanes)
        positional = [part.args for part in parts]
        named = [part.kwargs for part in parts]
        return _transpose_outputs(calls.apply_replicas(Entry(function), positional, named))

    def __reduce__(self) -> tuple[type[_InLanes], tuple[Devices]]:
        return _InLanes, (self._devices,)  # the copy starts its own lanes

    def _calls_for(self, function: Callable[..., Any], parts: int) -> Calls:
        """Return lanes for a number of parts; start them if there are fewer."""
        with self._changing:
            calls = self._calls
            # A decorated method has another target for each object that it is called on
            if calls is None or calls.lanes.count < parts or calls.target != function:
                devices = best_backend().first(parts) if self._on_cpu else self._lanes
                cutters: dict[str | None, Cutter] = {None: Cutter()}
                calls = self._calls = Calls(function, devices, cutters=cutters, rules=JoinRules())
            return calls


def _move_to_lanes(
    parts: Sequence[_PartOfCall], devices: Sequence[torch.device]
) -> list[_PartOfCall]:
    """Return each part on the device of its lane. There may be fewer parts than lanes."""
    return [on_lane(part, device) for part, device in zip(parts, devices, strict=False)]


def _split_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], lanes: int | None
) -> list[_PartOfCall]:
    """Return the arguments of each part, at most one part per lane.

    A call without arguments has one part. `lanes` is None if any number of parts may run.
    """
    # By place, for messages
    arguments = {f"args[{position}]": value for position, value in enumerate(args)}
    for name, value in kwargs.items():
        arguments[address("kwargs", [name])] = value
    count = _count_parts(arguments) if arguments else 1
    if lanes is not None and count > lanes:
        msg = (
            f"there are {count} parts for {lanes} devices. Cut into at most {lanes} parts, as "
            f"tp_collate({lanes}) does. If its collate function returns a tuple, pass each item "
            "as an argument: model(*batch)"
        )
        raise ShardError(msg)
    parts = []
    for index in range(count):
        positional = tuple([_take_part(value, index) for value in args])
        named = {name: _take_part(value, index) for name, value in kwargs.items()}
        parts.append(_PartOfCall(positional, named))
    return parts


def _count_parts(arguments: dict[str, Any]) -> int:
    """Return the number of parts, which is the same in all arguments. They are given by place."""
    counts: dict[str, int] = {}
    for name, value in arguments.items():
        for place, parts in _tuples_of_parts(value, name):
            counts[place] = len(parts)
    if not counts:
        # No argument has parts, so each is an empty dict, for example
        place, *_ = arguments
        kind = type(arguments[place]).__qualname__
        msg = (
            f"{place} is an empty {kind}, so the number of parts is unknown. Give a tuple with one "
            f"{kind} per device"
        )
        raise ShardError(msg)
    number, *others = set(counts.values())
    if others:
        msg = (
            f"the arguments have different numbers of parts: {counts}. Give each argument one part "
            "per device"
        )
        raise ShardError(msg)
    return number


def _tuples_of_parts(
    value: Any, place: str, around: str = ""
) -> Iterator[tuple[str, Sequence[Any]]]:
    """Yield each tuple or list of parts in an argument, with its place.

    Args:
        value: The argument, or a value inside it.
        place: The place of the value, for messages.
        around: The class of the container that holds the value; "" for an argument itself.

    Raises:
        ShardError: If the value has no parts.
    """
    if _has_fields(value):
        for key, item in items_of(value).items():
            yield from _tuples_of_parts(item, address(place, [key]), type(value).__qualname__)
        return
    # The result of torch.max(x, 0) is a tuple of fields, not of parts
    has_parts = is_container(value) and not optree.is_structseq_instance(value)
    if not has_parts:
        kind = type(value).__qualname__
        msg = f"{place} is a {kind}. Give a tuple or list with one part per device"
        if around:
            msg += (
                f". If the {around} itself is one part, give a tuple with one {around} per device"
            )
        raise ShardError(msg)
    if any(isinstance(item, Parts) for item in value):
        msg = (
            f"{place} is a whole batch of {len(value)} arguments, each with its parts, as "
            "tp_collate and default_collate return it. Pass each as an argument of its own: "
            "model(*batch)"
        )
        raise ShardError(msg)
    yield place, value


def _take_part(value: Any, index: int) -> Any:
    """Return part `index` of an argument."""
    if not _has_fields(value):
        return value[index]
    fields = {key: _take_part(item, index) for key, item in items_of(value).items()}
    return rebuild(value, fields)


def _has_fields(value: Any) -> bool:
    """True for mappings and namedtuples, whose values hold the parts.

    False for a tuple or list, whose items are the parts.
    """
    return is_container(value) and container_kind(value) is not tuple


def _transpose_outputs(outputs: Sequence[Any]) -> Any:
    """Return the outputs as a tuple, transposed if they are tuples or lists of tensors."""
    for output in outputs:
        if isinstance(output, Mapping) or not is_container(output):
            return tuple(outputs)
    # Lists with one item per row are outputs themselves
    if all(map(is_list_per_row, outputs)):
        return tuple(outputs)
    return transpose_rows(outputs, "output", _refuse_outputs)


def _refuse_outputs(reason: str) -> NoReturn:
    msg = (
        f"the parts' outputs differ: {reason}. Return equally many items for every part; put other "
        "lists into a dict"
    )
    raise GatherError(msg)


def _check_options(net: TupleParallel[Any], output_device: object, dim: int) -> None:
    """Refuse options that have no effect, and values of a wrong kind."""
    for name in ("transfer_output", "transfer_input"):
        value = getattr(net, name)
        if not isinstance(value, bool):
            msg = (
                f"{name}={value!r} is not True or False. Parts move to device_ids. To name the "
                f"device of outputs, use transfer_output=True, output_device={value!r}"
            )
            raise ShardError(msg)
    if output_device is not None and not net.transfer_output:
        msg = (
            f"output_device={output_device!r} has no effect without transfer_output=True. Give "
            "both, or none"
        )
        raise ShardError(msg)
    if dim != 0:
        msg = (
            f"dim={dim!r} has no effect: parts are not cut. Leave it out. To join outputs on "
            f"another dim, use reduction=functools.partial(parawrap.cat, dim={dim!r})"
        )
        raise ShardError(msg)
