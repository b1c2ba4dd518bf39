"""Read and check the arguments of `parallel` before anything starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from typing_extensions import TypeIs

from parawrap.backends import Devices
from parawrap.engine.in_dims import InDim, Parameters
from parawrap.engine.patch import original_method
from parawrap.errors import ShardError
from parawrap.tree import entries_of

if TYPE_CHECKING:
    from parawrap.launch import Platform


def check_target(target: Any) -> None:
    if not callable(target):
        msg = (
            f"target={target!r} is not callable. Give parallel a module, a method, or another "
            "callable"
        )
        raise ShardError(msg)


def check_methods(target: Any, methods: Sequence[str]) -> None:
    if isinstance(methods, str) or not methods:
        msg = (
            f"methods={methods!r} is not a sequence of names. Give at least one name, as in "
            'methods=("forward",)'
        )
        raise ShardError(msg)
    kind = type(target).__name__
    if not isinstance(target, torch.nn.Module):
        if tuple(methods) != ("forward",):
            msg = (
                f"methods={methods!r} needs a module, and the target is a {kind}. Pass the method "
                "itself as the target"
            )
            raise ShardError(msg)
        return
    for name in methods:
        if not callable(getattr(target, name, None)):
            msg = f"methods names {name!r}, but {kind} has no such method"
            raise ShardError(msg)


def check_integer(name: str, value: Any, what: str, least: int | None = None) -> None:
    """Refuse a value of an option that is not an integer of at least `least`.

    `what` says in words what to give.
    """
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer or (least is not None and value < least):
        msg = f"{name}={value!r}: give {what}"
        raise ShardError(msg)


def check_workers(workers: Literal["thread", "process"]) -> None:
    if workers not in ("thread", "process"):
        msg = f'workers={workers!r}: give "thread" or "process"'
        raise ShardError(msg)


def refuse_options_on_cores(workers: Literal["thread", "process"], unit: int) -> None:
    if workers == "process":
        msg = 'workers="process" is not supported on NeuronCores. Leave workers out'
        raise ShardError(msg)
    if unit > 1:
        msg = (
            "unit is not supported on NeuronCores: shards have the rows that the model is compiled "
            "for. Leave unit out"
        )
        raise ShardError(msg)


def is_platform(devices: Devices | Platform) -> TypeIs[Platform]:
    """True for a `Platform`.

    Its module is imported only if `devices` is neither a device nor a sequence.
    """
    if devices is None or isinstance(devices, (int, str, torch.device, Sequence)):
        return False
    from parawrap.launch import Platform as Found

    return isinstance(devices, Found)


def parameters_of(target: Any, methods: Sequence[str]) -> dict[str | None, Parameters]:
    """Return the parameters of each method. The key None stands for a call of the target itself."""
    if not isinstance(target, torch.nn.Module):
        return {None: Parameters(target)}
    # Of the methods themselves: another block may be open on the module, and has its stubs there
    found: dict[str | None, Parameters] = {None: Parameters(original_method(target.forward))}
    for name in methods:
        found[name] = Parameters(original_method(getattr(target, name)))
    return found


def check_in_dims(
    in_dims: Mapping[str, InDim] | None, parameters: Iterable[Parameters], target: object
) -> Mapping[str, InDim]:
    if in_dims is None:
        return {}
    if not isinstance(in_dims, Mapping):
        msg = (
            f'in_dims={in_dims!r} is not a mapping. Use in_dims={{"parameter name": dim, None, or '
            '"items"}}'
        )
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
            is_dim = isinstance(entry, int) and not isinstance(entry, bool)
            if not is_dim and entry not in (None, "items"):
                msg = (
                    f'in_dims[{name!r}]={dim!r} is not supported. Use a dim, None, "items", or a '
                    "dict, tuple, or dataclass of these like the argument"
                )
                raise ShardError(msg)
    return in_dims
