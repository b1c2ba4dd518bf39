"""From the outputs of the lanes to the output of the call."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch.nn.utils.rnn import PackedSequence

from parawrap.errors import GatherError
from parawrap.shards._split import splitter_of
from parawrap.tree import Opaque, TreeSpec, address, addresses, flatten, mismatch, sequences, unflatten

__all__ = ["GatherRules", "Originals", "Reduce", "gather"]

Reduce = Literal["mean", "sum", "stack"] | Callable[[torch.Tensor], torch.Tensor]
Originals = Sequence[Callable[[torch.Tensor], torch.Tensor | None]]
_REDUCTIONS = ("mean", "sum", "stack")
_TENSOR = frozenset({torch.Tensor})
_ROOT = "output"
_LIST_CURE = 'join="list" returns the outputs of the lanes as they are'


@dataclass(frozen=True, slots=True)
class GatherRules:
    """How outputs are joined: along which dim, what becomes of 0-d tensors, and whether they are joined at all."""

    dim: int = 0
    reduce: Reduce = "mean"
    join: Literal["cat", "list"] = "cat"
    strict: bool = True  # refuse outputs that do not hold one row, or one group of rows, for each row of the shard

    @property
    def keep_single(self) -> bool:
        """Whether the output of a call that was not cut is the output as it is."""
        return self.join == "cat" and self.reduce in ("mean", "sum")

    def __post_init__(self) -> None:
        if self.reduce not in _REDUCTIONS and not callable(self.reduce):
            msg = f"reduce={self.reduce!r} is none of 'mean', 'sum', 'stack' or a function of a vector"
            raise GatherError(msg)
        if self.join not in ("cat", "list"):
            msg = f"join={self.join!r} is neither 'cat' nor 'list'"
            raise GatherError(msg)


def gather(
    outputs: Sequence[Any],
    sizes: Sequence[int],
    rules: GatherRules,
    device: torch.device | None,
    originals: Originals = (),
) -> Any:
    """One output on `device` (None: where each lane left it) from the outputs of shards of those sizes.

    `originals` finds, for each lane, the tensor that everybody knows of which a tensor is that lane's copy: where all
    lanes return a copy of the same one, it is returned itself, once.

    Raises:
        GatherError: structures, shapes or values that cannot be joined, named by their place in the output.
    """
    if rules.join == "cat" and (len(outputs) > 1 or not rules.keep_single):
        return _join(outputs, sizes, rules, device, originals)
    moved = [output if device is None else _moved(output, device) for output in outputs]
    return moved if rules.join == "list" else moved[0]


def _join(
    outputs: Sequence[Any],
    sizes: Sequence[int],
    rules: GatherRules,
    device: torch.device | None,
    originals: Originals,
) -> Any:
    if _TENSOR.issuperset(map(type, outputs)):
        return _join_leaf(outputs, sizes, rules, device, originals)
    flat = [flatten(output) for output in outputs]
    specs = [spec for _, spec in flat]
    spec = specs[0]
    if any(other != spec for other in specs[1:]):
        _refuse_unequal_structures(specs)
    if not _TENSOR.issuperset(map(type, flat[0][0])):
        _refuse_ambiguous(spec, [leaves for leaves, _ in flat], sizes)
    joined = []
    for index, column in enumerate(zip(*(leaves for leaves, _ in flat), strict=True)):
        try:
            joined.append(_join_leaf(column, sizes, rules, device, originals))
        except GatherError as error:
            msg = f"{addresses(spec, (_ROOT,))[index]} cannot be joined: {error}"
            raise GatherError(msg) from error.__cause__
    return unflatten(spec, joined)


def _join_leaf(
    column: Sequence[Any],
    sizes: Sequence[int],
    rules: GatherRules,
    device: torch.device | None,
    originals: Originals,
) -> Any:
    first = column[0]
    if _TENSOR.issuperset(map(type, column)) or all(isinstance(leaf, torch.Tensor) for leaf in column):
        same = _same_tensor(column, originals) if len(column) > 1 else None
        if same is not None:
            return same if device is None else same.to(device)
        parts = list(column)
        if first.ndim == 0:
            return _reduce(_all_on(parts, device), sizes, rules.reduce)
        joined = _cat(parts, rules.dim, device)
        if rules.strict and len(parts) > 1 and joined.shape[rules.dim] != sum(sizes):
            _refuse_without_rows(parts, sizes, rules.dim)
        return joined
    if isinstance(first, Opaque):
        values = [_on_device(leaf.value, device) for leaf in column]
        if len(values) == 1 or all(leaf.value is first.value for leaf in column):
            return values[0]
        return splitter_of(first.value).join(values)
    if all(_same(leaf, first) for leaf in column):
        return first
    kinds = sorted({type(leaf).__name__ for leaf in column})
    msg = f"the lanes returned unequal values of type {' and '.join(kinds)}: {_listed(column)}; {_LIST_CURE}"
    raise GatherError(msg)


def _same_tensor(column: Sequence[torch.Tensor], originals: Originals) -> torch.Tensor | None:
    """The one tensor that all lanes returned, or returned their copies of: a parameter, say, or a table of the module."""
    last = column[-1]
    if column[0] is last:
        return last if all(leaf is last for leaf in column) else None
    same = originals[-1](last) if originals else None
    if same is None:
        return None
    return same if all(leaf is same or find(leaf) is same for leaf, find in zip(column, originals, strict=True)) else None


def _refuse_without_rows(parts: Sequence[torch.Tensor], sizes: Sequence[int], dim: int) -> None:
    """What has not a row (or as many as every other) for each row of the shard would be joined into something else."""
    each = parts[0].shape[dim] // sizes[0]
    for lane, (part, size) in enumerate(zip(parts, sizes, strict=True)):
        if part.shape[dim] != each * size:
            msg = (
                f"lane {lane} had {size} rows and returned shape {tuple(part.shape)}: dim {dim} does not hold the rows. "
                f"Return the rows there, or {_LIST_CURE}"
            )
            raise GatherError(msg)


def _cat(parts: list[torch.Tensor], dim: int, device: torch.device | None) -> torch.Tensor:
    try:
        if device is not None and any(part.device != device for part in parts) and _are_of_one_form(parts, dim):
            return _written_into_one(parts, dim, device)
        parts = _all_on(parts, device)
        return torch.cat(parts, dim) if len(parts) > 1 else parts[0]
    except (IndexError, RuntimeError) as error:
        raise GatherError(_why_no_cat(parts, dim)) from error


def _all_on(parts: list[torch.Tensor], device: torch.device | None) -> list[torch.Tensor]:
    return parts if device is None else [part.to(device) for part in parts]


def _are_of_one_form(parts: Sequence[torch.Tensor], dim: int) -> bool:
    """Whether the parts can be written into one tensor: nothing but their sizes differs, and no graph is to know of it."""
    first = parts[0]
    return len(parts) > 1 and all(
        type(part) is torch.Tensor
        and not (part.requires_grad and torch.is_grad_enabled())
        and part.is_contiguous()
        and part.dtype == first.dtype
        and part.ndim == first.ndim
        and _other_dims(part, dim) == _other_dims(first, dim)
        for part in parts
    )


def _written_into_one(parts: Sequence[torch.Tensor], dim: int, device: torch.device) -> torch.Tensor:
    """The parts side by side on the device, each copied once, straight to its place."""
    sizes = [part.shape[dim] for part in parts]
    shape = list(parts[0].shape)
    shape[dim] = sum(sizes)
    joined = torch.empty(shape, dtype=parts[0].dtype, device=device)
    for place, part in zip(joined.split(sizes, dim), parts, strict=True):
        place.copy_(part, non_blocking=device.type != "cpu")
    return joined


def _why_no_cat(parts: Sequence[torch.Tensor], dim: int) -> str:
    first = parts[0]
    if len({part.ndim for part in parts}) > 1 or not -first.ndim <= dim < first.ndim:
        return f"the shapes {_shapes(parts)} have no dim {dim} in common; {_LIST_CURE}"
    rest = _other_dims(first, dim)
    odd = next((part for part in parts if _other_dims(part, dim) != rest), None)
    if odd is None:
        return f"torch.cat refused outputs of shape {_shapes(parts)}; {_LIST_CURE}"
    return f"the shapes {tuple(first.shape)} and {tuple(odd.shape)} differ beyond dim {dim}; {_LIST_CURE}"


def _other_dims(tensor: torch.Tensor, dim: int) -> tuple[int, ...]:
    shape = list(tensor.shape)
    del shape[dim]
    return tuple(shape)


def _reduce(parts: Sequence[torch.Tensor], sizes: Sequence[int], reduce: Reduce) -> torch.Tensor:
    """One tensor from the 0-d outputs of the lanes. The mean weighs a shard by its rows, as a mean over rows does."""
    if any(part.ndim for part in parts):
        msg = f"outputs of shape {_shapes(parts)} have no dim in common; {_LIST_CURE}"
        raise GatherError(msg)
    if reduce == "mean":
        if not (parts[0].is_floating_point() or parts[0].is_complex()):
            msg = (
                f"a 0-d {parts[0].dtype} has no mean over lanes (the lanes returned {_listed([p.item() for p in parts])}): "
                'say reduce="sum" for a count, reduce="stack" for one value a lane, or give a function of the vector'
            )
            raise GatherError(msg)
        rows = sum(sizes)
        mean = parts[0] * (sizes[0] / rows)
        for part, size in zip(parts[1:], sizes[1:], strict=True):
            mean = torch.add(mean, part, alpha=size / rows)
        return mean
    stacked = torch.stack(list(parts))
    if reduce == "stack":
        return stacked
    return stacked.sum() if reduce == "sum" else reduce(stacked)


def _moved(output: Any, device: torch.device) -> Any:
    if isinstance(output, torch.Tensor):
        return output if output.device == device else output.to(device)
    leaves, spec = flatten(output)
    return unflatten(spec, [_on_device(leaf.value if isinstance(leaf, Opaque) else leaf, device) for leaf in leaves])


def _on_device(value: Any, device: torch.device | None) -> Any:
    """What lies on a device, on that device (None: where it is)."""
    if device is None or not isinstance(value, (torch.Tensor, PackedSequence)):
        return value
    return cast("Any", value).to(device)


def _same(one: Any, other: Any) -> bool:
    """Equality that takes two NaNs for equal, and what cannot be compared for unequal."""
    if one is other:
        return True
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one) and math.isnan(other):
        return True
    try:
        return type(one) is type(other) and bool(one == other)
    except (RuntimeError, TypeError, ValueError):
        return False


def _refuse_unequal_structures(specs: Sequence[Any]) -> None:
    found = mismatch(specs, _ROOT)
    assert found is not None, "specs that differ have a place where they differ"
    place, shapes = found
    # What reads alike and yet differs: the order of keys, a default factory, two classes of one name.
    lane = next((index for index, shape in enumerate(shapes) if shape != shapes[0]), 1)
    msg = f"{place} differs between lanes: lane 0 returned {shapes[0]}, lane {lane} {shapes[lane]}; {_LIST_CURE}"
    raise GatherError(msg)


def _refuse_ambiguous(spec: TreeSpec, flat: Sequence[Sequence[Any]], sizes: Sequence[int]) -> None:
    """A list without tensors, as long as each lane's shard, may be one item a row: taking one lane's would lose rows."""
    if len(set(sizes)) > 1 or len(sizes) == 1:
        return  # shards of several sizes give lists of several lengths: they differ in structure if they are rows
    for path, node, start in sequences(spec):
        leaves = flat[0][start : start + node.num_leaves]
        if node.num_children != sizes[0] or any(isinstance(leaf, (torch.Tensor, Opaque)) for leaf in leaves):
            continue
        if all(leaf is None for leaf in leaves):
            continue
        if node.type is list or not all(isinstance(leaf, (int, float, bool, complex, type(None))) for leaf in leaves):
            msg = (
                f"{address(_ROOT, path)} is a list of {sizes[0]} items without a tensor in every lane, and each lane has "
                f"{sizes[0]} rows: it may hold one item a row or be one value for all rows. Return a tensor, or "
                f"{_LIST_CURE}"
            )
            raise GatherError(msg)


def _shapes(parts: Sequence[torch.Tensor]) -> str:
    return ", ".join(str(tuple(part.shape)) for part in parts)


def _listed(values: Sequence[Any]) -> str:
    shown = ", ".join(repr(value)[:60] for value in values[:4])
    return shown + (", ..." if len(values) > 4 else "")
