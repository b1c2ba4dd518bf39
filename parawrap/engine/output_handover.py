"""Outputs are handed over: no later call writes what a call returns, and no block ends it.

A lane keeps its containers and buffers for its next call. So an output gets new containers and
objects around its tensors, copies of the lane's buffers, and the model's own parameters in place of
the lane's.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Iterator
from typing import Any

import torch

from parawrap.engine.called_code import list_captured
from parawrap.engine.replica import Replica
from parawrap.errors import GatherError
from parawrap.tree import PLAIN, WholeLeaf, flatten, held_by, parts_below, unflatten

# Values that cannot hold a part of the model, so that they are not searched
_WITHOUT_PARTS = frozenset({*PLAIN, torch.dtype, torch.device, torch.Size})
_CODE = (
    types.FunctionType,
    types.MethodType,
    functools.partial,
    types.CoroutineType,
    Iterator,  # such as a generator or a `map`, which may hold a layer where no one can look
)


def hand_over(output: Any, replica: Replica) -> Any:
    """Return the output of a lane without anything that the lane keeps.

    Raises:
        GatherError: If it holds a layer, or an object of the lane that cannot be copied.
    """
    if type(output) is torch.Tensor:
        return _hand_over_tensor(output, replica)
    leaves = [leaf.value if isinstance(leaf, WholeLeaf) else leaf for leaf in flatten(output)[0]]
    values = [_hand_over_leaf(leaf, replica) for leaf in leaves]
    is_same = all(value is leaf for value, leaf in zip(values, leaves, strict=True))
    if is_same and not any(map(replica.owns, _containers_in(output))):
        return output
    by_id = {id(leaf): value for leaf, value in zip(leaves, values, strict=True)}
    return _rebuild(output, by_id, replica)


def _hand_over_tensor(tensor: torch.Tensor, replica: Replica) -> torch.Tensor:
    if replica.shares_memory(tensor) or replica.is_buffer_of_model(tensor):
        return tensor.clone()  # the next call may write the buffer, and all views of it
    original: torch.Tensor | None = replica.original_of(tensor)
    return tensor if original is None else original


def _hand_over_leaf(value: Any, replica: Replica) -> Any:
    if isinstance(value, torch.Tensor):
        return _hand_over_tensor(value, replica)
    if type(value) in _WITHOUT_PARTS:
        return value
    if isinstance(value, torch.nn.Module):
        msg = (
            f"the output holds a {type(value).__name__}, which is a lane's copy of a layer and "
            "ends with the block. Return its tensors instead"
        )
        raise GatherError(msg)
    reached = [*_reach(value)]
    has_parts_of_lane = False
    for each in reached:
        is_layer = isinstance(each, torch.nn.Module)
        if is_layer or isinstance(each, _CODE):
            # It may call a layer later, so the replica stays whole for as long as the output lives
            replica.is_lent = True
        # Layers stay the lane's also in a copy, so they do not need one
        if not is_layer and not has_parts_of_lane:
            has_parts_of_lane = replica.owns(each)
    return _copy_object(value, reached, replica) if has_parts_of_lane else value


def _copy_object(value: Any, reached: list[Any], replica: Replica) -> Any:
    """Return a copy of an object around its tensors. Layers in it stay the lane's."""
    # `copy.deepcopy` takes an object from the memo in place of a copy
    memo: dict[int, Any] = {}
    for each in reached:
        if isinstance(each, torch.Tensor):
            memo[id(each)] = _hand_over_tensor(each, replica)
        elif isinstance(each, torch.nn.Module):
            memo[id(each)] = each
    try:
        return copy.deepcopy(value, memo)
    except Exception as error:
        msg = (
            f"the output holds a {type(value).__name__} with a part of the model, which the next "
            f"call would write, and it cannot be copied ({type(error).__name__}: {error}). Return "
            "its tensors instead"
        )
        raise GatherError(msg) from error


def _reach(value: Any) -> Iterator[Any]:
    """Yield everything that an object leads to, itself first.

    Layers and tensors are not searched.
    """
    seen: dict[int, Any] = {}  # by id, with the object itself: no other object gets its id
    waiting = [value]
    while waiting:
        each = waiting.pop()
        has_no_parts = type(each) in _WITHOUT_PARTS
        # All lanes share the classes and modules of Python
        if id(each) in seen or has_no_parts or isinstance(each, (type, types.ModuleType)):
            continue
        seen[id(each)] = each
        yield each
        if isinstance(each, (torch.Tensor, torch.nn.Module)):
            continue
        if isinstance(each, types.FunctionType):
            waiting += [part for _, part in list_captured(each)]
        elif isinstance(each, functools.partial):
            waiting += [each.func, *each.args, *each.keywords.values()]
        else:
            waiting += held_by(each)


def _containers_in(value: Any) -> Iterator[Any]:
    """Yield the containers of an output, from the outermost on."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        parts = parts_below(each)
        if parts is None:  # a leaf
            continue
        yield each
        waiting += [part for part in parts if not isinstance(part, (torch.Tensor, WholeLeaf))]


def _rebuild(value: Any, leaves: dict[int, Any], replica: Replica) -> Any:
    """Return a value with other leaves, given by their ids.

    Containers without another part stay the same object.
    """
    if id(value) in leaves:
        return leaves[id(value)]
    parts, spec = flatten(value, lambda node: node is not value)  # one level deep
    made = [_rebuild(part, leaves, replica) for part in parts]
    is_same = all(new is part for new, part in zip(made, parts, strict=True))
    if is_same and not replica.owns(value):
        return value
    return unflatten(spec, made)
