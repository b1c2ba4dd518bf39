"""`reduce_metrics`: average or sum metrics over ranks, in one collective."""

from __future__ import annotations

import hashlib
import json
import math
from numbers import Real
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from parawrap.errors import GatherError
from parawrap.functional._collectives import collective_device, exchange_json, find_difference, group_size, require_group
from parawrap.tree import addresses, flatten, unflatten

__all__ = ["reduce_metrics"]

T = TypeVar("T")

# The first collective has the same size on every rank, so it also works if the structures differ, and shows it.
_FIRST = 512
_PIECES = 8  # bytes of the checksum; the squares of their sums are exact in float64 up to 370,000 ranks
_EXACT = 2**53  # float64 holds every integer up to this one


def reduce_metrics(values: T, weight: float | Tensor = 1.0, *, op: Literal["mean", "sum"] = "mean") -> T:
    """Return the weighted mean or sum of each number over all ranks, the same on every rank.

    One collective sends up to 495 numbers, in float64. A second one sends the rest.

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
    """Return the sums over ranks of the weights and of the weighted numbers."""
    digest = hashlib.blake2b(json.dumps(signature).encode(), digest_size=_PIECES).digest()
    pieces = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(torch.float64)
    flat = torch.cat([pieces, pieces**2, torch.tensor([share], dtype=torch.float64, device="cpu"), weighted])
    flat = torch.cat([flat, flat.new_zeros(max(0, _FIRST - flat.numel()))]).to(collective_device())
    dist.all_reduce(flat[:_FIRST])
    found = flat[:_FIRST].cpu()
    # By Cauchy and Schwarz, n * (a² + b² + ...) equals (a + b + ...)² only if all n numbers are equal.
    if not torch.equal(found[:_PIECES] ** 2, found[_PIECES : 2 * _PIECES] * dist.get_world_size()):
        raise GatherError(_describe_difference(signature))
    if flat.numel() > _FIRST:
        dist.all_reduce(flat[_FIRST:])
    numbers = flat.cpu()[2 * _PIECES : 2 * _PIECES + 1 + weighted.numel()]
    return float(numbers[0]), numbers[1:]


def _describe_difference(signature: list[str]) -> str:
    """Return the message about the first rank with a structure that differs from rank 0's."""
    difference = find_difference(exchange_json(signature))
    if difference is None:
        return "reduce_metrics: the ranks' values differ in structure or shape. Give all ranks the same structure."
    rank, here, there = difference
    if here.startswith("op="):
        return f"reduce_metrics: rank 0 has {here}, rank {rank} has {there}. Use the same op on all ranks."
    return (
        f"reduce_metrics: the ranks' values differ in structure or shape: rank 0 has {here}, rank {rank} has {there}. "
        "Give all ranks the same structure. A rank with weight=0 does not count."
    )


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
