"""`reduce_metrics`: average or sum metrics over ranks."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from parawrap.functional._collectives import check_equal, gather_objects, require_group
from parawrap.tree import addresses, flatten, is_dense, unflatten

T = TypeVar("T")


def reduce_metrics(
    values: T, weight: float | Tensor = 1.0, *, op: Literal["mean", "sum"] = "mean"
) -> T:
    """Return the weighted mean or sum of each number over all ranks, the same on every rank.

    The ranks exchange their values through ``torch.distributed.all_gather_object``, which pickles
    them, and compute in float64.

    Args:
        values: A number, a tensor, or a tree of them (dicts, tuples, lists), with the same
            structure and shapes on every rank.
        weight: This rank's weight: its row count, if `values` are means over rows. The values of a
            rank with weight 0 do not count, even if they are NaN.
        op: "mean" is the sum of weight * value, divided by the sum of weights. "sum" is the sum of
            weight * value.

    Returns:
        The structure of `values`: floats for Python numbers, and for tensors, tensors of the same
        shape, dtype, and device without an autograd graph. Sums of integer tensors are int64, as in
        torch.sum. Their means, and sums with a weight that is not an integer, are float64.

    Raises:
        GatherError: If the ranks' structures, shapes, or `op` differ. The message shows both.
        TypeError: If a value is not a real number, or a dense tensor of real numbers.
        ValueError: If `op` is not a known value, a weight is negative or not finite, or all weights
            are 0 in a mean.
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
    numbers = [_as_tensor(leaf, place) for leaf, place in zip(leaves, places, strict=True)]
    shapes = [f"{place} {tuple(each.shape)}" for place, each in zip(places, numbers, strict=True)]
    require_group("reduce_metrics")
    reports = gather_objects((", ".join([f"op={op!r}", *shapes]), own_weight, numbers))
    cure = "Give all ranks the same structure, shapes, and op. A rank with weight=0 does not count."
    check_equal("reduce_metrics", [description for description, _, _ in reports], cure)
    counted = [(weight, numbers) for _, weight, numbers in reports if weight]
    if op == "mean" and not counted:
        msg = (
            "reduce_metrics: weight is 0 on every rank, so the mean is not defined. Leave the call "
            "out, or give op='sum'."
        )
        raise ValueError(msg)
    weights = [weight for weight, _ in counted]
    columns = [[numbers[place] for _, numbers in counted] for place in range(len(leaves))]
    reduced = [_reduce(*each, weights, op) for each in zip(leaves, numbers, columns, strict=True)]
    return unflatten(spec, reduced)  # type: ignore[no-any-return]


def _as_tensor(leaf: Any, place: str) -> Tensor:
    """Return a value as an integer or float64 tensor on the CPU. MPS does not support float64."""
    if isinstance(leaf, Real):
        return torch.tensor(float(leaf), dtype=torch.float64, device="cpu")
    if not isinstance(leaf, Tensor) or not is_dense(leaf) or hasattr(leaf, "full_tensor"):
        kind = type(leaf).__qualname__
        msg = (
            f"{place} is a {kind}, not a number or a dense tensor. Leave it out, or give its "
            "full_tensor()."
        )
        raise TypeError(msg)
    if leaf.dtype is torch.bool or leaf.is_complex():
        msg = (
            f"{place} is a tensor of {leaf.dtype}. Give reduce_metrics real numbers, for example "
            "with .double()."
        )
        raise TypeError(msg)
    return leaf.detach().to("cpu").to(torch.float64 if leaf.is_floating_point() else torch.int64)


def _reduce(leaf: Any, own: Tensor, parts: list[Tensor], weights: list[float], op: str) -> Any:
    """Return the weighted mean or sum of one value over the ranks, in the form of the value."""
    if (
        op == "sum"
        and not own.is_floating_point()
        and all(weight.is_integer() for weight in weights)
    ):
        # Exact
        weighted = [part * int(weight) for part, weight in zip(parts, weights, strict=True)]
        return sum(weighted, torch.zeros_like(own)).to(leaf.device)
    weighted = [part.double() * weight for part, weight in zip(parts, weights, strict=True)]
    total = sum(weighted, torch.zeros_like(own, dtype=torch.float64))
    if op == "mean":
        total = total / sum(weights) if len(parts) > 1 else parts[0].double()
    if not isinstance(leaf, Tensor):
        return float(total)
    return total.to(leaf.device, leaf.dtype if leaf.is_floating_point() else torch.float64)
