"""From a call to its shards: take it apart, plan the cut, and scatter it.

A plan depends on the structure of the call, on the classes of leaves, and on their rows; never on values or earlier
calls. It is made once per combination and cached.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import torch

from parawrap.backends import transfer
from parawrap.errors import GatherError, ShardError
from parawrap.shards._cut_errors import (
    CALL_ROOTS,
    hint_of_items,
    hint_of_sizes,
    refuse_ambiguous,
    refuse_broken_units,
    refuse_dims_out_of_range,
    refuse_disagreement,
    refuse_unknown,
)
from parawrap.shards._extent import EMPTY, NESTED, NUMBERS, OBJECT, extent_of, has_items
from parawrap.shards._join_rules import UNDECLARED, as_tree
from parawrap.shards._private_names import version_of
from parawrap.shards._register_split import place_leaf, splitter_of
from parawrap.shards._shard_sizes import Sizes, balanced_sizes, uneven_sizes
from parawrap.tree import (
    TreeSpec,
    WholeLeaf,
    address,
    addresses,
    flatten,
    flatten_call,
    named_children,
    replace_nodes,
    unflatten,
    with_children,
)

__all__ = ["Cutter", "FlatCall", "InDim", "Parameters", "Piece", "Shard", "ShardPlan"]


class Fields(Protocol):
    """A dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


InDim = int | Literal["items"] | None | Mapping[Any, Any] | tuple[Any, ...] | list[Any] | Fields
"""Where the rows of an argument lie: a dim, "items" (one item per row), or None (every lane gets the argument whole). A
dict, tuple, or dataclass of these declares the parts of an argument."""

_MOST_PLANS = 1024  # for loaders with many sizes; a guess that no test has contradicted
_MOST_NAMED = 4  # arguments, in the note of an error
_TENSOR = frozenset({torch.Tensor})
_on_cpu = attrgetter("is_cpu")
_shape_of = attrgetter("shape")


class FlatCall(NamedTuple):
    """One call taken apart: its leaves, its structure, and each leaf's extent, which is its row count or says its kind.

    `on_cpu` is True for a call of positional tensors on the CPU, and nothing else.
    """

    leaves: Sequence[Any]
    spec: TreeSpec
    extents: tuple[int, ...] = ()
    on_cpu: bool = False


class Shard(NamedTuple):
    """One lane's part of a call. `origins` maps the id of each copy in it to the caller's value that it is a copy of."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rows: int
    leaves: Sequence[Any] = ()
    origins: dict[int, Any] = {}  # noqa: RUF012


class Piece(NamedTuple):
    """A shard that still lies where the caller has it: views, and the leaves that every lane gets whole."""

    spec: TreeSpec
    leaves: Sequence[Any]
    whole: Sequence[Any]
    dims: Sequence[int | None]
    rows: int

    def on(self, device: torch.device) -> Shard:
        """Return the shard on a device: views of rows that lie there already, copies of others on the thread's streams."""
        here: dict[int, Any] = {}  # one object at two places stays one object
        for leaf in self.leaves:
            if id(leaf) not in here:
                here[id(leaf)] = _on_device(leaf, device)
        leaves = [here[id(leaf)] for leaf in self.leaves]
        args, kwargs = unflatten(self.spec, leaves)
        return Shard(args, kwargs, self.rows, leaves, self._origins(leaves))

    def _origins(self, leaves: Sequence[Any]) -> dict[int, Any]:
        """Copies of tensors that were not cut, and parts of values with registered rules."""
        origins: dict[int, Any] = {}
        for here, whole, dim in zip(leaves, self.whole, self.dims, strict=True):
            if isinstance(whole, WholeLeaf):
                origins[id(here)] = whole.value
            elif dim is None and isinstance(whole, torch.Tensor) and here is not whole:
                origins[id(here)] = whole
        return origins


@dataclass(frozen=True, eq=False)
class ShardPlan:
    """How the calls of one structure are cut: each leaf's dim (None: whole to every lane) and the sizes of the shards.

    `hint` is a warning if an option would cut the call better. Immutable; shared by every call of the structure and by
    every thread.
    """

    spec: TreeSpec
    dims: tuple[int | None, ...]
    sizes: tuple[int, ...]
    hint: str | None = None

    @property
    def rows(self) -> int:
        return sum(self.sizes)

    def describe(self, shard: int) -> str:
        """Return the rows of a shard, and the arguments that every lane gets whole, for the note of an error."""
        cut = {path[:2] for path, dim in zip(self.spec.paths(), self.dims, strict=True) if dim is not None}
        paths = dict.fromkeys(path[:2] for path in self.spec.paths() if path[:2] not in cut)
        whole = [address(CALL_ROOTS[root], [name]) for root, name in paths]
        more = ", ..." if len(whole) > _MOST_NAMED else ""
        also = f". Every lane got {', '.join(whole[:_MOST_NAMED])}{more} whole" if whole else ""
        return f"{self.sizes[shard]} of {self.rows} rows{also}"

    def scatter(self, flat: FlatCall, devices: Sequence[torch.device]) -> list[Shard]:
        """Return one shard per size, each on its device; `devices` has one entry per shard."""
        return [piece.on(device) for piece, device in zip(self.cut(flat), devices, strict=True)]

    def columns(self, flat: FlatCall) -> list[Sequence[Any]]:
        """Return the parts of each leaf, one per size: views of cut tensors, and the same object if a leaf stays whole."""
        if len(set(map(id, flat.leaves))) == len(flat.leaves):
            return list(map(self._parts, range(len(flat.leaves)), flat.leaves))
        parts: dict[tuple[int, int | None], Sequence[Any]] = {}  # one object at two places stays one object in each lane
        for index, (leaf, dim) in enumerate(zip(flat.leaves, self.dims, strict=True)):
            if (id(leaf), dim) not in parts:
                parts[id(leaf), dim] = self._parts(index, leaf)
        return [parts[id(leaf), dim] for leaf, dim in zip(flat.leaves, self.dims, strict=True)]

    def written(self, flat: FlatCall) -> list[int]:
        """Return the version of each tensor that every lane gets whole; a write in place changes it."""
        tensors = (leaf for leaf in self.whole(flat) if isinstance(leaf, torch.Tensor))
        return [version_of(tensor) for tensor in tensors if not tensor.is_inference()]

    def whole(self, flat: FlatCall) -> list[Any]:
        """Return the leaves that every lane gets whole."""
        if None not in self.dims:
            return []
        return [leaf for leaf, dim in zip(flat.leaves, self.dims, strict=True) if dim is None]

    def cut(self, flat: FlatCall) -> list[Piece]:
        """Return one piece per size."""
        columns = self.columns(flat)
        return [
            Piece(flat.spec, [column[shard] for column in columns], flat.leaves, self.dims, size)
            for shard, size in enumerate(self.sizes)
        ]

    def update(self, flat: FlatCall, shards: Sequence[Shard]) -> None:
        """Put what the lanes did to their parts of a cache into the cache that the caller passed."""
        for index, leaf in enumerate(flat.leaves):
            if isinstance(leaf, WholeLeaf) and (update := splitter_of(leaf.value).update) is not None:
                if len(shards) > 1:
                    update(leaf.value, self._join_parts(index, leaf, [shard.leaves[index] for shard in shards]))
                elif shards[0].leaves[index] is not leaf.value:
                    update(leaf.value, shards[0].leaves[index])

    def _join_parts(self, index: int, leaf: WholeLeaf, parts: Sequence[Any]) -> Any:
        try:
            return splitter_of(leaf.value).join(parts)
        except GatherError as error:
            msg = (
                f"{addresses(self.spec, CALL_ROOTS)[index]} was changed differently by the lanes: {error}. Make every lane "
                "add the same length, or leave the argument out, so that each lane makes its own"
            )
            raise GatherError(msg) from error

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
        return [WholeLeaf(part) for part in parts]

    def _why_uncut(self, index: int, leaf: torch.Tensor) -> str:
        where = addresses(self.spec, CALL_ROOTS)[index]
        return (
            f"{where} of shape {tuple(leaf.shape)} and layout {leaf.layout} cannot be split by torch. A parallel "
            "block whose in_dims has None for its parameter gives it whole to every lane"
        )


class Parameters:
    """The names under which a target takes its arguments. Immutable."""

    def __init__(self, target: Callable[..., Any]) -> None:
        self._positional: list[str] = []
        self._rest: str | None = None
        self._keywords: set[str] | None = set()  # None: any keyword will do
        self._named: set[str] = set()
        self._all_keywords: str | None = None  # the name of **kwargs
        self._read(target)

    def _read(self, target: Callable[..., Any]) -> None:
        schema = getattr(target, "schema", None)  # a TorchScript method
        if schema is not None:
            self._positional = [argument.name for argument in schema.arguments if argument.name != "self"]
            self._keywords = self._named = set(self._positional)
            return
        try:
            parameters = inspect.signature(target).parameters.values()
        except (TypeError, ValueError):  # a builtin without a signature
            self._keywords = None
            return
        self._positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self._rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)
        self._named = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
        self._all_keywords = next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), None)
        self._keywords = self._named if self._all_keywords is None else None

    def takes(self, name: str) -> bool:
        """True if the target has a parameter of that name, or takes any keyword."""
        return name != self._all_keywords and (self._keywords is None or name in self._keywords)

    def names(self, name: str) -> bool:
        """True if the signature has a parameter of that name."""
        return name in self._named

    def at(self, position: int) -> str | None:
        """The name of the positional argument at that place; None if the signature is not known."""
        return self._positional[position] if position < len(self._positional) else self._rest

    def __str__(self) -> str:
        return ", ".join(self._positional + ([f"*{self._rest}"] if self._rest else [])) or "none"


class _Layout(NamedTuple):
    """The calls of one structure: the dim of each leaf, and the plans by extents and lanes."""

    dims: tuple[int | None, ...]
    plans: dict[tuple[tuple[int, ...], int], ShardPlan]


class Cutter:
    """Plans the calls of one method of a target. Safe to share between threads: at worst a plan is made twice.

    `sizes` gives the sizes of the shards, in units of `unit` rows. `unused` are names in `in_dims` that no call passed yet,
    and that only ``**kwargs`` takes. With `lists_are_shared`, the rules are those of
    torch.nn.DataParallel: every lane gets the same list or object.
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
    ) -> None:
        self.dim = dim
        self.in_dims: dict[str, Any] = {name: as_tree(entry) for name, entry in (in_dims or {}).items()}
        self.parameters = parameters
        self.lists_are_shared = lists_are_shared
        self.sizes = sizes
        self.unit = unit
        self.unused = {name for name in self.in_dims if parameters is not None and not parameters.names(name)}
        self._layouts: dict[TreeSpec, _Layout] = {}
        self._specs: dict[int, TreeSpec] = {}  # by their number, of calls of tensors alone

    def flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatCall:
        """Take a call apart."""
        if args and not kwargs and not self.in_dims and _TENSOR.issuperset(map(type, args)) and all(map(_on_cpu, args)):
            try:  # the short way for the most common call: positional tensors on the CPU
                extents = tuple(map(itemgetter(self.dim), map(_shape_of, args)))
            except (IndexError, RuntimeError):  # a tensor without that dim, or a nested one
                pass
            else:
                spec = self._specs.get(len(args)) or self._spec_of(args)
                return FlatCall(args, spec, extents, on_cpu=True)
        if self.in_dims:
            self.unused.difference_update(kwargs)
            args, kwargs = self._with_items(args, kwargs)
        leaves, spec = flatten_call(args, kwargs)
        dims = self._layout(spec).dims
        return FlatCall(leaves, spec, tuple(map(extent_of, leaves, dims)))

    def plan(self, flat: FlatCall, lanes: int) -> ShardPlan:
        """Return the plan for a call.

        Raises:
            ShardError: If row counts disagree, an argument may or may not have one item per row, a dim is out of range, or
                the batch is not a multiple of `unit`.
        """
        layout = self._layouts.get(flat.spec) or self._layout(flat.spec)
        plan = layout.plans.get((flat.extents, lanes))
        if plan is None:
            if len(layout.plans) >= _MOST_PLANS:
                layout.plans.clear()
            plan = self._make(flat, layout, lanes)
            if OBJECT not in flat.extents:  # an object of another class may be refused
                layout.plans[flat.extents, lanes] = plan
        return plan

    def rows(self, args: tuple[Any, ...]) -> int:
        """Return the row count of a call of tensors: that of the first with rows."""
        for index, leaf in enumerate(args):
            extent = extent_of(leaf, self._dim_at((0, index)))
            if extent >= 0:
                return extent
        return 0

    def whole(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[ShardPlan, FlatCall]:
        """Return the plan that gives this call uncut to one lane, and the call taken apart. Rows may disagree."""
        leaves, spec = flatten_call(args, kwargs)
        extents = [extent_of(leaf, dim) for leaf, dim in zip(leaves, self._layout(spec).dims, strict=True)]
        rows = next((extent for extent in extents if extent >= 0), 0)
        return ShardPlan(spec, (None,) * len(leaves), (rows,)), FlatCall(leaves, spec)

    def _make(self, flat: FlatCall, layout: _Layout, lanes: int) -> ShardPlan:
        spec, extents = flat.spec, flat.extents
        rows = self._rows(flat, layout.dims)
        is_cut = rows is not None and rows > 1 and lanes > 1
        if OBJECT in extents or NESTED in extents:
            is_strict = is_cut and not self.lists_are_shared
            refuse_unknown(spec, flat.leaves, extents, self._name_at, self._option, is_cut=is_cut, is_strict=is_strict)
        if rows is None:
            hint = (
                None
                if self.lists_are_shared or lanes == 1
                else hint_of_items(spec, extents, self._is_declared, self._name_at)
            )
            return ShardPlan(spec, (None,) * len(flat.leaves), (0,), hint)
        if is_cut and not self.lists_are_shared:
            refuse_ambiguous(spec, extents, rows, self._is_declared, self._name_at)
        if rows % self.unit:
            refuse_broken_units(spec, extents, rows, self.unit)
        sizes = tuple(self.unit * units for units in self.sizes(rows // self.unit, lanes))
        cut_extents = (rows, EMPTY) if rows != 1 else ()
        cut = tuple(dim if extent in cut_extents else None for dim, extent in zip(layout.dims, extents, strict=True))
        largest = self.unit * balanced_sizes(rows // self.unit, lanes)[0]
        return ShardPlan(spec, cut, sizes, hint_of_sizes(sizes, largest, lanes) if self.sizes is uneven_sizes else None)

    def _rows(self, flat: FlatCall, dims: Sequence[int | None]) -> int | None:
        """The row count that the cut leaves agree on; None if nothing in the call has rows."""
        refuse_dims_out_of_range(flat.spec, flat.leaves, flat.extents, dims, self._is_declared)
        found = {extent: index for index, extent in reversed(list(enumerate(flat.extents))) if extent >= 0}
        if len(found) > 1:
            found.pop(1, None)  # one row next to more is the same for every row, as in torch's broadcasting
        if len(found) > 1:
            refuse_disagreement(flat.spec, found, dims, self._name_at, self._option)
        return next(iter(found), None)

    @property
    def _option(self) -> str:
        """The option that errors recommend. Faces with torch's rules have no such option."""
        return "a parallel block with in_dims" if self.lists_are_shared else "in_dims"

    def _spec_of(self, args: tuple[torch.Tensor, ...]) -> TreeSpec:
        spec = self._specs[len(args)] = flatten_call(args, {})[1]
        return spec

    def _layout(self, spec: TreeSpec) -> _Layout:
        """The dims and the plans of the calls of one structure."""
        layout = self._layouts.get(spec)
        if layout is None:
            if len(self._layouts) >= _MOST_PLANS:
                self._layouts.clear()
            layout = self._layouts[spec] = _Layout(self._dims(spec), {})
        return layout

    def _dims(self, spec: TreeSpec) -> tuple[int | None, ...]:
        return tuple(map(self._dim_at, spec.paths())) if self.in_dims else (self.dim,) * spec.num_leaves

    def _dim_at(self, path: Sequence[Any]) -> int | None:
        """The dim that the rows of a leaf lie on. The items of a sequence are on dim 0."""
        declared = self._find_declaration(path)
        return self.dim if declared is UNDECLARED else 0 if declared == "items" else declared

    def _is_declared(self, path: Sequence[Any]) -> bool:
        return self._find_declaration(path) is not UNDECLARED

    def _find_declaration(self, path: Sequence[Any]) -> Any:
        """The entry of `in_dims` for a path into (args, kwargs); UNDECLARED if there is none."""
        entry = self.in_dims.get(self._name_at(path) or "", UNDECLARED) if self.in_dims else UNDECLARED
        for key in path[2:]:
            if not isinstance(entry, (Mapping, tuple)):
                break
            has_key = key in entry if isinstance(entry, Mapping) else isinstance(key, int) and key < len(entry)
            entry = entry[key] if has_key else UNDECLARED
        return UNDECLARED if isinstance(entry, (Mapping, tuple)) else entry

    def _name_at(self, path: Sequence[Any]) -> str | None:
        """The parameter that a path into (args, kwargs) belongs to."""
        if path[0] == 1:
            return str(path[1])
        return self.parameters.at(path[1]) if self.parameters is not None else None

    def _with_items(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the call with each sequence that `in_dims` cuts by item turned into one leaf."""
        names = [self._name_at((0, index)) or "" for index in range(len(args))]
        by_item = tuple(_by_item(self.in_dims.get(name), value, [name]) for name, value in zip(names, args, strict=True))
        return by_item, {name: _by_item(self.in_dims.get(name), value, [name]) for name, value in kwargs.items()}


def _by_item(in_dim: Any, value: Any, place: list[Any]) -> Any:
    """Return a value with the sequences that its entry in `in_dims` cuts by item turned into leaves."""
    if in_dim is None:
        return value
    if isinstance(in_dim, (Mapping, tuple)):
        return _by_item_below(in_dim, value, place)
    if in_dim == "items":
        return WholeLeaf(value) if has_items(value) else replace_nodes(value, has_items, WholeLeaf)
    if isinstance(value, (list, tuple)) and not _holds_tensor(value):
        return WholeLeaf(value)  # named by the user: also a tuple of numbers
    return replace_nodes(value, _may_be_one_item_per_row, WholeLeaf)


def _by_item_below(in_dims: Any, value: Any, place: list[Any]) -> Any:
    """Do the same for a container, by the entries of its parts. Keys that it does not have are refused."""
    parts = named_children(value)
    named = in_dims if isinstance(in_dims, Mapping) else dict(enumerate(in_dims))
    if isinstance(in_dims, tuple) and len(in_dims) != len(parts):
        msg = f"{address('in_dims', place)} declares {len(in_dims)} items, and {place[0]!r} has {len(parts)} there"
        raise ShardError(msg)
    unknown = [key for key in named if key not in parts]
    if unknown:
        has = f"a {type(value).__name__} with {list(parts)}" if parts else f"a {type(value).__name__}"
        msg = f"{address('in_dims', [*place, unknown[0]])} is declared, and {place[0]!r} is {has} there"
        raise ShardError(msg)
    return with_children(value, {key: _by_item(named.get(key), part, [*place, key]) for key, part in parts.items()})


def _holds_tensor(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in flatten(value)[0])


def _may_be_one_item_per_row(node: Any) -> bool:
    """True for a list without tensors, and for a tuple without tensors that holds more than numbers."""
    if type(node) is list:
        return bool(node) and not _holds_tensor(node)
    return type(node) is tuple and not _holds_tensor(node) and not all(isinstance(item, NUMBERS) for item in node)


def _views(tensor: torch.Tensor, sizes: tuple[int, ...], dim: int) -> Sequence[torch.Tensor]:
    """Return the rows of each lane, in the tensor's own memory.

    torch refuses in-place writes with a graph to one of several views. If the tensor has no graph, a lane may write into
    its rows (``x += self.bias``), so each view is detached from the others.
    """
    parts = tensor.split_with_sizes(sizes, dim)
    if not tensor.requires_grad:
        return [part.detach() for part in parts]
    return parts


def _on_device(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, torch.Tensor):
        return transfer(leaf, device)
    return place_leaf(leaf, device) if isinstance(leaf, WholeLeaf) else leaf
