"""What `parallel` is given, read and checked before anything starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

import torch

from parawrap.engine import original_method
from parawrap.errors import ShardError
from parawrap.shards import GatherRules, Parameters

__all__ = ["Joining", "checked_in_dims", "checked_methods", "parameters_of"]


class Joining(TypedDict):
    """How a session joins outputs, and whether it checks them."""

    rules: GatherRules
    output_device: torch.device | None
    verify: bool


def checked_methods(module: Any, methods: Sequence[str]) -> Sequence[str]:
    if isinstance(methods, str) or not methods:
        msg = f'methods={methods!r}: give a sequence of at least one name, as in methods=("forward",)'
        raise ShardError(msg)
    for name in methods:
        if not callable(getattr(module, name, None)):
            msg = f"methods: {type(module).__name__} has no method {name!r}"
            raise ShardError(msg)
    return methods


def parameters_of(target: Any, methods: Sequence[str]) -> dict[str | None, Parameters]:
    """The parameters of each way into the target; None is the target called as a whole."""
    if not isinstance(target, torch.nn.Module):
        return {None: Parameters(target)}
    plain = {name: original_method(getattr(target, name)) for name in ("forward", *methods)}
    return {None: Parameters(plain["forward"]), **{name: Parameters(plain[name]) for name in methods}}


def checked_in_dims(
    in_dims: Mapping[str, int | None] | None, parameters: Iterable[Parameters], target: object
) -> Mapping[str, int | None]:
    if in_dims is None:
        return {}
    if not isinstance(in_dims, Mapping):
        msg = f'in_dims={in_dims!r} is no mapping: say in_dims={{"name of a parameter": dim or None}}'
        raise ShardError(msg)
    for name, dim in in_dims.items():
        if not any(taken.takes(name) for taken in parameters):
            named = getattr(target, "__name__", type(target).__name__)
            has = "; ".join(dict.fromkeys(map(str, parameters)))
            msg = f"in_dims names {name!r}, and {named} has no such parameter; it has: {has}"
            raise ShardError(msg)
        if dim is not None and (isinstance(dim, bool) or not isinstance(dim, int)):
            msg = f"in_dims[{name!r}]={dim!r} is neither a dim nor None"
            raise ShardError(msg)
    return in_dims
