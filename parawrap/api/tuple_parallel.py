"""`TupleParallel` and `tuple_fn`: calls with arguments that are cut into one part per device."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Self, TypeVar, overload

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
from parawrap.api.data_parallel import DataParallel
from parawrap.api.move_to_device import on_lane, recursive_to
from parawrap.api.tuples import cat, cat_rows, tensors_beside_lists
from parawrap.backends import DeviceLike, Devices, best_backend, resolve_devices
from parawrap.engine.call import Calls, Entry
from parawrap.engine.cut import Cutter
from parawrap.engine.join_rules import JoinRules
from parawrap.engine.lanes import here
from parawrap.errors import GatherError, ShardError
from parawrap.tree import address, tensors_in

T = TypeVar("T", bound=torch.nn.Module)

# The args and the kwargs of one part
_Part = tuple[tuple[Any, ...], dict[str, Any]]


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
        most = len(self._lanes) or None  # without lanes, any number of parts runs in turn
        parts = _split_arguments(inputs, kwargs or {}, most)
        if not inputs and not kwargs:
            parts *= self.ndevices  # of the one part without arguments
        if self.transfer_input and self._lanes:
            parts = _on_lanes(parts, self._lanes)
        return tuple(args for args, _ in parts), tuple(named for _, named in parts)

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
            # `cat` alone does not know the arguments, which show how many rows each part has
            together = self._move_and_transpose(outputs, output_device)
            return cat_rows(together, 0, _possible_rows(args, module_kwargs))

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Return the outputs as a tuple. Move, transpose, and reduce them as configured."""
        together = self._move_and_transpose(outputs, output_device)
        return together if self.reduction is None else self.reduction(together)

    def _move_and_transpose(self, outputs: Sequence[Any], output_device: Any) -> Any:
        if self.transfer_output and self._lanes:
            outputs = recursive_to(list(outputs), output_device)
        return _transpose_outputs(outputs)

    def _run_parts(self, args: Sequence[Any], kwargs: Sequence[Any]) -> list[Any]:
        """Return the output of each part, in lanes if this call may use them."""
        # In this order: without lanes there is no session, and a lane does not wait for other lanes
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
    run: Callable[..., Any] = _InLanes(devices) if parallel else _in_turn

    def call(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
        return run(wrapped, args, kwargs)

    return wrapt.FunctionWrapper(fn, call)


def _in_turn(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    parts = _split_arguments(args, kwargs, None)
    return _transpose_outputs([function(*part, **named) for part, named in parts])


class _InLanes:
    """Runs the parts of a function's calls in lanes. Each has a copy of the function's state.

    The lanes start at the first call and end with the function.
    """

    def __init__(self, devices: Devices) -> None:
        self._on_cpu = devices is None and best_backend().type == "cpu"
        self._lanes = () if self._on_cpu else resolve_devices(devices)
        self._calls: Calls | None = None
        # Of `_calls`: threads that need other lanes at the same time start them once
        self._changing = threading.Lock()

    def __call__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        # On the CPU, each part gets a lane
        parts = _split_arguments(args, kwargs, None if self._on_cpu else len(self._lanes))
        calls = self._calls_for(function, len(parts)) if parts else None
        if calls is None or not calls.is_ready():
            return _in_turn(function, args, kwargs)
        if not self._on_cpu:
            parts = _on_lanes(parts, self._lanes)
        positional = [part for part, _ in parts]
        named = [part_kwargs for _, part_kwargs in parts]
        return _transpose_outputs(calls.apply_replicas(Entry(function), positional, named))

    def _calls_for(self, function: Callable[..., Any], parts: int) -> Calls:
        """Return the lanes for a number of parts."""
        with self._changing:
            calls = self._calls
            # The target is another one if a method is called on another object
            if calls is None or calls.lanes.count < parts or calls.target != function:
                devices = best_backend().first(parts) if self._on_cpu else self._lanes
                cutters: dict[str | None, Cutter] = {None: Cutter()}
                calls = self._calls = Calls(function, devices, cutters=cutters, rules=JoinRules())
            return calls


def _on_lanes(parts: Sequence[_Part], devices: Sequence[torch.device]) -> list[_Part]:
    """Move each part to its lane's device. There may be fewer parts than lanes."""
    return [on_lane(part, device) for part, device in zip(parts, devices, strict=False)]


def _split_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], lanes: int | None
) -> list[_Part]:
    """Return the args and kwargs of each part, at most one per lane.

    A call without arguments has one part. `lanes` is None if any number of parts may run.
    """
    arguments = {f"args[{position}]": value for position, value in enumerate(args)}
    for name, value in kwargs.items():
        arguments[address("kwargs", [name])] = value
    count = _part_count(arguments) if arguments else 1
    if lanes is not None and count > lanes:
        msg = (
            f"there are {count} parts for {lanes} devices. Cut into at most {lanes} parts, as "
            f"tp_collate({lanes}) does. If its collate function returns a tuple, pass each item "
            "as an argument: model(*batch)"
        )
        raise ShardError(msg)
    parts = []
    for index in range(count):
        part = tuple([_take_part(value, index) for value in args])
        named = {name: _take_part(value, index) for name, value in kwargs.items()}
        parts.append((part, named))
    return parts


def _part_count(arguments: dict[str, Any]) -> int:
    """Return the number of parts in the arguments, given by their places."""
    counts: dict[str, int] = {}
    for name, value in arguments.items():
        for place, parts in _tuples_of_parts(value, name):
            counts[place] = len(parts)
    if not counts:
        place, value = next(iter(arguments.items()))
        kind = type(value).__qualname__
        msg = (
            f"{place} is an empty {kind}, so the number of parts is unknown. Give a tuple with one "
            f"{kind} per device"
        )
        raise ShardError(msg)
    if len(set(counts.values())) > 1:
        msg = (
            f"the arguments have different numbers of parts: {counts}. Give each argument one part "
            "per device"
        )
        raise ShardError(msg)
    return next(iter(counts.values()))


def _tuples_of_parts(
    value: Any, place: str, around: str = ""
) -> Iterator[tuple[str, Sequence[Any]]]:
    """Yield each tuple or list of parts in an argument, with its place.

    `around` is the kind of container it is in.
    """
    if _has_fields(value):
        for key, item in items_of(value).items():
            yield from _tuples_of_parts(item, address(place, [key]), type(value).__qualname__)
        return
    # The result of torch.max(x, 0) is a tuple of fields, not of parts
    holds_parts = is_container(value) and not optree.is_structseq_instance(value)
    if not holds_parts:
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
    """True for mappings and namedtuples: they hold parts in their values.

    A tuple or list is one part per device.
    """
    return is_container(value) and container_kind(value) is not tuple


def _transpose_outputs(outputs: Sequence[Any]) -> Any:
    """Return the outputs as a tuple, transposed if they are tuples or lists of tensors."""
    are_sequences = all(
        is_container(output) and not isinstance(output, Mapping) for output in outputs
    )
    if outputs and are_sequences and not all(map(is_list_per_row, outputs)):
        return transpose_rows(outputs, "output", _refuse_outputs)
    return tuple(outputs)


def _possible_rows(args: Sequence[Any], kwargs: Sequence[Any]) -> list[set[int]] | None:
    """Return the possible row counts of each part.

    They are the sizes of its tensors on dim 0, except of tensors in lists.

    Lists alone may have one item per row or the rows in each item, so both counts are possible.
    Return None if the tensors of a part differ in size.
    """
    found = []
    for part, named in zip(args, kwargs, strict=True):
        values = (*part, *named.values())
        sizes = {tensor.shape[0] for tensor in tensors_beside_lists(values) if tensor.ndim}
        lengths: set[int] = set()
        if not sizes:  # nothing but lists
            sizes = {tensor.shape[0] for tensor in tensors_in(values) if tensor.ndim}
            lengths = {len(value) for value in values if type(value) is list}
        possible = sizes | lengths
        if len(sizes) > 1 or not possible:  # the tensors disagree, or nothing has rows
            return None
        found.append(possible)
    return found


def _refuse_outputs(reason: str) -> NoReturn:
    msg = (
        f"the parts' outputs differ: {reason}. Return equally many items for every part; put other "
        "lists into a dict"
    )
    raise GatherError(msg)


def _check_options(net: TupleParallel[Any], output_device: object, dim: int) -> None:
    """Refuse options that have no effect, or values that they do not take."""
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
