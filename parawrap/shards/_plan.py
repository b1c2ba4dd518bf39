"""The plan by which the calls of one structure are cut, and the shards that it gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch.autograd import forward_ad

from parawrap.backends import bring, record_use
from parawrap.errors import ShardError
from parawrap.shards._split import splitter_of
from parawrap.tree import Opaque, TreeSpec, addresses, unflatten

__all__ = ["CALL_ROOTS", "FlatCall", "Piece", "Shard", "ShardPlan", "balanced", "equal", "in_proportion", "in_units"]

_TENSOR = frozenset({torch.Tensor})
CALL_ROOTS = ("args", "kwargs")
"""How the addresses of a call's leaves begin."""


def balanced(rows: int, parts: int) -> tuple[int, ...]:
    """Sizes that add up to `rows` and differ by at most one, the larger first; none of them is zero.

    >>> balanced(10, 4), balanced(2, 4), balanced(0, 4)
    ((3, 3, 2, 2), (1, 1), (0,))
    """
    if rows <= parts:
        return (1,) * rows or (0,)
    size, larger = divmod(rows, parts)
    return (size + 1,) * larger + (size,) * (parts - larger)


def equal(rows: int, parts: int, size: int = 0) -> tuple[int, ...]:
    """Sizes that add up to `rows`: each of them `size`, or more where that is too few rows, and the last what remains.

    For devices on which every new size costs a compilation: `size` is what the parts of earlier calls had. Then a call of
    other rows brings at most one size that is new, unless it brings more rows than ever.

    >>> equal(10, 4), equal(7, 4, 3), equal(2, 4, 3), equal(16, 4, 3), equal(0, 4, 3)
    ((3, 3, 3, 1), (3, 3, 1), (2,), (4, 4, 4, 4), (0,))
    """
    size = max(size, -(-rows // parts))
    if rows <= size:
        return (rows,)
    full, rest = divmod(rows, size)
    return (size,) * full + ((rest,) if rest else ())


def in_units(rows: int, parts: int, unit: int) -> tuple[int, ...]:
    """Sizes that add up to `rows`, multiples of `unit` but for the last, as balanced as units allow.

    None is zero, unless `rows` is.

    For what computes `unit` rows at a time, however few of them it is given.

    >>> in_units(10, 4, 2), in_units(7, 2, 2), in_units(1, 4, 8), in_units(0, 4, 2)
    ((4, 2, 2, 2), (4, 3), (1,), (0,))
    """
    units = -(-rows // unit)
    *full, last = (unit * count for count in balanced(units, parts))
    return (*full, last - (units * unit - rows))


def in_proportion(rows: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Sizes that add up to `rows` and are to each other as the weights, rounded; none is zero while there are rows for all.

    >>> in_proportion(10, (3, 1)), in_proportion(3, (98, 1, 1)), in_proportion(2, (1, 1, 1))
    ((8, 2), (1, 1, 1), (1, 1))
    """
    if rows <= len(weights):
        return balanced(rows, len(weights))
    ends = [round(rows * sum(weights[: lane + 1]) / sum(weights)) for lane in range(len(weights))]
    sizes = [end - start for start, end in zip((0, *ends), ends, strict=False)]
    while min(sizes) == 0:
        sizes[sizes.index(0)] += 1
        sizes[sizes.index(max(sizes))] -= 1
    return tuple(sizes)


class FlatCall(NamedTuple):
    """One call taken apart. Its structure is equal to its plan's, and carries this call's own attributes of containers."""

    leaves: Sequence[Any]
    spec: TreeSpec


class Shard(NamedTuple):
    """The part of a call that goes to one lane, and how many of the call's rows it holds."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rows: int
    copies: dict[int, torch.Tensor] = {}  # noqa: RUF012  # by id, what was copied whole to the lane's device, and of what


class Piece(NamedTuple):
    """What is to be a shard, still where the call has it: views, and the leaves that every lane gets whole."""

    spec: TreeSpec
    leaves: Sequence[Any]
    dims: Sequence[int | None]
    rows: int

    def on(self, device: torch.device) -> Shard:
        """The shard, on that device: views where the rows lie there already, copies by the thread's streams elsewhere."""
        placed = [_on_device(leaf, device) for leaf in self.leaves]
        args, kwargs = unflatten(self.spec, placed)
        shard = Shard(args, kwargs, self.rows)
        return shard if device.type == "cpu" else shard._replace(copies=self._copied_whole(placed))

    def _copied_whole(self, placed: Sequence[Any]) -> dict[int, torch.Tensor]:
        return {
            id(here): leaf
            for leaf, here, dim in zip(self.leaves, placed, self.dims, strict=True)
            if dim is None and isinstance(leaf, torch.Tensor) and here is not leaf
        }


@dataclass(frozen=True, eq=False)
class ShardPlan:
    """How the calls of one structure are cut: the dim of each leaf (None: it goes whole to every lane), and the rows.

    Immutable, and equal only to itself; shared by every call of the structure and by every thread.
    """

    spec: TreeSpec
    dims: tuple[int | None, ...]
    sizes: tuple[int, ...]

    @property
    def rows(self) -> int:
        return sum(self.sizes)

    def resized(self, sizes: tuple[int, ...]) -> ShardPlan:
        """The plan that cuts the same calls into shards of other sizes; of a plan that cuts."""
        return ShardPlan(self.spec, self.dims, sizes)

    def uncut(self) -> ShardPlan:
        """The plan that hands the same calls whole to one lane."""
        return ShardPlan(self.spec, (None,) * len(self.dims), (self.rows,))

    def scatter(self, flat: FlatCall, devices: Sequence[torch.device]) -> list[Shard]:
        """One shard a size, on its device: views where the rows lie there already, copies elsewhere."""
        devices = devices[: len(self.sizes)]
        if all(device.type == "cpu" for device in devices) and _TENSOR.issuperset(map(type, flat.leaves)):
            return self._views(flat, devices[0])
        return [piece.on(device) for piece, device in zip(self.cut(flat), devices, strict=True)]

    def _views(self, flat: FlatCall, cpu: torch.device) -> list[Shard]:
        """The short way for the commonest call there is on the CPU: one of a few tensors."""
        columns = [self._parts(index, bring(leaf, cpu)) for index, leaf in enumerate(flat.leaves)]
        calls = [unflatten(flat.spec, [column[lane] for column in columns]) for lane in range(len(self.sizes))]
        return [Shard(args, kwargs, size) for (args, kwargs), size in zip(calls, self.sizes, strict=True)]

    def cut(self, flat: FlatCall) -> list[Piece]:
        """One piece a size."""
        columns = [self._parts(index, leaf) for index, leaf in enumerate(flat.leaves)]
        return [
            Piece(flat.spec, [column[lane] for column in columns], self.dims, size) for lane, size in enumerate(self.sizes)
        ]

    def _why_uncut(self, index: int, leaf: torch.Tensor) -> str:
        return (
            f"{addresses(self.spec, CALL_ROOTS)[index]} of shape {tuple(leaf.shape)} and layout {leaf.layout} cannot be "
            "split by torch: in_dims with None for its parameter hands it whole to every lane"
        )

    def _parts(self, index: int, leaf: Any) -> Sequence[Any]:
        dim = self.dims[index]
        if dim is None or len(self.sizes) == 1:
            return (leaf,) * len(self.sizes)
        if isinstance(leaf, torch.Tensor):
            try:
                return _views(leaf, self.sizes, dim)
            except (RuntimeError, NotImplementedError) as error:  # of a sparse or jagged layout
                raise ShardError(self._why_uncut(index, leaf)) from error
        parts = splitter_of(leaf.value).split(leaf.value, self.sizes)
        if len(parts) != len(self.sizes):
            name = type(leaf.value).__name__
            msg = f"the split of {name} returned {len(parts)} parts for {len(self.sizes)} sizes, {list(self.sizes)}"
            raise ShardError(msg)
        return [Opaque(part) for part in parts]


def _views(tensor: torch.Tensor, sizes: tuple[int, ...], dim: int) -> Sequence[torch.Tensor]:
    """The rows of each lane, in the tensor's own memory.

    torch refuses to let one of several views be written in place by an operation that has a graph. Where the tensor has
    none, and a lane may therefore write into its rows (``x += self.bias``), each view is cut loose from the others.
    """
    parts = tensor.split_with_sizes(sizes, dim)
    if torch.is_grad_enabled() and not tensor.requires_grad and forward_ad._current_level < 0:
        return [part.detach() for part in parts]
    return parts


def _on_device(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, torch.Tensor):
        return bring(leaf, device)
    if isinstance(leaf, Opaque):
        if not isinstance(leaf.value, torch.nn.utils.rnn.PackedSequence):
            return leaf.value
        record_use([leaf])
        return cast("Any", leaf.value).to(device)
    return leaf
