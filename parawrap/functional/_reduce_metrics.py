"""`reduce_metrics`: average or sum metrics over ranks."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from parawrap.functional._collectives import check_equal, gather_objects, is_whole, require_group
from parawrap.tree import addresses, flatten, unflatten

T = TypeVar("T")


class _RankMetrics(NamedTuple):
    """The metrics of one rank, as the ranks exchange them.

    Attributes:
        description: All that must be equal on every rank.
        weight: The weight of the rank.
        numbers: The values, as tensors on the CPU.
    """

    description: str
    weight: float
    numbers: list[Tensor]


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
    places = addresses(spec, "values")
    numbers = []
    forms = [f"op={op!r}"]
    for leaf, place in zip(leaves, places, strict=True):
        number = _as_tensor(leaf, place)
        numbers.append(number)
        forms.append(f"{place} {tuple(number.shape)}")
    require_group("reduce_metrics")
    of_ranks = gather_objects(_RankMetrics(", ".join(forms), own_weight, numbers))
    cure = (
        "Give all ranks the same structure, shapes, and op. A rank without rows gives any numbers, "
        "with weight=0."
    )
    check_equal("reduce_metrics", [each.description for each in of_ranks], cure)
    # A value with weight 0 is left out, not multiplied: 0 times NaN is NaN
    counted = [each for each in of_ranks if each.weight]
    if op == "mean" and not counted:
        msg = (
            "reduce_metrics: weight is 0 on every rank, so the mean is not defined. Leave the call "
            "out, or give op='sum'."
        )
        raise ValueError(msg)
    weights = [each.weight for each in counted]
    reduced = []
    for index, leaf in enumerate(leaves):
        parts = [each.numbers[index] for each in counted]
        reduced.append(_reduce(leaf, numbers[index], parts, weights, op))
    return unflatten(spec, reduced)  # type: ignore[no-any-return]


def _as_tensor(leaf: Any, place: str) -> Tensor:
    """Return a value as an int64 or float64 tensor on the CPU."""
    if isinstance(leaf, Real):
        return torch.tensor(float(leaf), dtype=torch.float64, device="cpu")
    if not isinstance(leaf, Tensor) or not is_whole(leaf):
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
    dtype = torch.float64 if leaf.is_floating_point() else torch.int64
    # The device first: MPS cannot make float64
    return leaf.detach().to("cpu").to(dtype)


def _reduce(leaf: Any, own: Tensor, parts: list[Tensor], weights: list[float], op: str) -> Any:
    """Return the weighted mean or sum of one value over the ranks, in the form of the value.

    Args:
        leaf: The value of this rank, which has the form.
        own: The same from `_as_tensor`.
        parts: The values of the ranks whose weights are not 0.
        weights: Their weights.
        op: "mean" or "sum".
    """
    are_whole = all(weight.is_integer() for weight in weights)
    if op == "sum" and are_whole and not own.is_floating_point():
        # In integers: float64 does not have all large ones
        weighted = [part * int(weight) for part, weight in zip(parts, weights, strict=True)]
        return sum(weighted, torch.zeros_like(own)).to(leaf.device)
    weighted = [part.double() * weight for part, weight in zip(parts, weights, strict=True)]
    total = sum(weighted, torch.zeros_like(own, dtype=torch.float64))
    if op == "mean":
        # The mean of one value is the value, without the rounding of a product and a quotient
        is_one = len(parts) == 1
        total = parts[0].double() if is_one else total / sum(weights)
    if not isinstance(leaf, Tensor):
        return float(total)
    dtype = leaf.dtype if leaf.is_floating_point() else torch.float64
    return total.to(leaf.device, dtype)
