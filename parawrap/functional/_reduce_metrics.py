"""`reduce_metrics`: average or sum metrics over ranks."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from parawrap.errors import GatherError
from parawrap.functional._collectives import find_difference, gather_objects, require_group
from parawrap.tree import addresses, flatten, unflatten

T = TypeVar("T")


class _Report(NamedTuple):
    """What a rank sends to the others: its op, the addresses and shapes of its values, its weight, and the values."""

    signature: list[str]
    weight: float
    numbers: list[Tensor]


def reduce_metrics(values: T, weight: float | Tensor = 1.0, *, op: Literal["mean", "sum"] = "mean") -> T:
    """Return the weighted mean or sum of each number over all ranks, the same on every rank.

    The ranks exchange their values through ``torch.distributed.all_gather_object``, which pickles them, and compute in
    float64.

    Args:
        values: A number, a tensor, or a tree of them (dicts, tuples, lists), with the same structure and shapes on every
            rank.
        weight: This rank's weight: its row count, if `values` are means over rows. The values of a rank with weight 0 do
            not count, even if they are NaN.
        op: "mean" is the sum of weight * value, divided by the sum of weights. "sum" is the sum of weight * value.

    Returns:
        The structure of `values`: floats for Python numbers, and for tensors, tensors of the same shape, dtype, and device
        without an autograd graph. Sums of integer tensors are int64, as in torch.sum, or float64 if a weight is not an
        integer.

    Raises:
        GatherError: If the ranks' structures, shapes, or `op` differ. The message names the first difference.
        TypeError: If a value is not a real number, or is an integer tensor with op="mean".
        ValueError: If `op` is not a known value, a weight is negative or not finite, or all weights are 0 in a mean.
        PlatformError: If there are several ranks, but ``ipc_groups=None`` forms no process group.

    Example:
        >>> from parawrap import Platform, current_rank, functional, wrapper
        >>> @wrapper(Platform(device="cpu", n_cpus=2))
        ... def evaluate():
        ...     rank = current_rank().global_rank
        ...     loss, rows = [(1.0, 30), (5.0, 10)][rank]
        ...     return functional.reduce_metrics({"loss": loss}, weight=rows)
        >>> evaluate()
        RankResults({'loss': 2.0}, {'loss': 2.0})
    """
    if op not in ("mean", "sum"):
        msg = f"op={op!r} is not a known value. Use 'mean' or 'sum'"
        raise ValueError(msg)
    own_weight = float(weight)
    if not math.isfinite(own_weight) or own_weight < 0:
        msg = f"weight={weight!r} is not a weight. Use a finite number of at least 0"
        raise ValueError(msg)
    leaves, spec = flatten(values)
    places = addresses(spec, ("values",))
    numbers = [_as_tensor(leaf, place, op) for leaf, place in zip(leaves, places, strict=True)]
    shapes = [f"{place} {tuple(each.shape)}" for place, each in zip(places, numbers, strict=True)]
    require_group("reduce_metrics")
    reports = gather_objects(_Report([f"op={op!r}", *shapes], own_weight, numbers))
    _check_signatures([report.signature for report in reports])
    counted = [report for report in reports if report.weight]
    if op == "mean" and not counted:
        msg = "reduce_metrics: weight is 0 on every rank, so the mean is not defined. Leave the call out, or give op='sum'."
        raise ValueError(msg)
    weights = [report.weight for report in counted]
    reduced = []
    for number, leaf in enumerate(leaves):
        total = _reduce([report.numbers[number] for report in counted], weights, op, numbers[number])
        reduced.append(_like(leaf, total))
    return unflatten(spec, reduced)  # type: ignore[no-any-return]


def _as_tensor(leaf: Any, place: str, op: str) -> Tensor:
    """Return a value as an integer or float64 tensor on the CPU. MPS does not support float64."""
    if isinstance(leaf, Real):
        return torch.tensor(float(leaf), dtype=torch.float64, device="cpu")
    if not isinstance(leaf, Tensor):
        msg = f"{place} is a {type(leaf).__qualname__}, not a number or a tensor. Leave it out of reduce_metrics."
        raise TypeError(msg)
    if hasattr(leaf, "full_tensor"):
        msg = f"{place} is a DTensor, and this rank has only a part. Give reduce_metrics its .full_tensor()."
        raise TypeError(msg)
    if leaf.dtype is torch.bool or leaf.is_complex() or leaf.layout is not torch.strided or leaf.is_nested:
        msg = (
            f"{place} is a tensor of {leaf.dtype} and {leaf.layout}. "
            "Give reduce_metrics dense real numbers, for example with .double()."
        )
        raise TypeError(msg)
    if op == "mean" and not leaf.is_floating_point():
        msg = f"{place} is a tensor of {leaf.dtype}, which cannot hold a mean. Give its .double(), or op='sum'."
        raise TypeError(msg)
    return leaf.detach().to("cpu").to(torch.float64 if leaf.is_floating_point() else torch.int64)


def _check_signatures(signatures: list[list[str]]) -> None:
    """Raise if a rank's values differ from those of rank 0. The message names the first difference."""
    difference = find_difference(signatures)
    if difference is None:
        return
    rank, here, there = difference
    found = f"rank 0 has {here}, rank {rank} has {there}"
    if here.startswith("op="):
        msg = f"reduce_metrics: {found}. Use the same op on all ranks."
    else:
        msg = (
            f"reduce_metrics: the ranks' values differ in structure or shape: {found}. Give all ranks the same "
            "structure. A rank with weight=0 does not count."
        )
    raise GatherError(msg)


def _reduce(parts: list[Tensor], weights: list[float], op: str, own: Tensor) -> Tensor:
    """Return the weighted mean or sum of one value over the ranks with a weight."""
    if op == "mean":
        if len(parts) == 1:
            return parts[0]
        return torch.stack([part * weight for part, weight in zip(parts, weights, strict=True)]).sum(0) / sum(weights)
    if not own.is_floating_point() and all(weight.is_integer() for weight in weights):
        return sum((part * int(weight) for part, weight in zip(parts, weights, strict=True)), torch.zeros_like(own))
    zero = torch.zeros_like(own, dtype=torch.float64)
    return sum((part.double() * weight for part, weight in zip(parts, weights, strict=True)), zero)


def _like(leaf: Any, numbers: Tensor) -> Any:
    """Return a result in the form of the value that was given."""
    if not isinstance(leaf, Tensor):
        return float(numbers)
    return numbers.to(leaf.dtype if leaf.is_floating_point() else numbers.dtype).to(leaf.device)
