"""Outputs are handed over: no later call writes what a call returns, and no block ends it.

A lane keeps its containers and buffers for its next call. So an output gets new containers and
objects around its tensors, copies of the lane's buffers, and the model's own parameters in place of
the lane's.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Iterator, Sequence
from operator import is_
from typing import Any

import torch

from parawrap.engine.called_code import list_captured
from parawrap.engine.lent_containers import replace_parts
from parawrap.engine.replica import Replica
from parawrap.errors import GatherError
from parawrap.tree import PLAIN, WholeLeaf, flatten, held_by, parts_below

# Values that cannot hold a part of the model, so they are not searched
_WITHOUT_PARTS = frozenset({*PLAIN, torch.dtype, torch.device, torch.Size})
# Values that may call a layer of the lane after the call
_CODE = (
    types.FunctionType,
    types.MethodType,
    functools.partial,
    types.CoroutineType,
    Iterator,  # a generator or a `map` may hold a layer in a frame, which is not searched
)


def hand_over(output: Any, replica: Replica) -> Any:
    """Return the output of a lane, with copies of what the replica keeps for its next call.

    Raises:
        GatherError: If the output holds a layer, or an object of the lane that cannot be copied.
    """
    if type(output) is torch.Tensor:
        return _hand_over_tensor(output, replica)
    found, _ = flatten(output)
    leaves = [leaf.value if isinstance(leaf, WholeLeaf) else leaf for leaf in found]
    values = [_hand_over_leaf(leaf, replica) for leaf in leaves]
    has_same_leaves = all(map(is_, values, leaves))
    if has_same_leaves and not any(map(replica.owns, _containers_in(output))):
        return output
    value_of = {id(leaf): value for leaf, value in zip(leaves, values, strict=True)}

    def find_value(node: Any) -> Any:
        # A list among the attributes of a BatchEncoding is in a `WholeLeaf`. Each `flatten` makes a
        # new one, so the list itself is looked up. `unflatten` takes it with or without one
        leaf = node.value if isinstance(node, WholeLeaf) else node
        return value_of.get(id(leaf))

    return replace_parts(output, find_value, must_copy=replica.owns)


def hand_over_joined(output: Any, of_lanes: Sequence[Any], replicas: Sequence[Replica]) -> Any:
    """Return an output that was joined from those of the lanes, as `hand_over` does.

    Raises:
        GatherError: As for `hand_over`.
    """
    # An object that all lanes returned is in lane 0's replica too
    output = hand_over(output, replicas[0])
    # Items of lists come from each lane, and make the joined list longer than that of lane 0. The
    # parts of a registered object come from each lane too
    leaves, spec = flatten(output)
    has_items = spec != flatten(of_lanes[0])[1]
    if has_items or any(isinstance(leaf, WholeLeaf) for leaf in leaves):
        for replica in replicas[1:]:
            output = hand_over(output, replica)
    return output


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
            # Code may call a layer at any time later, so this replica is never emptied
            replica.is_in_output = True
        # A layer alone is no reason for a copy, which would hold the same layer
        if not is_layer and not has_parts_of_lane:
            # A view of a buffer is no object of the replica, but later calls write its memory
            is_view = isinstance(each, torch.Tensor) and replica.shares_memory(each)
            has_parts_of_lane = is_view or replica.owns(each)
    return _copy_object(value, reached, replica) if has_parts_of_lane else value


def _copy_object(value: Any, reached: list[Any], replica: Replica) -> Any:
    """Return a copy of an object around its tensors. Layers in it stay the lane's."""
    # `copy.deepcopy` makes no copy of an object whose id is in the memo, and uses the entry
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
        # All lanes share the classes and modules of Python
        is_shared = isinstance(each, (type, types.ModuleType))
        if is_shared or type(each) in _WITHOUT_PARTS or id(each) in seen:
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
