"""The steps of data parallelism with torch's signatures.

They are `scatter`, `replicate`, `parallel_apply`, and `gather`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from parawrap._public import public
from parawrap.backends import DeviceLike, device_of, resolve_device, warn_caller
from parawrap.engine.apply import apply_tasks
from parawrap.engine.cut import Cutter
from parawrap.engine.join import join
from parawrap.engine.join_rules import JoinRules
from parawrap.engine.lanes import Lanes
from parawrap.engine.replicas import CopyOptions, Replicas
from parawrap.errors import DeviceListError, GatherError, ReplicaError, ShardError
from parawrap.tree import flatten

T = TypeVar("T", bound=torch.nn.Module)
_CPU = torch.device("cpu")


@public
def scatter(inputs: Any, target_gpus: Sequence[DeviceLike], dim: int = 0) -> Any:
    """Cut a nested value into one part per device, like torch.nn.parallel.scatter.

    Args:
        inputs: A tensor, or tensors in tuples, lists, and dicts. Other values go to every device.
        target_gpus: The devices: indices, strings, or torch devices; -1 is the CPU.
        dim: The dim that the rows lie on.

    Returns:
        A list with one part per device, each nested like `inputs`; a tuple if `inputs` is a tensor.
        Row counts differ by at most one. With fewer rows than devices, there is one part per row.

    Raises:
        ShardError: If the row counts of tensors disagree, or an object of an unknown class holds
            tensors.
        DeviceListError: If `target_gpus` is empty.
        DeviceUnavailableError: If this machine does not have a device.

    Example:
        >>> import torch
        >>> from parawrap import scatter
        >>> [part["x"].tolist() for part in scatter({"x": torch.arange(5)}, ["cpu", "cpu"])]
        [[0, 1, 2], [3, 4]]
    """
    args_of_parts, _ = scatter_kwargs((inputs,), None, target_gpus, dim)
    parts = [part for (part,) in args_of_parts]
    return tuple(parts) if isinstance(inputs, torch.Tensor) else parts


@public
def scatter_kwargs(
    inputs: Any, kwargs: dict[str, Any] | None, target_gpus: Sequence[DeviceLike], dim: int = 0
) -> tuple[tuple[Any, ...], tuple[dict[str, Any], ...]]:
    """Cut the arguments of a call, like torch.nn.parallel.scatter_gather.scatter_kwargs.

    Args:
        inputs: A tuple or list of positional arguments, a single argument, or None.
        kwargs: The keyword arguments. They are cut together with `inputs`, so both results have one
            entry per part.
        target_gpus: The devices, as in `scatter`.
        dim: The dim that the rows lie on.

    Returns:
        The positional and the keyword arguments of each part. A call without rows has one part per
        device, and a call without arguments has one part.

    Raises:
        ShardError, DeviceListError, DeviceUnavailableError: As for `scatter`.

    Example:
        >>> import torch
        >>> from parawrap import scatter_kwargs
        >>> scatter_kwargs((torch.arange(3),), {"factor": 2}, ["cpu", "cpu"])
        (((tensor([0, 1]),), (tensor([2]),)), ({'factor': 2}, {'factor': 2}))
    """
    devices = list(map(device_named, target_gpus))
    if not devices:
        msg = "the list of devices is empty. Name at least one device"
        raise DeviceListError(msg)
    # As in torch: tensors in a list are cut, and a list of other values goes to every device
    cutter = Cutter(dim, lists_are_shared=True)
    args = () if inputs is None else _positional(inputs)
    flat = cutter.flatten(args, kwargs or {})
    plan = cutter.plan(flat, len(devices))
    # The plan of a batch of 0 rows cuts leaves. The plan of a single row has a row, but cuts none
    has_rows = plan.rows > 0 or any(cut_on is not None for cut_on in plan.dims)
    has_arguments = bool(args or kwargs)
    # Without rows, the plan has one shard, of size 0. As in torch, every device gets the values
    if has_arguments and not has_rows:
        shards = [plan.scatter(flat, [device])[0] for device in devices]
    else:
        shards = plan.scatter(flat, devices[: len(plan.sizes)])
    return tuple(shard.args for shard in shards), tuple(shard.kwargs for shard in shards)


@public
def replicate(network: T, devices: Sequence[DeviceLike], detach: bool = False) -> list[T]:
    """Return one replica of a module per device, like torch.nn.parallel.replicate.

    A replica on the module's device holds the module's own parameters. A replica on another device
    holds copies. Gradients reach the module's parameters unless `detach` is True. If the first
    device is the module's, the first replica has the module's own buffers. Other changes of
    replicas do not reach the module.

    Args:
        network: The module.
        devices: The device of each replica: indices, strings, or torch devices; -1 is the CPU.
        detach: Cut the gradients of copies on other devices.

    Raises:
        ReplicaError: If the module cannot be copied.
        DeviceUnavailableError: If this machine does not have a device.

    Example:
        >>> import torch
        >>> from parawrap import replicate
        >>> replicas = replicate(torch.nn.Linear(2, 2), ["cpu", "cpu"])
        >>> [type(replica).__name__ for replica in replicas]
        ['Linear', 'Linear']
    """
    places = list(map(device_named, devices))
    if not places:
        return []
    made = Replicas(network, places, CopyOptions(detach=detach, shares_hooks=True))
    made.refresh()
    if not made.state.replicas:  # as long as a lazy parameter has no shape
        msg = "the module has lazy parameters without a shape. Call it once, and replicate it then"
        raise ReplicaError(msg)
    # As in torch, calls of the first replica update the buffers of the module
    made.share_buffers()
    return [replica.target for replica in made.state.replicas]


@public
def parallel_apply(
    modules: Sequence[Any],
    inputs: Sequence[Any],
    kwargs_tup: Any = None,
    devices: Sequence[DeviceLike | None] | None = None,
) -> list[Any]:
    """Call module i with input i, all at the same time, like torch.nn.parallel.parallel_apply.

    Calls on one device share its random generator. A call that draws from it gets a warning,
    because a seed does not reproduce the order of draws.

    Args:
        modules: One callable per call.
        inputs: One entry per call: a tuple or list of positional arguments, or a single argument.
        kwargs_tup: A dict of keyword arguments per call, or None.
        devices: The device of each call. By default, the device of its first argument that has one.

    Raises:
        BaseException: The error of the first call that failed, with a note that names the lane and
            the device.
        ShardError: If the numbers of modules, inputs, keyword arguments, and devices differ.

    Example:
        >>> import torch
        >>> from parawrap import parallel_apply
        >>> parallel_apply([torch.neg, torch.abs], [torch.tensor([1]), torch.tensor([-2])])
        [tensor([-1]), tensor([2])]
    """
    calls = as_calls(modules, inputs, kwargs_tup, devices)
    if not calls:
        return []
    given = [None] * len(calls) if devices is None else devices
    places = [
        _device_of_first(call.args) if device is None else device_named(device)
        for device, call in zip(given, calls, strict=True)
    ]
    leaves, _ = flatten([(call.args, call.keywords) for call in calls])
    lanes = Lanes(places)
    try:
        return apply_tasks(lanes, calls, leaves)
    finally:
        lanes.close()


@public
def gather(outputs: Sequence[Any], target_device: DeviceLike, dim: int = 0) -> Any:
    """Join nested values from several devices on one device, like torch.nn.parallel.gather.

    Args:
        outputs: One value per device, all with the same structure. 0-d tensors become a vector,
            with a warning.
        target_device: The device of the result; -1 is the CPU.
        dim: The dim that the rows lie on.

    Raises:
        GatherError: If the structures or shapes do not match.

    Example:
        >>> import torch
        >>> from parawrap import gather
        >>> gather([torch.zeros(2, 3), torch.ones(1, 3)], "cpu").shape
        torch.Size([3, 3])
    """
    if isinstance(outputs, Mapping | str | bytes):
        msg = (
            f"gather got a {type(outputs).__name__}, which is one output. Give a list with one "
            "output per device"
        )
        raise GatherError(msg)
    return gather_shards(outputs, None, target_device, dim)


def gather_shards(
    outputs: Sequence[Any], rows: Sequence[int] | None, target_device: DeviceLike, dim: int
) -> Any:
    """Join the outputs of shards.

    Args:
        outputs: One output per shard.
        rows: The number of rows of each shard; None if it is not known. It shows which lists may
            have one item per row.
        target_device: The device of the result.
        dim: The dim that the rows lie on.
    """
    outputs = list(outputs)
    device = device_named(target_device)
    if not outputs:
        msg = "gather got no outputs. Give one output per device"
        raise GatherError(msg)

    # A block looks up arguments among the outputs with one function per shard, and returns an
    # argument once. Without the functions, `join` takes an object that all shards returned for an
    # argument. These find none: such an object is joined like other outputs, as in torch
    def find_no_argument(_output: object) -> None: ...

    finders = [find_no_argument] * len(outputs)
    return join(outputs, rows, torch_rules(dim), device, lambda: finders)


def _warn_of_vector(values: torch.Tensor) -> torch.Tensor:
    """Return the vector of the shards' 0-d outputs, as torch and torch_neuronx do, and warn.

    As a `reduce` function of `JoinRules`, it gets the vector.
    """
    warn_caller(
        "the module returned 0-d tensors. Like torch.nn.DataParallel, parawrap joins them into a "
        'vector with one value per shard. For their mean, use parallel(module, reduce="mean")'
    )
    return values


torch_rules = partial(JoinRules, reduce=_warn_of_vector, as_torch=True)
"""Makes the rules by which torch.nn.DataParallel and torch_neuronx join outputs, from a dim."""


def as_calls(
    modules: Sequence[Any], inputs: Sequence[Any], kwargs: Any, devices: Any = None
) -> list[partial[Any]]:
    """Return the calls of `parallel_apply`, which has the same arguments.

    Raises:
        ShardError: If the numbers of the arguments differ.
    """
    kwargs = [{}] * len(modules) if kwargs is None else kwargs
    counts = {
        "modules": len(modules),
        "inputs": len(inputs),
        "dicts of keyword arguments": len(kwargs),
    }
    if devices is not None:
        counts["devices"] = len(devices)
    if len(set(counts.values())) > 1:
        found = ", ".join(f"{count} {what}" for what, count in counts.items())
        msg = f"parallel_apply got {found}. Give one of each per call"
        raise ShardError(msg)
    calls = []
    for module, given, named in zip(modules, inputs, kwargs, strict=True):
        calls.append(partial(module, *_positional(given), **named))
    return calls


def _positional(inputs: Any) -> tuple[Any, ...]:
    """Return positional arguments that are given as a tuple or list, or as a single argument."""
    return tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)


def device_named(device: Any) -> torch.device:
    """Return the torch device for an index, a string, or a device; -1 is the CPU, as in torch."""
    return _CPU if device == -1 else resolve_device(device)


def _device_of_first(args: Sequence[Any]) -> torch.device:
    """Return the device of the first argument that has one, or the CPU."""
    for device in map(device_of, args):
        if device is not None:
            return device
    return _CPU
