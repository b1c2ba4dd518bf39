"""From a call to its shards: take it apart, plan the cut, and scatter it.

A plan depends on the structure of the call, on the classes of leaves, and on their rows; never on values or earlier
calls. It is made once per combination and cached.
"""

from __future__ import annotations

import array
import collections
import datetime as dt
import enum
import inspect
import numbers
import pathlib
import re
import sys
import types
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter, itemgetter
from typing import Any, Literal, NamedTuple, NoReturn

import torch

from parawrap._private_name import private_reader
from parawrap.backends import transfer
from parawrap.engine.rules.registry import place_leaf, registration_of, splitter_of
from parawrap.errors import GatherError, ShardError
from parawrap.tree import (
    UNDECLARED,
    Fields,
    TreeSpec,
    WholeLeaf,
    address,
    addresses,
    as_tree,
    flatten,
    flatten_call,
    named_children,
    replace_nodes,
    sequences,
    tensors_in,
    unflatten,
    with_children,
)


InDim = int | Literal["items"] | None | Mapping[Any, Any] | tuple[Any, ...] | list[Any] | Fields
"""Where the rows of an argument lie: a dim, "items" (one item per row), or None (every lane gets the argument whole). A
dict, tuple, or dataclass of these declares the parts of an argument."""

Sizes = Callable[[int, int], tuple[int, ...]]
"""From rows and lanes to the sizes of the shards."""

CALL_ROOTS = ("args", "kwargs")
"""How the addresses of a call's leaves begin."""

_TENSOR = frozenset({torch.Tensor})
_MOST_PLANS = 1024  # for loaders with many sizes; a guess that no test has contradicted
_MOST_NAMED = 4  # arguments, in the note of an error
_MOST_LISTED = 20  # leaves, in the error of a call whose rows disagree; the cure names every argument
_UNEVEN_BEYOND = 1.125  # an eighth: lanes usually differ by as much
_MOST_WITH_FEWER_PARTS = 2  # rows per part: one row next to two would be half the work, and batch norm refuses one row

_on_cpu = attrgetter("is_cpu")
_shape_of = attrgetter("shape")
_attributes_of = attrgetter("__dict__")
version_of: Callable[[torch.Tensor], int] = private_reader("torch.Tensor._version", "batches")  # counts writes in place


# The sizes of shards


def balanced_sizes(rows: int, parts: int) -> tuple[int, ...]:
    """Return sizes that add up to `rows` and differ by at most one, the larger first; none of them is zero.

    >>> balanced_sizes(10, 4), balanced_sizes(2, 4), balanced_sizes(0, 4)
    ((3, 3, 2, 2), (1, 1), (0,))
    """
    if rows <= parts:
        return (1,) * rows or (0,)
    size, larger = divmod(rows, parts)
    return (size + 1,) * larger + (size,) * (parts - larger)


def uneven_sizes(rows: int, parts: int) -> tuple[int, ...]:
    """Return sizes that add up to `rows` and are not all equal, the larger first; or one size.

    Sizes that differ show which outputs follow the rows: a size that does not come from the rows cannot match all of them.
    Balanced sizes that differ stay. Of equal sizes, the first gets one row more and the last one row less. With one or two
    rows per part, one part fewer is used, so that no shard has one row next to shards of two: 4 rows on 2 lanes stay whole.

    >>> uneven_sizes(11, 2), uneven_sizes(16, 2), uneven_sizes(8, 4)
    ((6, 5), (9, 7), (3, 3, 2))
    >>> uneven_sizes(6, 3), uneven_sizes(4, 2), uneven_sizes(1, 2)
    ((4, 2), (4,), (1,))
    """
    sizes = balanced_sizes(rows, parts)
    size = sizes[0]
    if len(sizes) == 1 or sizes[-1] != size:
        return sizes
    if size > _MOST_WITH_FEWER_PARTS:
        return (size + 1, *sizes[1:-1], size - 1)
    return uneven_sizes(rows, len(sizes) - 1)


def equal_sizes(rows: int, parts: int) -> tuple[int, ...]:
    """Return sizes that add up to `rows`: all equal, except the last, which is the rest.

    For devices that compile each new size: a call has two sizes at most.

    >>> equal_sizes(10, 4), equal_sizes(2, 4), equal_sizes(16, 4), equal_sizes(0, 4)
    ((3, 3, 3, 1), (1, 1), (4, 4, 4, 4), (0,))
    """
    size = max(1, -(-rows // parts))
    full, rest = divmod(rows, size)
    return (size,) * full + ((rest,) if rest or not rows else ())


def sizes_in_units(rows: int, parts: int, unit: int) -> tuple[int, ...]:
    """Return sizes that add up to `rows`, multiples of `unit` except the last, as balanced as units allow.

    For models that compute `unit` rows at a time, however few they are given. No size is zero, unless `rows` is.

    >>> sizes_in_units(10, 4, 2), sizes_in_units(7, 2, 2), sizes_in_units(1, 4, 8), sizes_in_units(0, 4, 2)
    ((4, 2, 2, 2), (4, 3), (1,), (0,))
    """
    units = -(-rows // unit)
    *full, last = (unit * count for count in balanced_sizes(units, parts))
    return (*full, last - (units * unit - rows))


# The extent of a leaf: its row count, or a negative number for its kind

_BROADCAST = -1  # every lane gets the same object
_FIXED = -2  # also; a value such as a text, of which a list may have one per row
_BEYOND = -3  # a tensor with dims, but without the dim of the rows
_OBJECT = -4  # of a class that parawrap does not know
_EMPTY = -5  # a cache without rows yet: every lane gets a copy
_NESTED = -6  # a nested tensor of the strided layout, which torch cannot split
_ARRAY = -100  # and below, by its length: an array of another library

_NUMBERS = (int, float, bool, complex, torch.dtype, torch.device, torch.Generator)
_SEQUENCES = (list, range, array.array, collections.deque, collections.UserList)
_VALUES = (
    *(str, bytes, numbers.Number, enum.Enum, slice, type, types.EllipsisType, pathlib.PurePath, re.Pattern, uuid.UUID),
    *(types.FunctionType, types.BuiltinFunctionType, types.ModuleType, dt.date, dt.time, dt.timedelta, dt.tzinfo),
    *(torch.Size, torch.layout, torch.memory_format, torch.finfo, torch.iinfo),
)


def _extent_of(leaf: Any, dim: int | None) -> int:
    """Return the rows of a leaf on `dim`, or a negative number for its kind."""
    if isinstance(leaf, torch.Tensor):
        if dim is None:
            return _BROADCAST
        if leaf.is_nested and leaf.layout is torch.strided:
            return _NESTED
        if -leaf.ndim <= dim < leaf.ndim:
            return leaf.size(dim) if leaf.is_nested else leaf.shape[dim]
        return _BEYOND if leaf.ndim else _BROADCAST
    if isinstance(leaf, WholeLeaf):
        if dim is None:
            return _BROADCAST
        rules = splitter_of(leaf.value)
        rows = rules.rows(leaf.value)
        return _EMPTY if rows == 0 and rules.update is not None else rows
    if leaf is None or isinstance(leaf, _NUMBERS):
        return _BROADCAST
    if dim is None or isinstance(leaf, _VALUES) or _is_numpy_value(leaf):
        return _FIXED
    length = _length_of_array(leaf)
    return _OBJECT if length is None else _ARRAY - length


def _length_of_array(value: Any) -> int | None:
    shape = None if isinstance(value, (torch.Tensor, WholeLeaf)) else getattr(value, "shape", None)
    return shape[0] if isinstance(shape, tuple) and shape and isinstance(shape[0], int) else None


def _is_numpy_value(value: Any) -> bool:
    """True for a scalar or a dtype of numpy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.generic, numpy.dtype))


def _has_items(value: Any) -> bool:
    """True for a sequence that `in_dims` may cut by item, or an array of another library."""
    return type(value) is tuple or isinstance(value, _SEQUENCES) or _length_of_array(value) is not None


# A call, its plan, and its shards


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
    """A shard that still lies where the caller has it: the rows of cut leaves, and the leaves that every lane gets whole."""

    spec: TreeSpec
    leaves: Sequence[Any]
    whole: Sequence[Any]
    dims: Sequence[int | None]
    rows: int

    def on(self, device: torch.device) -> Shard:
        """Return the shard on a device: what lies there already, and copies of the rest on the thread's streams."""
        here: dict[int, Any] = {}  # one object at two places stays one object
        for leaf in self.leaves:
            if id(leaf) not in here:
                here[id(leaf)] = _move(leaf, device)
        leaves = [here[id(leaf)] for leaf in self.leaves]
        origins: dict[int, Any] = {}  # of copies of tensors that were not cut, and of parts of values with registered rules
        for placed, whole, dim in zip(leaves, self.whole, self.dims, strict=True):
            if isinstance(whole, WholeLeaf):
                origins[id(placed)] = whole.value
            elif dim is None and isinstance(whole, torch.Tensor) and placed is not whole:
                origins[id(placed)] = whole
        args, kwargs = unflatten(self.spec, leaves)
        return Shard(args, kwargs, self.rows, leaves, origins)


@dataclass(frozen=True, eq=False)
class ShardPlan:
    """How the calls of one structure are cut: each leaf's dim (None: whole to every lane) and the sizes of the shards.

    `tensors` are the indices of leaves that are tensors. `generators` is True if a leaf is a random generator. `hint` is a
    warning if an option would cut the call better. Immutable; shared by every call of the structure and by every thread.
    """

    spec: TreeSpec
    dims: tuple[int | None, ...]
    sizes: tuple[int, ...]
    hint: str | None = None
    tensors: tuple[int, ...] = ()
    generators: bool = False

    @cached_property
    def rows(self) -> int:
        return sum(self.sizes)

    @cached_property
    def whole_tensors(self) -> tuple[int, ...]:
        """The indices of tensors that every lane gets whole. A call may have inference tensors there, without versions."""
        return tuple(index for index in self.tensors if self.dims[index] is None)

    @cached_property
    def cut_tensors(self) -> tuple[int, ...]:
        """The indices of tensors that are cut."""
        return tuple(index for index in self.tensors if self.dims[index] is not None and len(self.sizes) > 1)

    @cached_property
    def cuts_each_leaf(self) -> bool:
        """True if every leaf is a tensor, and is cut."""
        return 0 < len(self.cut_tensors) == len(self.dims)

    def describe(self, shard: int) -> str:
        """Return the rows of a shard, and the arguments that every lane gets whole, for the note of an error."""
        cut = {path[:2] for path, dim in zip(self.spec.paths(), self.dims, strict=True) if dim is not None}
        paths = dict.fromkeys(path[:2] for path in self.spec.paths() if path[:2] not in cut)
        whole = [address(CALL_ROOTS[root], [name]) for root, name in paths]
        more = ", ..." if len(whole) > _MOST_NAMED else ""
        also = f". Every lane got {', '.join(whole[:_MOST_NAMED])}{more} whole" if whole else ""
        return f"{self.sizes[shard]} of {self.rows} rows{also}"

    def columns(self, flat: FlatCall, copy: bool) -> list[Sequence[Any]]:
        """Return the parts of each leaf, one per size, and the same object if a leaf stays whole.

        With `copy`, parts of tensors are copies, so that a lane may write into its part while autograd records: torch refuses
        such writes to one of several views. `write_back` brings them to the argument. Without, parts are views.
        """
        leaves = flat.leaves
        are_distinct = len(leaves) == 1 or len(set(map(id, leaves))) == len(leaves)
        if are_distinct and self.cuts_each_leaf:
            split = torch.split_with_sizes_copy if copy else torch.split_with_sizes
            try:
                return [split(leaf, self.sizes, dim) for leaf, dim in zip(leaves, self.dims, strict=True)]  # type: ignore[arg-type]
            except (RuntimeError, NotImplementedError):
                pass  # below, the error names the leaf
        parts: dict[tuple[int, int | None], Sequence[Any]] = {}  # one object at two places stays one object in each lane
        for index, (leaf, dim) in enumerate(zip(leaves, self.dims, strict=True)):
            if (id(leaf), dim) not in parts:
                parts[id(leaf), dim] = self._split(index, leaf, copy)
        return [parts[id(leaf), dim] for leaf, dim in zip(leaves, self.dims, strict=True)]

    def write_back(self, flat: FlatCall, columns: Sequence[Sequence[Any]]) -> None:
        """Write what lanes wrote into their copies of rows into the arguments, as the plain call would have done.

        `columns` are the parts that ``columns(flat, copy=True)`` returned. Their versions were 0 then. Autograd records the
        write if it recorded one of the lanes' writes.
        """
        done: set[int] = set()
        for index in self.cut_tensors:
            parts = columns[index]
            if any(map(version_of, parts)) and id(parts) not in done:
                done.add(id(parts))  # one object at two places has one list of parts
                nodes = [part.grad_fn for part in parts if part.grad_fn is not None]
                is_recorded = any(not node.name().startswith("SplitWithSizes") for node in nodes)
                with torch.set_grad_enabled(is_recorded):
                    flat.leaves[index].copy_(torch.cat(list(parts), self.dims[index] or 0))

    def whole(self, flat: FlatCall) -> list[Any]:
        """Return the leaves that every lane gets whole."""
        if None not in self.dims:
            return []
        return [leaf for leaf, dim in zip(flat.leaves, self.dims, strict=True) if dim is None]

    def written(self, flat: FlatCall) -> list[int]:
        """Return the version of each tensor that every lane gets whole; a write in place changes it."""
        tensors = [flat.leaves[index] for index in self.whole_tensors]
        return [version_of(tensor) for tensor in tensors if not tensor.is_inference()]

    def cut(self, flat: FlatCall, columns: Sequence[Sequence[Any]] | None = None) -> list[Piece]:
        """Return one piece per size, with the parts that `columns` returned; with views by default."""
        columns = self.columns(flat, copy=False) if columns is None else columns
        return [
            Piece(flat.spec, [column[shard] for column in columns], flat.leaves, self.dims, size)
            for shard, size in enumerate(self.sizes)
        ]

    def scatter(self, flat: FlatCall, devices: Sequence[torch.device]) -> list[Shard]:
        """Return one shard per size, each on its device; `devices` has one entry per shard."""
        return [piece.on(device) for piece, device in zip(self.cut(flat), devices, strict=True)]

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
            split = torch.split_with_sizes_copy if copy else torch.split_with_sizes
            try:
                return split(leaf, self.sizes, dim)  # type: ignore[arg-type]
            except (RuntimeError, NotImplementedError) as error:
                if leaf.layout is torch.strided and not leaf.is_nested:
                    raise
                msg = (
                    f"{addresses(self.spec, CALL_ROOTS)[index]} of shape {tuple(leaf.shape)} and layout {leaf.layout} cannot "
                    "be split by torch. A parallel block whose in_dims has None for its parameter gives it whole to every lane"
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
        """Return the name of the positional argument at that place; None if the signature is not known."""
        return self._positional[position] if position < len(self._positional) else self._rest

    def __str__(self) -> str:
        return ", ".join(self._positional + ([f"*{self._rest}"] if self._rest else [])) or "none"


class _Layout(NamedTuple):
    """The calls of one structure: the dim of each leaf, and the plans by extents, classes of leaves, and lanes."""

    dims: tuple[int | None, ...]
    plans: dict[tuple[tuple[int, ...], tuple[type, ...], int], ShardPlan]


class _Unclear(NamedTuple):
    """A value of a call that may or may not be cut: its place, and its description for an error."""

    path: tuple[Any, ...]
    says: str
    may_be_items: bool = False


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
        self._of_shapes: dict[tuple[int, tuple[torch.Size, ...]], ShardPlan] = {}  # of calls of plain tensors on the CPU

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
        plan = self._of_shapes.get(shapes)
        if plan is None:
            plan = self.plan(self.flatten(args, {}), lanes)
            if len(self._of_shapes) >= _MOST_PLANS:
                self._of_shapes.clear()
            self._of_shapes[shapes] = plan
        return plan

    def flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatCall:
        """Take a call apart."""
        if args and not kwargs and not self.in_dims and _TENSOR.issuperset(map(type, args)) and all(map(_on_cpu, args)):
            try:  # the short way for the most common call: positional tensors on the CPU
                extents = tuple(map(itemgetter(self.dim), map(_shape_of, args)))
            except (IndexError, RuntimeError):  # a tensor without that dim, or a nested one
                pass
            else:
                return FlatCall(args, flatten_call(args, {})[1], extents, on_cpu=True)
        if self.in_dims:
            self.unused.difference_update(kwargs)
            names = [self._name_at((0, index)) or "" for index in range(len(args))]
            args = tuple(_by_item(self.in_dims.get(name), value, [name]) for name, value in zip(names, args, strict=True))
            kwargs = {name: _by_item(self.in_dims.get(name), value, [name]) for name, value in kwargs.items()}
        leaves, spec = flatten_call(args, kwargs)
        return FlatCall(leaves, spec, tuple(map(_extent_of, leaves, self._layout(spec).dims)))

    def plan(self, flat: FlatCall, lanes: int) -> ShardPlan:
        """Return the plan for a call.

        Raises:
            ShardError: If row counts disagree, an argument may or may not have one item per row, a dim is out of range, or
                the batch is not a multiple of `unit`.
        """
        layout = self._layouts.get(flat.spec) or self._layout(flat.spec)
        key = flat.extents, tuple(map(type, flat.leaves)), lanes
        plan = layout.plans.get(key)
        if plan is None:
            if len(layout.plans) >= _MOST_PLANS:
                layout.plans.clear()
            plan = self._make(flat, layout.dims, lanes)
            if _OBJECT not in flat.extents:  # an object of another class may be refused
                layout.plans[key] = plan
        if not self.lists_are_shared and any([flat.leaves[index].__dict__ for index in plan.cut_tensors]):
            self._refuse_attributes(flat, plan)
        return plan

    def whole(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[ShardPlan, FlatCall]:
        """Return the plan that gives this call uncut to one lane, and the call taken apart. Rows may disagree."""
        leaves, spec = flatten_call(args, kwargs)
        extents = map(_extent_of, leaves, self._layout(spec).dims)
        rows = next((extent for extent in extents if extent >= 0), 0)
        return ShardPlan(spec, (None,) * len(leaves), (rows,)), FlatCall(leaves, spec)

    def rows(self, args: tuple[Any, ...]) -> int:
        """Return the row count of a call of tensors: that of the first with rows."""
        extents = (_extent_of(leaf, self._dim_at((0, index))) for index, leaf in enumerate(args))
        return next((extent for extent in extents if extent >= 0), 0)

    def _make(self, flat: FlatCall, dims: tuple[int | None, ...], lanes: int) -> ShardPlan:
        spec, leaves, extents = flat.spec, flat.leaves, flat.extents
        self._refuse_dims_out_of_range(flat, dims)
        counts = set(dict.fromkeys(extent for extent in extents if extent >= 0))
        if len(counts) > 1:
            counts.discard(1)  # one row next to more is the same for every row, as in torch's broadcasting
        if len(counts) > 1:
            self._refuse_disagreement(flat, dims)
        rows = next(iter(counts), None)
        is_cut = rows is not None and rows > 1 and lanes > 1
        self._refuse_unclear(flat, rows, is_cut=is_cut)
        tensors = tuple(index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
        generators = any(isinstance(leaf, torch.Generator) for leaf in leaves)
        if rows is None:
            hint = None if self.lists_are_shared or lanes == 1 else self._hint_of_items(flat)
            return ShardPlan(spec, (None,) * len(leaves), (0,), hint, tensors, generators)
        if rows % self.unit:
            self._refuse_broken_units(flat, rows)
        sizes = tuple(self.unit * units for units in self.sizes(rows // self.unit, lanes))
        cut_extents = (rows, _EMPTY) if rows != 1 else ()
        cut = tuple(dim if extent in cut_extents else None for dim, extent in zip(dims, extents, strict=True))
        largest = self.unit * balanced_sizes(rows // self.unit, lanes)[0]
        hint = _hint_of_sizes(sizes, largest, lanes) if self.sizes is uneven_sizes else None
        return ShardPlan(spec, cut, sizes, hint, tensors, generators)

    # The declarations of `in_dims`

    def _layout(self, spec: TreeSpec) -> _Layout:
        """Return the dims and the plans of the calls of one structure."""
        layout = self._layouts.get(spec)
        if layout is None:
            if len(self._layouts) >= _MOST_PLANS:
                self._layouts.clear()
            dims = tuple(map(self._dim_at, spec.paths())) if self.in_dims else (self.dim,) * spec.num_leaves
            layout = self._layouts[spec] = _Layout(dims, {})
        return layout

    def _dim_at(self, path: Sequence[Any]) -> int | None:
        """Return the dim that the rows of a leaf lie on. The items of a sequence are on dim 0."""
        declared = self._find_declaration(path)
        return self.dim if declared is UNDECLARED else 0 if declared == "items" else declared

    def _find_declaration(self, path: Sequence[Any]) -> Any:
        """Return the entry of `in_dims` for a path into (args, kwargs); UNDECLARED if there is none."""
        entry = self.in_dims.get(self._name_at(path) or "", UNDECLARED) if self.in_dims else UNDECLARED
        for key in path[2:]:
            if not isinstance(entry, (Mapping, tuple)):
                break
            has_key = key in entry if isinstance(entry, Mapping) else isinstance(key, int) and key < len(entry)
            entry = entry[key] if has_key else UNDECLARED
        return UNDECLARED if isinstance(entry, (Mapping, tuple)) else entry

    def _name_at(self, path: Sequence[Any]) -> str | None:
        """Return the parameter that a path into (args, kwargs) belongs to; None if the signature is not known."""
        if path[0] == 1:
            return str(path[1])
        return self.parameters.at(path[1]) if self.parameters is not None else None

    # Errors. Each names every value concerned, and `in_dims` that settle all of them at once.

    @property
    def _option(self) -> str:
        """The option that errors recommend. Faces with torch's rules have no such option."""
        return "a parallel block with in_dims" if self.lists_are_shared else "in_dims"

    def _cure(self, entries: Mapping[tuple[Any, ...], str | None]) -> str:
        """Return the `in_dims` with these entries for the values at these paths, next to the entries of the user.

        The entry is that of the whole argument where the keys of a path are not names.
        """
        cure: dict[str, Any] = dict(self.in_dims)
        for path, entry in entries.items():
            has_names = all(isinstance(key, str) for key in path[2:])
            keys = [self._name_at(path) or "its name", *map(str, path[2:] if has_names else ())]
            place = cure
            for key in keys[:-1]:
                below = place.get(key)
                place[key] = dict(below) if isinstance(below, Mapping) else {}
                place = place[key]
            place[keys[-1]] = entry
        return f"{self._option}={_write(cure)}"

    def _refuse_disagreement(self, flat: FlatCall, dims: Sequence[int | None]) -> NoReturn:
        """Refuse leaves with different row counts. The batch has the count that most arguments have, or else the first."""
        where, paths = addresses(flat.spec, CALL_ROOTS), flat.spec.paths()
        found = {index: extent for index, extent in enumerate(flat.extents) if extent >= 0 and extent != 1}
        counts: dict[tuple[Any, ...], set[int]] = {}  # by argument
        for index, extent in found.items():
            counts.setdefault(paths[index][:2], set()).add(extent)
        are_even = {next(iter(each)) for each in counts.values() if len(each) == 1}
        rows = max(found.values(), key=lambda count: (sum(count in each for each in counts.values()), count in are_even))
        others = [index for index, extent in found.items() if extent != rows]
        example = next(index for index, extent in found.items() if extent == rows)
        parts = {paths[index] if rows in counts[paths[index][:2]] else paths[index][:2]: None for index in others}
        arguments = {path[:2]: None for path in parts}
        listed = [f"{where[index]} has {found[index]} on dim {dims[index]}" for index in (*others[:_MOST_LISTED], example)]
        more = f", {len(others) - _MOST_LISTED} more" if len(others) > _MOST_LISTED else ""
        names = _join_words([address(CALL_ROOTS[path[0]], path[1:]) for path in parts])
        msg = f"the rows of the call disagree: {', '.join(listed)}{more}. "
        if arguments != parts and any(path not in arguments for path in counts):
            whole = _join_words([address(CALL_ROOTS[path[0]], path[1:]) for path in arguments])
            msg += f"If {whole} has no rows at all, such as a dict of parameters, use {self._cure(arguments)}. "
        msg += (
            f"If {names} {'is' if len(parts) == 1 else 'are'} not cut with the batch, use {self._cure(parts)}; if rows lie on "
            'another dim, give that dim; for a list with one tensor per row, give "items"'
        )
        for index in others:
            large, small = max(found[index], rows), min(found[index], rows)
            if small > 1 and large % small == 0:
                name, count = where[index if large == found[index] else example], large // small
                msg += (
                    f". If {name} has {count} rows for each row of the batch, such as a mask with one row per head, pass it "
                    f"as ({small}, {count}, ...), and flatten it in the target"
                )
                break
        msg += (
            ". If none of these fits, as for offsets into another argument, give each lane a whole batch: "
            "`map` of the block, or TupleParallel"
        )
        raise ShardError(msg)

    def _refuse_attributes(self, flat: FlatCall, plan: ShardPlan) -> None:
        """Refuse tensors with attributes of their own, which their parts would not have."""
        where, paths = addresses(flat.spec, CALL_ROOTS), flat.spec.paths()
        found: dict[int, list[str]] = {}
        for index in plan.cut_tensors:
            leaf = flat.leaves[index]
            names = [name for name in leaf.__dict__ if not name.startswith("_dynamo_")]  # marks of torch.compile
            if names and not hasattr(leaf, "__tensor_flatten__"):  # a wrapper of tensors, which knows how to cut itself
                found[index] = names
        if not found:
            return
        says = [
            f"{where[index]} is a {type(flat.leaves[index]).__name__} with attributes of its own ({', '.join(names[:_MOST_NAMED])})"
            for index, names in found.items()
        ]
        classes = {type(flat.leaves[index]) for index in found} - {torch.Tensor}
        rules = " and ".join(sorted(map(registration_of, classes))) or "a class of your own with register_split"
        msg = (
            f"{_join_words(says)}, which the parts of a cut tensor lose. Use {rules} to cut them too, pass the attributes as "
            f"arguments of their own, or use {self._cure({paths[index]: None for index in found})} to give "
            f"{'it' if len(found) == 1 else 'them'} whole to every lane"
        )
        raise ShardError(msg)

    def _refuse_dims_out_of_range(self, flat: FlatCall, dims: Sequence[int | None]) -> None:
        """Refuse a tensor without the dim that `in_dims` names for it, or a call without any tensor that has the dim."""
        beyond = [index for index, extent in enumerate(flat.extents) if extent == _BEYOND]
        paths = flat.spec.paths() if beyond else []
        declared = [index for index in beyond if self._find_declaration(paths[index]) is not UNDECLARED]
        nothing_has_it = all(extent < 0 for extent in flat.extents)
        wrong = declared or (beyond if nothing_has_it else [])
        if wrong:
            where = addresses(flat.spec, CALL_ROOTS)
            shape = tuple(flat.leaves[wrong[0]].shape)
            msg = (
                f"dim {dims[wrong[0]]} is out of range for {_join_words([where[index] for index in wrong])}, of shape {shape}: "
                f"it has {len(shape)} dimensions"
            )
            raise ShardError(msg)

    def _refuse_broken_units(self, flat: FlatCall, rows: int) -> NoReturn:
        """Refuse a batch that is not a multiple of `unit`."""
        unit = self.unit
        where = addresses(flat.spec, CALL_ROOTS)[flat.extents.index(rows)]
        sizes = f"{unit}" if rows < unit else f"{rows - rows % unit} or {rows - rows % unit + unit}"
        msg = (
            f"{where} has {rows} rows, which is not a multiple of unit={unit}. With unit={unit}, {unit} rows that follow each "
            f"other stay in one lane. Pass a batch of {sizes} rows, or another unit"
        )
        raise ShardError(msg)

    def _refuse_unclear(self, flat: FlatCall, rows: int | None, *, is_cut: bool) -> None:
        """Refuse values that may or may not be cut, or that parawrap cannot cut, until `in_dims` declares them."""
        is_strict = is_cut and not self.lists_are_shared
        found = [*self._find_objects(flat, rows, is_strict=is_strict, is_cut=is_cut)]
        if is_strict:
            found += self._find_sequences(flat, rows or 0)
        if not found:
            return
        whole = self._cure({each.path: None for each in found})
        cut = self._cure({each.path: "items" if each.may_be_items else None for each in found})
        it, gives = ("it", "gives") if len(found) == 1 else ("them", "gives")
        cures = f"{cut} cuts {it} by item, and " if any(each.may_be_items for each in found) else ""
        msg = f"{'; '.join(each.says for each in found)}. {cures}{whole} {gives} {it} whole to every lane"
        raise ShardError(msg)

    def _find_objects(self, flat: FlatCall, rows: int | None, *, is_strict: bool, is_cut: bool) -> Iterator[_Unclear]:
        """Yield objects of unknown classes, nested tensors, and arrays.

        An object that holds tensors is refused in any call. With `is_strict`, so is every object: a deque or a generator of
        random numbers would advance or start again in each lane. Lanes of a call that `is_cut` would take turns with an
        iterator. An array would be shared by all lanes.
        """
        if all(extent > _OBJECT for extent in flat.extents):
            return
        where, paths = addresses(flat.spec, CALL_ROOTS), flat.spec.paths()
        for index, (leaf, extent) in enumerate(zip(flat.leaves, flat.extents, strict=True)):
            place, path, kind = where[index], paths[index], type(leaf).__name__
            if extent == _NESTED:
                yield _Unclear(path, f"{place} is a nested tensor, which torch cannot split. Pad it to cut it")
            elif extent <= _ARRAY and is_strict:
                says = f"{place} is an array with {_ARRAY - extent} rows, and the batch has {rows}; torch.from_numpy(...) of it "
                yield _Unclear(path, f"{says}is cut with the batch", may_be_items=True)
            elif extent == _OBJECT and next(tensors_in(leaf), None) is not None:
                says = f"{place} is a {kind}, which holds tensors, and parawrap does not know how to cut it: use "
                yield _Unclear(path, f"{says}{registration_of(type(leaf))} to cut it")
            elif extent == _OBJECT and (is_strict or (is_cut and isinstance(leaf, Iterator))):
                says = f"{place} is a {kind}, which may have one item per row, or a state that each lane would change"
                yield _Unclear(path, says, may_be_items=_has_items(leaf))

    def _find_sequences(self, flat: FlatCall, rows: int) -> Iterator[_Unclear]:
        """Yield lists and tuples without rows that are as long as the batch, and deques, of which each lane would have its own.

        A list may have one item per row or be one value for all rows.
        """
        for path, node, start in sequences(flat.spec):
            kinds = flat.extents[start : start + node.num_leaves]
            is_long = node.num_children == rows or node.type is collections.deque
            has_rows = any(kind >= 0 and kind != 1 for kind in kinds)  # a tensor of one row would go whole to every lane
            if len(path) < 2 or not is_long or has_rows or self._find_declaration(path) is not UNDECLARED:
                continue
            has = "with tensors of one row" if any(kind == 1 for kind in kinds) else "without a tensor"
            says = (
                f"{address(CALL_ROOTS[path[0]], path[1:])} is a {_kind_of(node)} of {node.num_children} items {has}, and the "
                f"batch has {rows} rows: it may have one item per row or be one value for all rows"
            )
            yield _Unclear(path, says, may_be_items=True)

    def _hint_of_items(self, flat: FlatCall) -> str | None:
        """Return a warning for a call that is not cut although it has texts or arrays; None for any other call."""
        paths, extents = flat.spec.paths(), flat.extents
        arrays = [(paths[index], "array") for index, extent in enumerate(extents) if extent < _ARRAY - 1]
        texts = [
            (path, _kind_of(node))
            for path, node, start in sequences(flat.spec)
            if len(path) > 1 and node.num_children > 1 and _FIXED in extents[start : start + node.num_leaves]
        ]
        for path, kind in arrays + texts:
            if self._name_at(path) is not None and self._find_declaration(path) is UNDECLARED:
                return (
                    f"a call without tensors runs plainly: {address(CALL_ROOTS[path[0]], path[1:])} is a {kind}. To cut it by "
                    f"item, use {self._cure({path: 'items'})}; to keep the call plain, use {self._cure({path: None})}"
                )
        return None


def _hint_of_sizes(sizes: Sequence[int], largest: int, lanes: int) -> str | None:
    """Return a warning for a shard that is much larger than `largest`, its size in a balanced cut."""
    if sizes[0] <= _UNEVEN_BEYOND * largest:
        return None
    does = "runs whole" if len(sizes) == 1 else f"has a shard of {sizes[0]} rows"
    return (
        f"a call of {sum(sizes)} rows on {lanes} lanes {does}, because the sizes of shards must differ to show which "
        f"outputs follow the rows. With out_dims=0, the largest shard has {largest} of them"
    )


def _kind_of(node: TreeSpec) -> str:
    return "sequence" if node.type is None else node.type.__name__


def _join_words(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def _write(option: Any) -> str:
    """Return an option as Python code."""
    if isinstance(option, Mapping):
        return f"{{{', '.join(f'{_write(key)}: {_write(each)}' for key, each in option.items())}}}"
    if isinstance(option, tuple):
        return f"({', '.join(map(_write, option))}{',' if len(option) == 1 else ''})"
    return f'"{option}"' if isinstance(option, str) else repr(option)


def _by_item(in_dim: Any, value: Any, place: list[Any]) -> Any:
    """Return a value with the sequences that its entry in `in_dims` cuts by item turned into leaves."""
    if in_dim is None:
        return value
    if isinstance(in_dim, (Mapping, tuple)):
        return _by_item_below(in_dim, value, place)
    if in_dim == "items":
        return WholeLeaf(value) if _has_items(value) else replace_nodes(value, _has_items, WholeLeaf)
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
    return type(node) is tuple and not _holds_tensor(node) and not all(isinstance(item, _NUMBERS) for item in node)
