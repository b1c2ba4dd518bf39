"""Read and check the arguments of `parallel` before anything starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from typing_extensions import TypeIs

from parawrap.backends import Devices
from parawrap.engine.declarations import InDim, Parameters
from parawrap.engine.patch import original_method
from parawrap.errors import ShardError
from parawrap.tree import entries_of

if TYPE_CHECKING:
    from parawrap.launch import Platform


def check_target(target: Any) -> None:
    if not callable(target):
        msg = f"target={target!r} is not callable. Give parallel a module, a method, or another callable"
        raise ShardError(msg)


def check_methods(target: Any, methods: Sequence[str]) -> Sequence[str]:
    if isinstance(methods, str) or not methods:
        msg = f'methods={methods!r} is not a sequence of names. Give at least one name, as in methods=("forward",)'
        raise ShardError(msg)
    if not isinstance(target, torch.nn.Module):
        if tuple(methods) != ("forward",):
            kind = type(target).__name__
            msg = f"methods={methods!r} needs a module, and the target is a {kind}. Pass the method itself as the target"
            raise ShardError(msg)
        return methods
    for name in methods:
        if not callable(getattr(target, name, None)):
            msg = f"methods names {name!r}, but {type(target).__name__} has no such method"
            raise ShardError(msg)
    return methods


def check_workers(workers: Literal["thread", "process"], retries: int, *, on_cores: bool) -> Literal["thread", "process"]:
    """Return `workers` after a check of it and of the options that depend on it."""
    if workers not in ("thread", "process"):
        msg = f'workers={workers!r}: give "thread" or "process"'
        raise ShardError(msg)
    if not isinstance(retries, int) or isinstance(retries, bool) or retries < 0:
        msg = f"retries={retries!r}: give a number of further attempts, at least 0"
        raise ShardError(msg)
    if workers == "process" and on_cores:
        msg = 'workers="process" is not supported on NeuronCores. Leave workers out'
        raise ShardError(msg)
    return workers


def check_dim(dim: int) -> int:
    """Return `dim` after a check of it."""
    if not isinstance(dim, int) or isinstance(dim, bool):
        msg = f"dim={dim!r}: give the dim that the rows lie on, such as 0"
        raise ShardError(msg)
    return dim


def check_unit(unit: int, *, on_cores: bool) -> int:
    """Return `unit` after a check of it."""
    if not isinstance(unit, int) or isinstance(unit, bool) or unit < 1:
        msg = f"unit={unit!r}: give the number of rows that stay together, at least 1"
        raise ShardError(msg)
    if unit > 1 and on_cores:
        msg = "unit is not supported on NeuronCores: shards have the rows that the model is compiled for. Leave unit out"
        raise ShardError(msg)
    return unit


def is_platform(devices: Devices | Platform) -> TypeIs[Platform]:
    """True for a `Platform`. Its module is imported only if `devices` is neither a device nor a sequence."""
    if devices is None or isinstance(devices, (int, str, torch.device, Sequence)):
        return False
    from parawrap.launch import Platform as Found

    return isinstance(devices, Found)


def parameters_of(target: Any, methods: Sequence[str]) -> dict[str | None, Parameters]:
    """Return the parameters of each method. The key None stands for a call of the target itself."""
    if not isinstance(target, torch.nn.Module):
        return {None: Parameters(target)}
    plain = {name: original_method(getattr(target, name)) for name in ("forward", *methods)}
    return {None: Parameters(plain["forward"]), **{name: Parameters(plain[name]) for name in methods}}


def check_in_dims(
    in_dims: Mapping[str, InDim] | None, parameters: Iterable[Parameters], target: object
) -> Mapping[str, InDim]:
    if in_dims is None:
        return {}
    if not isinstance(in_dims, Mapping):
        msg = f'in_dims={in_dims!r} is not a mapping. Use in_dims={{"parameter name": dim, None, or "items"}}'
        raise ShardError(msg)
    for name, dim in in_dims.items():
        if not any(taken.takes(name) for taken in parameters):
            named = getattr(target, "__name__", type(target).__name__)
            has = "; ".join(dict.fromkeys(map(str, parameters)))
            msg = (
                f"in_dims names {name!r}, but {named} has no such parameter. It has: {has}. "
                "Name the keyword arguments of **kwargs one by one"
            )
            raise ShardError(msg)
        for entry in entries_of(dim):
            if entry not in (None, "items") and (isinstance(entry, bool) or not isinstance(entry, int)):
                msg = (
                    f'in_dims[{name!r}]={dim!r} is not supported. Use a dim, None, "items", or a dict, tuple, or dataclass '
                    "of these like the argument"
                )
                raise ShardError(msg)
    return in_dims
