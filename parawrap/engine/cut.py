"""From a call to its shards: take it apart, plan the cut, and scatter it.

A plan depends on the structure of the call, on the classes of leaves, and on their rows; never on values or earlier
calls. It is made once per combination and cached.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count, repeat
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import torch

from parawrap._private_names import version_of
from parawrap.backends import transfer
from parawrap.engine.cut_errors import (
    refuse_attributes,
    refuse_broken_units,
    refuse_dims_out_of_range,
    refuse_disagreement,
    refuse_unclear,
)
from parawrap.engine.flat_call import CALL_ROOTS, EMPTY, OBJECT, FlatCall, extent_of
from parawrap.engine.in_dims import InDim, InDims, Parameters
from parawrap.engine.rules.registry import place_leaf, splitter_of
from parawrap.engine.shard_sizes import Sizes, balanced_sizes, hint_of_sizes
from parawrap.errors import GatherError, ShardError
from parawrap.tree import TreeSpec, WholeLeaf, addresses, flatten, unflatten

T = TypeVar("T")
_TENSOR = frozenset({torch.Tensor})
_COPIES = ("SplitWithSizes", "CloneBackward")  # names of the nodes of autograd that made the parts
_MOST_PLANS = 1024  # for loaders with many sizes; a guess that no test has contradicted

_on_cpu = attrgetter("is_cpu")
_shape_of = attrgetter("shape")
_attributes_of = attrgetter("__dict__")
_split_copies: Callable[..., Sequence[torch.Tensor]] = torch.split_with_sizes_copy  # type: ignore[assignment]


# A call, its plan, and its shards


class Shard(NamedTuple):
    """One lane's part of a call. `origins` maps the id of each copy in it to the caller's value that it is a copy of."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rows: int
    leaves: Sequence[Any] = ()
    origins: dict[int, Any] = {}  # noqa: RUF012


class ShardPlan:
    """How the calls of one structure are cut: each leaf's dim (None: whole to every lane) and the sizes of the shards.

    `hint` is a warning if an option would cut the call better. Immutable; shared by every call of the structure and by
    every thread.
    """

    def __init__(
        self,
        spec: TreeSpec,
        leaves: Sequence[Any],
        dims: tuple[int | None, ...],
        sizes: tuple[int, ...],
        hint: str | None = None,
    ) -> None:
        self.spec = spec
        self.dims = dims
        self.sizes = sizes
        self.hint = hint
        self.rows = sum(sizes)
        tensors = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self.whole_tensors = [index for index in tensors if dims[index] is None]
        self.cut_tensors = [index for index in tensors if dims[index] is not None and len(sizes) > 1]

    def describe(self, shard: int) -> str:
        """Return the rows of a shard, for the note of an error."""
        return f"{self.sizes[shard]} of {self.rows} rows"

    def columns(self, flat: FlatCall, copy: bool) -> list[Sequence[Any]]:
        """Return the parts of each leaf, one per size, and the same object if a leaf stays whole.

        With `copy`, parts of tensors are copies, so that a lane may write into its part while autograd records: torch
        refuses such writes to one of several views. `write_back` brings them to the argument. Without, parts are views.
        """
        if len(set(map(id, flat.leaves))) == len(flat.leaves):
            return [*map(self._split, count(), flat.leaves, repeat(copy))]
        parts: dict[tuple[int, int | None], Sequence[Any]] = {}  # one object at two places stays one object in each lane
        for index, (leaf, dim) in enumerate(zip(flat.leaves, self.dims, strict=True)):
            if (id(leaf), dim) not in parts:
                parts[id(leaf), dim] = self._split(index, leaf, copy)
        return [parts[id(leaf), dim] for leaf, dim in zip(flat.leaves, self.dims, strict=True)]

    def write_back(self, flat: FlatCall, columns: Sequence[Sequence[Any]]) -> None:
        """Write what lanes wrote into their copies of rows into the arguments, as the plain call would have done.

        `columns` are the parts that ``columns(flat, copy=True)`` returned. Their versions were 0 then. Autograd records the
        write if it recorded one of the lanes' writes.
        """
        for index in {id(columns[index]): index for index in self.cut_tensors}.values():  # one object has one list of parts
            argument, parts = flat.leaves[index], columns[index]
            if not argument.is_inference() and any(map(version_of, parts)):
                nodes = [part.grad_fn for part in parts if part.grad_fn is not None]
                is_recorded = any(not node.name().startswith(_COPIES) for node in nodes)
                with torch.set_grad_enabled(is_recorded):
                    argument.copy_(torch.cat(list(parts), self.dims[index] or 0))

    def whole(self, flat: FlatCall) -> list[Any]:
        """Return the leaves that every lane gets whole."""
        return [leaf for leaf, dim in zip(flat.leaves, self.dims, strict=True) if dim is None]

    def written(self, flat: FlatCall) -> list[int]:
        """Return the version of each tensor that every lane gets whole; a write in place changes it.

        Inference tensors have no version.
        """
        tensors = [flat.leaves[index] for index in self.whole_tensors]
        return [version_of(tensor) for tensor in tensors if not tensor.is_inference()]

    def place(self, flat: FlatCall, columns: Sequence[Sequence[Any]], index: int, device: torch.device) -> Shard:
        """Return a shard of these columns on a device. Parts from elsewhere are copied on the thread's streams."""
        parts = [column[index] for column in columns]
        here: dict[int, Any] = {}  # one object at two places stays one object
        for part in parts:
            if id(part) not in here:
                here[id(part)] = _move(part, device)
        leaves = [here[id(part)] for part in parts]
        origins: dict[int, Any] = {}  # of copies of tensors that were not cut, and of parts of values with registered rules
        for placed, whole, dim in zip(leaves, flat.leaves, self.dims, strict=True):
            if isinstance(whole, WholeLeaf):
                origins[id(placed)] = whole.value
            elif dim is None and isinstance(whole, torch.Tensor) and placed is not whole:
                origins[id(placed)] = whole
        args, kwargs = unflatten(flat.spec, leaves)
        return Shard(args, kwargs, self.sizes[index], leaves, origins)

    def scatter(self, flat: FlatCall, devices: Sequence[torch.device]) -> list[Shard]:
        """Return one shard per size, each on its device; `devices` has one entry per shard."""
        columns = self.columns(flat, copy=False)
        return [self.place(flat, columns, index, device) for index, device in enumerate(devices)]

    def update(self, flat: FlatCall, shards: Sequence[Shard]) -> None:
        """Put what the lanes did to their parts of a cache into the cache that the caller passed."""
        for index, leaf in enumerate(flat.leaves):
            update = splitter_of(leaf.value).update if isinstance(leaf, WholeLeaf) else None
            if update is None:
                continue
            parts = [shard.leaves[index] for shard in shards]
            try:
                joined = splitter_of(leaf.value).join(parts) if len(parts) > 1 else parts[0]
            except GatherError as error:
                msg = (
                    f"{addresses(self.spec, CALL_ROOTS)[index]} was changed differently by the lanes: {error}. Make every "
                    "lane add the same length, or leave the argument out, so that each lane makes its own"
                )
                raise GatherError(msg) from error
            if joined is not leaf.value:
                update(leaf.value, joined)

    def _split(self, index: int, leaf: Any, copy: bool) -> Sequence[Any]:
        """Return the parts of one leaf."""
        dim = self.dims[index]
        if dim is None or len(self.sizes) == 1:
            return (leaf,) * len(self.sizes)
        if isinstance(leaf, torch.Tensor):
            copy = copy and not leaf.is_inference()
            try:
                if copy and leaf.is_contiguous():
                    return _split_copies(leaf, self.sizes, dim)
                views: Sequence[torch.Tensor] = leaf.split_with_sizes(self.sizes, dim)
                return [view.clone() for view in views] if copy else views  # in their memory format
            except (RuntimeError, NotImplementedError) as error:
                if leaf.layout is torch.strided and not leaf.is_nested:
                    raise
                kind = "nested tensor" if leaf.is_nested else f"tensor of layout {leaf.layout}"
                msg = (
                    f"{addresses(self.spec, CALL_ROOTS)[index]} is a {kind}, which torch cannot split. Pass a dense tensor "
                    "to cut it. A parallel block whose in_dims has None for its parameter gives it whole to every lane"
                )
                raise ShardError(msg) from error
        parts = splitter_of(leaf.value).split(leaf.value, self.sizes)
        if len(parts) != len(self.sizes):
            name = type(leaf.value).__name__
            msg = f"the split of {name} returned {len(parts)} parts for {len(self.sizes)} sizes, {list(self.sizes)}"
            raise ShardError(msg)
        return [WholeLeaf(part) for part in parts]


def _move(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, torch.Tensor):
        return transfer(leaf, device)
    return place_leaf(leaf, device) if isinstance(leaf, WholeLeaf) else leaf


class Cutter:
    """Plans the calls of one method of a target. Safe to share between threads: at worst a plan is made twice.

    `sizes` gives the sizes of the shards, in units of `unit` rows; with `warns`, plans with a large shard have a hint. With
    `lists_are_shared`, the rules are those of torch.nn.DataParallel: every lane gets the same list or object.
    """

    def __init__(
        self,
        dim: int = 0,
        in_dims: Mapping[str, InDim] | None = None,
        parameters: Parameters | None = None,
        *,
        lists_are_shared: bool = False,
        sizes: Sizes = balanced_sizes,
        unit: int = 1,
        warns: bool = False,
    ) -> None:
        option = "a parallel block with in_dims" if lists_are_shared else "in_dims"
        self._declarations = InDims(dim, in_dims or {}, parameters, option)
        self.dim = dim
        self.in_dims = self._declarations.in_dims
        self.lists_are_shared = lists_are_shared
        self.sizes = sizes
        self.unit = unit
        self._warns = warns
        self._dims: dict[TreeSpec, tuple[int | None, ...]] = {}  # of each leaf
        self._plans: dict[tuple[Any, ...], ShardPlan] = {}

    def plan_of_tensors(self, args: tuple[Any, ...], lanes: int) -> ShardPlan | None:
        """Return the plan of a call of positional plain tensors on the CPU; None for any other call."""
        if not args or self.in_dims or not _TENSOR.issuperset(map(type, args)) or not all(map(_on_cpu, args)):
            return None
        if any(map(_attributes_of, args)):
            return None
        try:
            shapes = lanes, tuple(map(_shape_of, args))
        except RuntimeError:  # a nested tensor
            return None
        return self._plans.get(shapes) or _keep(self._plans, shapes, self.plan(self.flatten(args, {}), lanes))

    def flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatCall:
        """Take a call apart."""
        if self.in_dims:
            args, kwargs = self._declarations.mark_items(args, kwargs)
        leaves, spec = flatten((args, kwargs))
        return FlatCall(leaves, spec, tuple(map(extent_of, leaves, self._dims_of(spec))))

    def plan(self, flat: FlatCall, lanes: int) -> ShardPlan:
        """Return the plan for a call.

        Raises:
            ShardError: If row counts disagree, an argument may or may not have one item per row, a dim is out of range, or
                the batch is not a multiple of `unit`.
        """
        key = flat.spec, flat.extents, tuple(map(type, flat.leaves)), lanes
        plan = self._plans.get(key)
        if plan is None:
            plan = self._make(flat, self._dims_of(flat.spec), lanes)
            if OBJECT not in flat.extents:  # an object of another class may be refused
                _keep(self._plans, key, plan)
        if not self.lists_are_shared and any(flat.leaves[index].__dict__ for index in plan.cut_tensors):
            refuse_attributes(self._declarations, flat, plan.cut_tensors)
        return plan

    def whole(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[ShardPlan, FlatCall]:
        """Return the plan that gives this call uncut to one lane, and the call taken apart. Rows may disagree."""
        leaves, spec = flatten((args, kwargs))
        extents = map(extent_of, leaves, self._dims_of(spec))
        rows = next((extent for extent in extents if extent >= 0), 0)
        return ShardPlan(spec, leaves, (None,) * len(leaves), (rows,)), FlatCall(leaves, spec)

    def rows(self, args: tuple[Any, ...]) -> int:
        """Return the row count of a call of tensors: that of the first with rows."""
        extents = (extent_of(leaf, self._declarations.dim_at((0, index))) for index, leaf in enumerate(args))
        return next((extent for extent in extents if extent >= 0), 0)

    def _make(self, flat: FlatCall, dims: tuple[int | None, ...], lanes: int) -> ShardPlan:
        spec, leaves, extents = flat.spec, flat.leaves, flat.extents
        refuse_dims_out_of_range(self._declarations, flat, dims)
        counts = {extent for extent in extents if extent >= 0}
        if len(counts) > 1:
            counts.discard(1)  # one row next to more is the same for every row, as in torch's broadcasting
        if len(counts) > 1:
            refuse_disagreement(self._declarations, flat, dims)
        rows = next(iter(counts), None)
        is_cut = rows is not None and rows > 1 and lanes > 1
        refuse_unclear(self._declarations, flat, rows, is_cut=is_cut, is_strict=is_cut and not self.lists_are_shared)
        if rows is None:
            return ShardPlan(spec, leaves, (None,) * len(leaves), (0,))
        if rows % self.unit:
            refuse_broken_units(flat, rows, self.unit)
        sizes = tuple(self.unit * units for units in self.sizes(rows // self.unit, lanes))
        cut_extents = (rows, EMPTY) if rows != 1 else ()
        cut = tuple(dim if extent in cut_extents else None for dim, extent in zip(dims, extents, strict=True))
        largest = self.unit * balanced_sizes(rows // self.unit, lanes)[0]
        hint = hint_of_sizes(sizes, largest, lanes, self.dim) if self._warns else None
        return ShardPlan(spec, leaves, cut, sizes, hint)

    def _dims_of(self, spec: TreeSpec) -> tuple[int | None, ...]:
        """Return the dim of each leaf of the calls of one structure."""
        if not self.in_dims:
            return (self.dim,) * spec.num_leaves
        return self._dims.get(spec) or _keep(self._dims, spec, tuple(map(self._declarations.dim_at, spec.paths())))


def _keep(cache: dict[Any, T], key: Any, value: T) -> T:
    """Add an entry to a cache of limited size."""
    if len(cache) >= _MOST_PLANS:
        cache.clear()
    cache[key] = value
    return value
