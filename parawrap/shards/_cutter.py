"""From a call to the plan that cuts it.

The plan depends on the structure of the call, on which leaves are tensors and on their rows, never on values; it is
made once for each such combination and kept. Where shards are to have equal sizes it depends on the calls before it too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from parawrap.errors import ShardError
from parawrap.shards._parameters import Parameters
from parawrap.shards._plan import CALL_ROOTS, FlatCall, ShardPlan, balanced, equal
from parawrap.shards._split import splitter_of
from parawrap.tree import Opaque, TreeSpec, address, addresses, flatten, flatten_call, replace_nodes, sequences

__all__ = ["Cutter", "Sizes"]

Sizes = Callable[[int, int], tuple[int, ...]]
_MOST_PLANS = 1024
_WHOLE = 0  # in the place of the number of lanes: a call that is not cut
# What `_extent` says of a leaf without rows.
_BROADCAST = -1
_NUMBER = -2  # or what else a size, a stride or an option is made of
_BEYOND = -3  # a tensor that has dims, and not the one that rows lie on
_FOREIGN = -100  # and below, by its length: an array of another library
_OBJECT = -4  # anything else: a string, say
_NUMBERS = (int, float, bool, complex, torch.dtype, torch.device)


class _Layout(NamedTuple):
    """What is known of the calls of one structure: the dim that each leaf's rows lie on, if it has rows; and the plans.

    `full` has, by the number of lanes, how many rows a shard has had at most.
    """

    dims: tuple[int | None, ...]
    plans: dict[tuple[tuple[int, ...], int], ShardPlan]
    full: dict[int, int]


class Cutter:
    """Plans the calls of one target. Safe to share between threads: at worst a plan is made twice.

    With `equal_sizes` the shards of a call are as large as those of the calls before it, and the last has what remains: a
    short last batch brings one size that is new, and not one for every lane. A call of a row count that was met before is
    cut as it was then. Otherwise `sizes` says, from rows and lanes, what the shards' sizes are.
    """

    def __init__(
        self,
        dim: int = 0,
        in_dims: Mapping[str, int | None] | None = None,
        parameters: Parameters | None = None,
        *,
        lists_are_shared: bool = False,
        equal_sizes: bool = False,
        sizes: Sizes = balanced,
    ) -> None:
        self.dim = dim
        self.in_dims = dict(in_dims or {})
        self.parameters = parameters
        self.lists_are_shared = lists_are_shared
        self.equal_sizes = equal_sizes
        self.sizes = sizes
        self._sizing = threading.Lock()
        self._layouts: dict[TreeSpec, _Layout] = {}

    def plan(self, args: tuple[Any, ...], kwargs: dict[str, Any], lanes: int) -> tuple[ShardPlan, FlatCall]:
        """The plan for this call, and the call taken apart, which the plan scatters.

        Raises:
            ShardError: rows that disagree, a list that may or may not be meant row by row, a dim out of range.
        """
        if self.in_dims:
            args, kwargs = self._with_whole_sequences(args, kwargs)
        leaves, spec = flatten_call(args, kwargs)
        dims, plans, _ = self._layout(spec)
        extents = tuple([_extent(leaf, dim) for leaf, dim in zip(leaves, dims, strict=True)])
        plan = plans.get((extents, lanes))
        if plan is None:
            plan = _kept(plans, (extents, lanes), self._make(spec, leaves, dims, extents, lanes))
        return plan, FlatCall(leaves, spec)

    def whole(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[ShardPlan, FlatCall]:
        """The plan that hands this call uncut to one lane, and the call taken apart. Rows may disagree there."""
        leaves, spec = flatten_call(args, kwargs)
        dims, plans, _ = self._layout(spec)
        rows = next((e for leaf, dim in zip(leaves, dims, strict=True) if (e := _extent(leaf, dim)) >= 0), 0)
        plan = plans.get(((rows,), _WHOLE))
        if plan is None:
            plan = _kept(plans, ((rows,), _WHOLE), ShardPlan(spec, (None,) * len(leaves), (rows,)))
        return plan, FlatCall(leaves, spec)

    def rows(self, args: Sequence[torch.Tensor]) -> int:
        """The rows of a call of these tensors, given by position: of the first that has any."""
        for index, leaf in enumerate(args):  # as it is asked for each batch that is mapped, with nothing made on the way
            dim = self.in_dims.get(self._name_at((0, index)) or "", self.dim) if self.in_dims else self.dim
            extent = _extent(leaf, dim)
            if extent >= 0:
                return extent
        return 0

    def _make(
        self, spec: TreeSpec, leaves: Sequence[Any], dims: Sequence[int | None], extents: Sequence[int], lanes: int
    ) -> ShardPlan:
        rows = self._rows(spec, leaves, dims, extents)
        if rows is None:
            return ShardPlan(spec, (None,) * len(leaves), (0,))
        sizes = self._equal(spec, rows, lanes) if self.equal_sizes else self.sizes(rows, lanes)
        if len(sizes) > 1 and not self.lists_are_shared:
            self._refuse_ambiguous(spec, extents, rows)
        cut = tuple(dim if extent == rows and rows != 1 else None for dim, extent in zip(dims, extents, strict=True))
        return ShardPlan(spec, cut, sizes)

    def _equal(self, spec: TreeSpec, rows: int, lanes: int) -> tuple[int, ...]:
        full = self._layout(spec).full
        with self._sizing:
            sizes = equal(rows, lanes, full.get(lanes, 0))
            full[lanes] = max(sizes[0], full.get(lanes, 0))
        return sizes

    def _rows(
        self, spec: TreeSpec, leaves: Sequence[Any], dims: Sequence[int | None], extents: Sequence[int]
    ) -> int | None:
        """The rows that the split leaves agree on; None when nothing in the call has rows."""
        self._refuse_dims_out_of_range(spec, leaves, dims, extents)
        found = {extent: index for index, extent in reversed(list(enumerate(extents))) if extent >= 0}
        if len(found) > 1:
            found.pop(1, None)  # one row beside more: the same for every row, as in torch's broadcasting
        if len(found) > 1:
            (rows, first), (other_rows, other) = sorted(found.items(), key=lambda item: item[1])[:2]
            where = addresses(spec, CALL_ROOTS)
            name = self._name(spec, other) or "its name"
            msg = (
                f"the rows of the call disagree: {where[other]} has {other_rows} on dim {dims[other]}, "
                f"{where[first]} has {rows} on dim {dims[first]}. If {where[other]} is not cut with the batch, "
                f'say in_dims={{"{name}": None}}; if its rows lie on another dim, name that dim there'
            )
            raise ShardError(msg)
        return next(iter(found), None)

    def _refuse_dims_out_of_range(
        self, spec: TreeSpec, leaves: Sequence[Any], dims: Sequence[int | None], extents: Sequence[int]
    ) -> None:
        beyond = [i for i, extent in enumerate(extents) if extent == _BEYOND]
        told = [i for i in beyond if self._name(spec, i) in self.in_dims]
        nothing_has_it = all(extent < 0 for extent in extents)
        wrong = told or (beyond if nothing_has_it else [])
        if wrong:
            where = addresses(spec, CALL_ROOTS)[wrong[0]]
            shape = tuple(leaves[wrong[0]].shape)
            msg = f"dim {dims[wrong[0]]} is out of range for {where}, of shape {shape}: it has {len(shape)} dimensions"
            raise ShardError(msg)

    def _refuse_ambiguous(self, spec: TreeSpec, extents: Sequence[int], rows: int) -> None:
        """A list without tensors, as long as the batch, may be one item a row or one value for all rows.

        So may a tuple; one of numbers alone is taken for a size or a stride, and what holds only None for nothing.
        """
        foreign = [index for index, extent in enumerate(extents) if extent == _FOREIGN - rows]
        if foreign:
            where, name = addresses(spec, CALL_ROOTS)[foreign[0]], self._name(spec, foreign[0])
            msg = (
                f"{where} is no torch tensor and has {rows} rows, as the batch has: it would go whole to every lane. Give "
                f'torch.from_numpy(...) of it to have it cut, or say in_dims={{"{name or "its name"}": None}}'
            )
            raise ShardError(msg)
        for path, node, start in sequences(spec):
            kinds = extents[start : start + node.num_leaves]
            doubtful = min(kinds, default=0) <= _OBJECT or (node.type is list and _NUMBER in kinds)
            if not doubtful or len(path) < 2 or node.num_children != rows or any(kind >= 0 for kind in kinds):
                continue
            name = self._name_at(path)
            if name in self.in_dims:
                continue
            where = address(CALL_ROOTS[path[0]], path[1:])
            kind = "list" if node.type is list else "tuple"
            named = name or "its name"
            msg = (
                f"{where} is a {kind} of {rows} items without a tensor, and the batch has {rows} rows: it may hold one "
                f'item a row or be one value for all rows. Say which: in_dims={{"{named}": 0}} cuts it, '
                f'in_dims={{"{named}": None}} hands it whole to every lane'
            )
            raise ShardError(msg)

    def _layout(self, spec: TreeSpec) -> _Layout:
        layout = self._layouts.get(spec)
        if layout is None:
            if len(self._layouts) >= _MOST_PLANS:
                self._layouts.clear()
            names = [self._name(spec, leaf) for leaf in range(spec.num_leaves)] if self.in_dims else []
            dims = tuple(self.in_dims.get(name, self.dim) if name else self.dim for name in names)
            layout = self._layouts[spec] = _Layout(dims or (self.dim,) * spec.num_leaves, {}, {})
        return layout

    def _name(self, spec: TreeSpec, leaf: int) -> str | None:
        return self._name_at(spec.paths()[leaf])

    def _name_at(self, path: Sequence[Any]) -> str | None:
        """The parameter that a path into (args, kwargs) belongs to."""
        if path[0] == 1:
            return str(path[1])
        return self.parameters.at(path[1]) if self.parameters is not None else None

    def _with_whole_sequences(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call with each plain sequence that `in_dims` has cut turned into one leaf."""
        whole = tuple(self._whole(self._name_at((0, index)), value) for index, value in enumerate(args))
        return whole, {name: self._whole(name, value) for name, value in kwargs.items()}

    def _whole(self, name: str | None, value: Any) -> Any:
        if name is None or self.in_dims.get(name) is None:
            return value
        if isinstance(value, (list, tuple)) and not _holds_tensor(value):
            return Opaque(value)  # told by name: also a tuple of numbers
        return replace_nodes(value, _may_be_one_item_a_row, Opaque)


def _holds_tensor(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in flatten(value)[0])


def _may_be_one_item_a_row(node: Any) -> bool:
    """A list without tensors, or a tuple that holds more than numbers and no tensors."""
    if type(node) is list:
        return bool(node) and not _holds_tensor(node)
    return type(node) is tuple and not _holds_tensor(node) and not all(isinstance(item, _NUMBERS) for item in node)


def _extent(leaf: Any, dim: int | None) -> int:
    """The rows of a leaf on `dim`, or what kind of leaf without rows it is."""
    if isinstance(leaf, torch.Tensor):
        if dim is not None and -leaf.ndim <= dim < leaf.ndim:
            return leaf.shape[dim]
        return _BEYOND if leaf.ndim and dim is not None else _BROADCAST
    if isinstance(leaf, Opaque):
        return splitter_of(leaf.value).rows(leaf.value) if dim is not None else _BROADCAST
    if leaf is None:
        return _BROADCAST
    if isinstance(leaf, _NUMBERS):
        return _NUMBER
    shape = getattr(leaf, "shape", ())  # of an array of another library
    return _FOREIGN - shape[0] if isinstance(shape, tuple) and shape and isinstance(shape[0], int) else _OBJECT


def _kept(plans: dict[Any, ShardPlan], key: Any, plan: ShardPlan) -> ShardPlan:
    """The plan, which is among these from now on."""
    if len(plans) >= _MOST_PLANS:
        plans.clear()
    plans[key] = plan
    return plan
