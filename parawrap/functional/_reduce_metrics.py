"""`reduce_metrics`: average or sum metrics over ranks."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from parawrap.errors import GatherError
from parawrap.functional._collectives import collective_device, find_difference, gather_objects, group_size, require_group
from parawrap.tree import addresses, flatten, unflatten

__all__ = ["reduce_metrics"]

T = TypeVar("T")

_EXACT = 2**53  # float64 holds every integer up to this one


def reduce_metrics(values: T, weight: float | Tensor = 1.0, *, op: Literal["mean", "sum"] = "mean") -> T:
    """Return the weighted mean or sum of each number over all ranks, the same on every rank.

    The ranks compare the structures of their values, and then sum all numbers in one collective, in float64.

    Args:
        values: A number, a tensor, or a tree of them (dicts, tuples, lists), with the same structure and shapes on every
            rank.
        weight: This rank's weight: its row count, if `values` are means over rows. The values of a rank with weight 0 do
            not count, even if they are NaN.
        op: "mean" is the sum of weight * value, divided by the sum of weights. "sum" is the sum of weight * value.

    Returns:
        The structure of `values`: floats for Python numbers, and tensors of the same shape, dtype, and device for tensors.
        The tensors have no autograd graph.

    Raises:
        GatherError: If the ranks' structures, shapes, or `op` differ. The message names the first difference.
        TypeError: If a value is not a real number, or is an integer tensor with op="mean".
        ValueError: If `op` is not a known value, a weight is negative or not finite, or all weights are 0 in a mean.
        OverflowError: If the sum of an integer tensor does not fit its dtype or is not an integer, or if its numbers are so
            large (from 2**53 / the number of ranks on) that their sum in float64 may not be exact.
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
    share = _check_weight(weight)
    leaves, spec = flatten(values)
    places = addresses(spec, ("values",))
    parts = [_take_numbers(leaf, place, op, share) for leaf, place in zip(leaves, places, strict=True)]
    mine = torch.cat([torch.empty(0, dtype=torch.float64, device="cpu"), *parts])
    weighted = mine * share if share else torch.zeros_like(mine)
    ranks = require_group("reduce_metrics")
    if ranks == 1:
        total, totals = share, weighted
    else:
        shapes = [f"{place} {tuple(getattr(leaf, 'shape', ()))}" for leaf, place in zip(leaves, places, strict=True)]
        total, totals = _sum_over_ranks(share, weighted, [f"op={op!r}", *shapes])
    if op == "mean":
        if not total:
            msg = "reduce_metrics: weight is 0 on every rank, so the mean is not defined. "
            msg += "Leave the call out, or give op='sum'."
            raise ValueError(msg)
        totals = mine if ranks == 1 else totals / total
    found = totals.split([part.numel() for part in parts])
    return unflatten(  # type: ignore[no-any-return]
        spec, [_restore(numbers, leaf, place) for numbers, leaf, place in zip(found, leaves, places, strict=True)]
    )


def _check_weight(weight: float | Tensor) -> float:
    number = float(weight)
    if not math.isfinite(number) or number < 0:
        msg = f"weight={weight!r} is not a weight. Use a finite number of at least 0"
        raise ValueError(msg)
    return number


def _take_numbers(leaf: Any, place: str, op: str, share: float) -> Tensor:
    """Return the numbers of a leaf as a 1-d float64 tensor on the CPU. MPS does not support float64."""
    if isinstance(leaf, Real):
        return torch.tensor([float(leaf)], dtype=torch.float64, device="cpu")
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
    numbers = leaf.detach().to("cpu").to(torch.float64).reshape(-1)
    if not leaf.is_floating_point():
        numbers[numbers.abs() * max(share, 1) >= _EXACT / group_size()] = math.nan  # their sum may not be exact
    return numbers


def _sum_over_ranks(share: float, weighted: Tensor, signature: list[str]) -> tuple[float, Tensor]:
    """Return the sums over ranks of the weights and of the weighted numbers.

    Raises:
        GatherError: If the signatures of the ranks differ. The message names the first difference.
    """
    if difference := find_difference(gather_objects(signature)):
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
    weights = torch.tensor([share], dtype=torch.float64, device="cpu")
    flat = torch.cat([weights, weighted]).to(collective_device())
    dist.all_reduce(flat)
    numbers = flat.cpu()
    return float(numbers[0]), numbers[1:]


def _restore(numbers: Tensor, leaf: Any, place: str) -> Any:
    """Return the numbers as a value like `leaf`."""
    if not isinstance(leaf, Tensor):
        return float(numbers)
    if not leaf.is_floating_point():
        limits = torch.iinfo(leaf.dtype)
        fits = (limits.min <= numbers) & (numbers <= min(limits.max, _EXACT)) & (numbers == numbers.round())
        if not bool(fits.all()):
            msg = f"{place}: the sum over ranks does not fit a tensor of {leaf.dtype} exactly. Give its .double()."
            raise OverflowError(msg)
    return numbers.reshape(leaf.shape).to(leaf.dtype).to(leaf.device)
