"""Write into the caller's arguments what a call wrote into those of a worker."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping, MutableMapping, Sequence
from operator import is_
from typing import Any

import torch

from parawrap.tree import flatten, unflatten
from parawrap.workers._server import Given, Returned

__all__ = ["give_back"]


def give_back(returned: Returned, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Write tensors, arrays, sets, and bytearrays that a call wrote, and fill containers that it changed."""
    if not returned.written and returned.refilled is None:
        return
    call = tuple(args), dict(kwargs)
    leaves = flatten(call)[0]
    for index, value in returned.written:
        _write(leaves[index], value)
    if returned.refilled is not None:
        found, spec = flatten(returned.refilled)
        _refill(call, unflatten(spec, [leaves[each.position] if isinstance(each, Given) else each for each in found]))


def _write(leaf: Any, value: Any) -> None:
    if isinstance(leaf, torch.Tensor):
        with torch.inference_mode(leaf.is_inference()), torch.no_grad():
            leaf.copy_(value)
    elif isinstance(leaf, set):
        leaf.clear()
        leaf.update(value)
    elif isinstance(leaf, bytearray):
        leaf[:] = value
    else:
        leaf[...] = value


def _refill(container: Any, now: Any) -> Any:
    """Give a container the items of another one, and return it. Return `now` if it is not a container of the same class."""
    if type(container) is not type(now) or container is now:
        return now
    match container:
        case tuple():
            items = [_refill(item, each) for item, each in zip(container, now, strict=False)]
            return container if len(now) == len(container) and all(map(is_, container, items)) else now
        case list() | deque():
            items = [_refill(item, each) for item, each in zip(container, now, strict=False)]
            items += list(now)[len(items) :]
            container.clear()
            container.extend(items)
        case MutableMapping():
            filled = {key: _refill(container.get(key), each) for key, each in now.items()}
            container.clear()
            container.update(filled)
        case _ if dataclasses.is_dataclass(container):
            for name, each in vars(now).items():
                object.__setattr__(container, name, _refill(getattr(container, name, None), each))
        case _:
            return now
    return container
