"""Read and check the arguments of `parallel` before anything starts."""

from __future__ import annotations

import math
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
    """Refuse a target that is not callable."""
    if not callable(target):
        msg = (
            f"target={target!r} is not callable. Give parallel a module, a method, or another "
            "callable"
        )
        raise ShardError(msg)


def check_methods(target: Any, methods: Sequence[str]) -> None:
    """Refuse names of methods that the target does not have."""
    # A text is a sequence too: of its letters
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


def check_integer(name: str, value: Any, what: str, least: float = -math.inf) -> None:
    """Refuse a value of an option that is not an integer of at least `least`.

    Args:
        name: The option.
        value: The value that the user gave.
        what: The values that are allowed, in words.
        least: The lowest integer.
    """
    if not _is_integer(value) or value < least:
        msg = f"{name}={value!r}: give {what}"
        raise ShardError(msg)


def _is_integer(value: Any) -> bool:
    """True for an int that is not a bool, which Python counts as an int."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_workers(workers: Literal["thread", "process"]) -> None:
    """Refuse a kind of worker that does not exist."""
    if workers not in ("thread", "process"):
        msg = f'workers={workers!r}: give "thread" or "process"'
        raise ShardError(msg)


def refuse_options_on_cores(workers: Literal["thread", "process"], unit: int) -> None:
    """Refuse options that lanes on NeuronCores do not have."""
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
    """True for a `Platform`."""
    # First, because most calls need no `parawrap.launch`, which is slow to import
    if devices is None or isinstance(devices, (int, str, torch.device, Sequence)):
        return False
    from parawrap.launch import Platform as Found

    return isinstance(devices, Found)


def parameters_of(target: Any, methods: Sequence[str]) -> dict[str | None, Parameters]:
    """Return the parameters of each method. The key None stands for a call of the target itself."""
    if not isinstance(target, torch.nn.Module):
        return {None: Parameters(target)}
    # Another block may be open on the module: the parameters of its stubs are not the methods' own
    found: dict[str | None, Parameters] = {None: Parameters(original_method(target.forward))}
    for name in methods:
        found[name] = Parameters(original_method(getattr(target, name)))
    return found


def check_in_dims(
    in_dims: Mapping[str, InDim] | None, parameters: Iterable[Parameters], target: object
) -> Mapping[str, InDim]:
    """Return `in_dims`, or an empty mapping for None. Refuse unknown parameters and dims.

    Args:
        in_dims: The option that the user gave.
        parameters: The parameters of each method. A name must be in one of them.
        target: Named in the message.
    """
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
            owner = getattr(target, "__name__", type(target).__name__)
            # Several methods may have the same parameters, which are listed once
            has = "; ".join(dict.fromkeys(map(str, parameters)))
            msg = (
                f"in_dims names {name!r}, but {owner} has no such parameter. It has: {has}. "
                "Name the keyword arguments of **kwargs one by one"
            )
            raise ShardError(msg)
        for entry in entries_of(dim):
            if not _is_integer(entry) and entry not in (None, "items"):
                msg = (
                    f'in_dims[{name!r}]={dim!r} is not supported. Use a dim, None, "items", or a '
                    "dict, tuple, or dataclass of these like the argument"
                )
                raise ShardError(msg)
    return in_dims
