"""The four steps of data parallelism as functions with torch's signatures: scatter, replicate, parallel_apply, gather."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from parawrap.backends import DeviceLike, device_of, resolve_device
from parawrap.engine import ReplicaSet, Session
from parawrap.faces._losses_as_vector import vector
from parawrap.lanes import intra_op_threads
from parawrap.shards import Cutter, JoinRules

__all__ = ["as_calls", "device_named", "gather", "parallel_apply", "replicate", "scatter"]

T = TypeVar("T", bound=torch.nn.Module)
_CPU = torch.device("cpu")


def scatter(inputs: Any, target_gpus: Sequence[DeviceLike], dim: int = 0) -> list[Any]:
    """Cut a nested value into one part per device, like torch.nn.parallel.scatter.

    Args:
        inputs: A tensor, or tensors in tuples, lists, and dicts. Other values go to every device.
        target_gpus: The devices: indices, strings, or torch devices.
        dim: The dim that the rows lie on.

    Returns:
        A list with one part per device, each nested like `inputs`. Row counts differ by at most one. With fewer rows than
        devices, one part per row.

    Raises:
        ShardError: If the row counts of tensors disagree.

    Example:
        >>> import torch
        >>> from parawrap import scatter
        >>> [part["x"].tolist() for part in scatter({"x": torch.arange(5)}, ["cpu", "cpu"])]
        [[0, 1, 2], [3, 4]]
    """
    devices = list(map(device_named, target_gpus))
    cutter = Cutter(dim, lists_are_shared=True)
    flat = cutter.flatten((inputs,), {})
    plan = cutter.plan(flat, len(devices))
    return [shard.args[0] for shard in plan.scatter(flat, devices[: len(plan.sizes)])]


def replicate(network: T, devices: Sequence[DeviceLike], detach: bool = False) -> list[T]:
    """Return one replica of a module per device, like torch.nn.parallel.replicate.

    A replica on the module's device holds views of the module's parameters. A replica on another device holds copies.
    Gradients flow back to the module's parameters unless `detach` is True.

    Raises:
        ReplicaError: If the module cannot be copied.

    Example:
        >>> import torch
        >>> from parawrap import replicate
        >>> [type(replica).__name__ for replica in replicate(torch.nn.Linear(2, 2), ["cpu", "cpu"])]
        ['Linear', 'Linear']
    """
    made = ReplicaSet(network, list(map(device_named, devices)))
    made.refresh()
    replicas = [replica.module for replica in made.current]
    for module in (module for replica in replicas if detach for module in replica.modules()):
        for name, parameter in module._parameters.items():
            module._parameters[name] = None if parameter is None else parameter.detach()
    return replicas


def parallel_apply(
    modules: Sequence[Any],
    inputs: Sequence[Any],
    kwargs_tup: Any = None,
    devices: Sequence[DeviceLike | None] | None = None,
) -> list[Any]:
    """Call module i with input i, all at the same time, like torch.nn.parallel.parallel_apply.

    Args:
        modules: One callable per call.
        inputs: One entry per call: a tuple or list of positional arguments, or a single argument.
        kwargs_tup: A dict of keyword arguments per call, or None.
        devices: The device of each call. By default, the device of its first argument that has one.

    Raises:
        BaseException: The error of the first call that failed, with a note that names the lane and the device.

    Example:
        >>> import torch
        >>> from parawrap import parallel_apply
        >>> parallel_apply([torch.neg, torch.abs], [torch.tensor([1]), torch.tensor([-2])])
        [tensor([-1]), tensor([2])]
    """
    calls = as_calls(modules, inputs, kwargs_tup)
    if not calls:
        return []
    named = [None] * len(calls) if devices is None else [None if each is None else device_named(each) for each in devices]
    places = [place or _device_of(call.args) for place, call in zip(named, calls, strict=True)]
    session = _session(places)
    try:
        with intra_op_threads(session.pool.threads):
            return session.apply(calls)
    finally:
        session.close()


def gather(outputs: Sequence[Any], target_device: DeviceLike, dim: int = 0) -> Any:
    """Join nested values from several devices on one device, like torch.nn.parallel.gather.

    Args:
        outputs: One value per device, all with the same structure. 0-d tensors become a vector, with a warning.
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
    outputs = list(outputs)
    session = _session([device_named(target_device)], dim)
    try:
        return session.gather(outputs, (1,) * len(outputs), device_named(target_device))
    finally:
        session.close()


def as_calls(modules: Sequence[Any], inputs: Sequence[Any], kwargs: Any) -> list[partial[Any]]:
    """Return the calls of `parallel_apply`. An input that is not a tuple or list is the only argument of its call."""
    kwargs = [{}] * len(modules) if kwargs is None else kwargs
    positional = [each if isinstance(each, tuple | list) else (each,) for each in inputs]
    return [partial(each, *args, **named) for each, args, named in zip(modules, positional, kwargs, strict=True)]


def device_named(device: Any) -> torch.device:
    """Return the torch device for an index, a string, or a device; -1 is the CPU."""
    if isinstance(device, torch.device):
        return device
    return _CPU if device == -1 else resolve_device(device)


def _device_of(args: Any) -> torch.device:
    return next((device for arg in args if (device := device_of(arg)) is not None), _CPU)


def _session(devices: Sequence[torch.device], dim: int = 0) -> Session:
    rules = JoinRules(dim, reduce=vector, as_torch=True)
    return Session(torch.nn.Identity(), devices, cutters={}, rules=rules)
