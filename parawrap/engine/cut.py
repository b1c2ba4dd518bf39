"""From a call to its shards: take the call apart, plan the cut, and scatter the arguments.

A plan depends on the structure of the call, on the classes of leaves, and on their rows; never on
values or earlier calls. It is made once per combination and cached.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import count, repeat
from operator import attrgetter
from typing import Any, NamedTuple, NoReturn

import torch

from parawrap._private_names import version_of
from parawrap.backends import record_use, transfer
from parawrap.engine.batched_copies import lasting
from parawrap.engine.borrowed import (
    NOTHING,
    WRITTEN_WHOLE,
    Borrowed,
    Loan,
    Moved,
    lend,
)
from parawrap.engine.cut_errors import (
    refuse_attributes,
    refuse_broken_units,
    refuse_dims_out_of_range,
    refuse_disagreement,
    refuse_unclear,
)
from parawrap.engine.flat_call import (
    EMPTY,
    OBJECT,
    FlatCall,
    address_in_call,
    extent_of,
    is_plain_value,
)
from parawrap.engine.in_dims import InDim, InDims, Parameters
from parawrap.engine.lent_containers import paths_of_containers
from parawrap.engine.rules.registry import place_leaf, splitter_of
from parawrap.engine.shard_sizes import Sizes, balanced_sizes, hint_of_sizes, sizes_of_block
from parawrap.errors import ShardError
from parawrap.tree import TENSOR, TENSORS, TreeSpec, WholeLeaf, flatten, is_dense, unflatten

_NEW_SHAPE = (
    "the model changed its shape in place, and each lane changed its own part. Use an out-of-place "
    "operation, such as unsqueeze or reshape"
)
# Names of the autograd nodes of the copies made here. Any other node is a write of forward
_COPY_NODES = ("SplitWithSizes", "CloneBackward")
_MOST_PLANS = 1024  # for loaders with many sizes; a guess that no test has contradicted

# In C, since each of these reads every tensor of a warm call
_on_cpu = attrgetter("is_cpu")
_shape_of = attrgetter("shape")
_attributes_of = attrgetter("__dict__")  # an empty dict is false
# Torch's stub says that it returns None
_split_copies: Callable[..., Sequence[torch.Tensor]]
_split_copies = torch.split_with_sizes_copy  # type: ignore[assignment]


# A call, its plan, and its shards

Columns = Sequence[Sequence[Any]]
"""The parts of each leaf of a call, one per shard."""

Dims = tuple[int | None, ...]
"""The dim that each leaf is cut on; None if it goes whole to every lane."""


class Shard(NamedTuple):
    """One lane's part of a call.

    Attributes:
        args: The positional arguments.
        kwargs: The keyword arguments.
        rows: The number of rows.
        leaves: The leaves of the arguments.
        origins: The caller's value of each copy, by the id of the copy. The leaves keep the copies
            alive, so no other object has such an id.
        loan: What the lane has borrowed, and its contents before the call.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rows: int
    leaves: Sequence[Any] = ()
    origins: dict[int, Any] = {}  # noqa: RUF012 -- nobody writes it
    loan: Loan = NOTHING


class ShardPlan:
    """How the calls of one structure are cut.

    Immutable; shared by every call of the structure and by every thread.

    Attributes:
        spec: The structure.
        dims: The dim of each leaf.
        sizes: The row counts of the shards.
        hint: A warning if an option would cut the call better; None if no option would.
        rows: The row count of the call.
        whole_tensors: The indices of the tensors that every lane gets whole.
        cut_tensors: The indices of the tensors that are cut into several parts.
        objects: The indices of the values with rules, each of which is a `WholeLeaf`.
        unknown: The indices of objects without rules, which are never cut.
        containers: The paths to the containers that forward may change.
    """

    def __init__(
        self,
        spec: TreeSpec,
        leaves: Sequence[Any],
        dims: Dims,
        sizes: tuple[int, ...],
        hint: str | None = None,
    ) -> None:
        self.spec = spec
        self.dims = dims
        self.sizes = sizes
        self.hint = hint
        self.rows = sum(sizes)
        self.whole_tensors: list[int] = []
        self.cut_tensors: list[int] = []
        self.objects: list[int] = []
        self.unknown: list[int] = []
        is_cut = len(sizes) > 1
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                if dims[index] is None:
                    self.whole_tensors.append(index)
                elif is_cut:
                    self.cut_tensors.append(index)
            elif isinstance(leaf, WholeLeaf):
                self.objects.append(index)
            elif not is_plain_value(leaf):
                self.unknown.append(index)
        self.containers = paths_of_containers(spec)

    def describe(self, shard: int) -> str:
        """Return the rows of a shard, for the note of an error."""
        return f"{self.sizes[shard]} of {self.rows} rows"

    # Scatter

    def columns(self, flat: FlatCall, copy: bool) -> list[Sequence[Any]]:
        """Return the parts of each leaf, one per size. All parts of an uncut leaf are the leaf.

        With `copy`, parts of tensors are copies, so that a lane may write into its part while
        autograd records: torch refuses such a write into one of several views. `write_back` brings
        the writes to the argument. Without `copy`, parts are views.
        """
        leaves = flat.leaves
        ids = set(map(id, leaves))
        if len(ids) == len(leaves):
            # `map` calls `_split` from C: before Python 3.12, a comprehension is one more function
            return [*map(self._split, count(), leaves, repeat(copy))]
        # One object at two places stays one object in each lane, unless each place has its own dim
        done: dict[tuple[int, int | None], Sequence[Any]] = {}
        columns: list[Sequence[Any]] = []
        for index, (leaf, dim) in enumerate(zip(leaves, self.dims, strict=True)):
            key = id(leaf), dim
            if key not in done:
                done[key] = self._split(index, leaf, copy)
            columns.append(done[key])
        return columns

    def place(
        self,
        flat: FlatCall,
        columns: Columns,
        index: int,
        device: torch.device,
    ) -> Shard:
        """Return a shard of these columns on a device.

        Parts from other devices are copied on the thread's streams. The lane owns the containers
        and copies that are made here, and borrows the rest; the loan has notes of both.
        """
        parts = [column[index] for column in columns]
        moved: dict[int, Any] = {}  # by the id of the part: one at two places stays one object
        leaves = []
        for part in parts:
            if id(part) not in moved:
                moved[id(part)] = _move(part, device)
            leaves.append(moved[id(part)])
        call = unflatten(flat.spec, leaves)

        # If all lanes return their copies of one argument, the output is the argument itself. Parts
        # of a cut tensor have no origin, since they are joined
        origins: dict[int, Any] = {}
        for placed, argument, dim in zip(leaves, flat.leaves, self.dims, strict=True):
            if isinstance(argument, WholeLeaf):
                origins[id(placed)] = argument.value
            elif dim is None and isinstance(argument, torch.Tensor):
                origins[id(placed)] = argument

        copied: Sequence[int] = ()
        shared: Sequence[int] = ()
        if self.objects or self.unknown:
            # `_move` has replaced each WholeLeaf by its value
            copied = [at for at in self.objects if leaves[at] is not flat.leaves[at].value]
            # An object that was neither cut nor moved is the caller's own. One lane may write it,
            # as the plain call does; several would each write once
            if len(self.sizes) > 1:
                others = (*self.objects, *self.unknown)
                shared = [at for at in others if at not in copied]

        loan = lend(
            call, self.containers, leaves=leaves, parts=parts, objects=copied, shared=shared
        )
        args, kwargs = call
        return Shard(args, kwargs, self.sizes[index], leaves, origins, loan)

    def scatter(self, flat: FlatCall, devices: Sequence[torch.device]) -> list[Shard]:
        """Return one shard per size, each on its device; `devices` has one entry per shard."""
        columns = self.columns(flat, copy=False)
        return [self.place(flat, columns, index, each) for index, each in enumerate(devices)]

    def _split(self, index: int, leaf: Any, copy: bool) -> Sequence[Any]:
        """Return the parts of one leaf."""
        dim, sizes = self.dims[index], self.sizes
        if dim is None or len(sizes) == 1:
            return (leaf,) * len(sizes)
        if isinstance(leaf, WholeLeaf):
            value = leaf.value
            parts = splitter_of(value).split(value, sizes)
            if len(parts) != len(sizes):
                msg = (
                    f"the split of {type(value).__name__} returned {len(parts)} parts for "
                    f"{len(sizes)} sizes, {list(sizes)}"
                )
                raise ShardError(msg)
            return [WholeLeaf(part) for part in parts]
        # A copy of an inference tensor may have no version to find a write by. Its parts are views,
        # through which a lane writes into the argument itself
        copy = copy and not leaf.is_inference()
        try:
            if copy and leaf.is_contiguous():
                return _split_copies(leaf, sizes, dim)
            views: Sequence[torch.Tensor] = leaf.split_with_sizes(sizes, dim)
        except (RuntimeError, NotImplementedError) as error:
            if is_dense(leaf) and not leaf.is_quantized:
                raise
            self._refuse_layout(index, leaf, error)
        # A clone of a view keeps its memory format
        return [view.clone() for view in views] if copy else views

    def _refuse_layout(self, index: int, leaf: torch.Tensor, error: Exception) -> NoReturn:
        """Refuse to cut a sparse or nested tensor, or one that is quantized per channel."""
        kind = "nested tensor" if leaf.is_nested else f"tensor of layout {leaf.layout}"
        if leaf.is_quantized:
            kind = "tensor that is quantized per channel"
        msg = (
            f"{self._name(index)} is a {kind}, which torch cannot split. Pass a dense "
            "tensor to cut it. A parallel block whose in_dims has None for its parameter "
            "gives it whole to every lane"
        )
        raise ShardError(msg) from error

    # After forward

    def find_whole_leaves(self, flat: FlatCall) -> dict[int, Any]:
        """Return the values that every lane gets whole, by their ids."""
        found: dict[int, Any] = {}
        for leaf, dim in zip(flat.leaves, self.dims, strict=True):
            if dim is None:
                # Forward sees the value alone, and may return it
                value = leaf.value if isinstance(leaf, WholeLeaf) else leaf
                found[id(value)] = value
        return found

    def read_versions(self, flat: FlatCall) -> list[int]:
        """Return the version of each tensor that every lane gets whole.

        A write in place changes it. Inference tensors have no version.
        """
        tensors = [flat.leaves[index] for index in self.whole_tensors]
        return [version_of(tensor) for tensor in tensors if not tensor.is_inference()]

    def find_borrowed(
        self, flat: FlatCall, given: tuple[tuple[Any, ...], dict[str, Any]], loans: Sequence[Loan]
    ) -> Borrowed | None:
        """Return what the lanes have borrowed from `given`, the caller's own arguments.

        None if all arguments are tensors and plain values.
        """
        if not (self.containers or self.objects or self.unknown):
            return None
        whole: Sequence[int] = ()
        if len(self.sizes) > 1:  # a single lane may write what it has whole
            uncut = [index for index in self.objects if self.dims[index] is None]
            # Each lane fills its copy of an empty cache, also if the cache is declared as whole
            whole = [index for index in uncut if not _is_empty(flat.leaves[index].value)]
        return Borrowed(given, self.containers, flat.leaves, loans, whole, self.sizes, self._name)

    def write_back(self, flat: FlatCall, columns: Columns, loans: Sequence[Loan]) -> None:
        """Repeat what lanes wrote into their copies of tensors in the caller's arguments.

        `columns` are the parts, from `ShardPlan.columns`. A write into a part that is a view needs
        no repetition: it has reached the argument.

        Raises:
            ShardError: If lanes wrote into copies of a tensor that each of them got whole, or that
                shares memory with another argument, or changed a shape in place.
        """
        if torch.is_grad_enabled():
            self._write_back_with_graph(flat, columns, loans)
            return
        for loan in loans:
            for moved in filter(_is_written, loan.moved):
                self._check_not_whole(moved.leaf)
                self._check_shares_no_memory(flat, moved.leaf)
                record_use([moved.copied])  # made on the lane's stream, and read on this one
                if moved.copied.shape != moved.part.shape:
                    self._refuse_new_shape(moved.leaf)
                moved.part.copy_(moved.copied)

    def _write_back_with_graph(
        self, flat: FlatCall, columns: Columns, loans: Sequence[Loan]
    ) -> None:
        """Do what `write_back` does while autograd records: then parts are copies."""
        by_lane = [{moved.leaf: moved for moved in loan.moved} for loan in loans]
        if not loans:  # a call of plain tensors, of which none moved
            by_lane = [{}] * len(self.sizes)
        # The tensors that were cut or moved. Each lane has the others themselves, so a write there
        # needs no repetition
        indices = set(self.cut_tensors)
        for moved_leaves in by_lane:
            indices.update(moved_leaves)  # its keys
        done: set[int] = set()  # one object at two places has one list of parts
        for index in sorted(indices):
            argument, parts = flat.leaves[index], columns[index]
            if id(parts) in done:
                continue
            done.add(id(parts))
            # `_split` returns views of an inference tensor, and copies of any other. If a part was
            # moved, `_read_written` reads the copy that the lane has of it
            is_copied = index in self.cut_tensors and not argument.is_inference()
            written = self._read_written(index, parts, by_lane, is_copied=is_copied)
            if written is not None:
                self._check_not_whole(index)
                self._check_shares_no_memory(flat, index)
                self._write_parts(index, argument, written)

    def _read_written(
        self,
        index: int,
        parts: Sequence[torch.Tensor],
        by_lane: Sequence[dict[int, Moved]],
        *,
        is_copied: bool,
    ) -> _Written | None:
        """Return the parts of a leaf as they are now; None if no lane wrote its part.

        `is_copied` is True if parts that were not moved are copies, and not views.
        """
        is_written = is_recorded = False
        now: list[torch.Tensor] = []
        for part, moved_leaves in zip(parts, by_lane, strict=True):
            moved = moved_leaves.get(index)
            if moved is not None:
                now.append(moved.copied)
                is_part_written = _is_written(moved)
                has_new_node = moved.copied.grad_fn is not moved.node
            else:
                now.append(part)
                # A copy of a part was made for this call, so its version was 0
                is_part_written = is_copied and version_of(part) > 0
                node = part.grad_fn
                has_new_node = node is not None and not node.name().startswith(_COPY_NODES)
            is_written = is_written or is_part_written
            is_recorded = is_recorded or has_new_node
        return _Written(now, is_recorded) if is_written else None

    def _write_parts(self, index: int, argument: torch.Tensor, written: _Written) -> None:
        """Write the parts into an argument. Autograd records that if it recorded a lane's write."""
        record_use(written.parts)  # made on the lanes' streams, and read on this one
        with torch.set_grad_enabled(written.is_recorded):
            at_home = [transfer(part, argument.device) for part in written.parts]
            if len(at_home) == 1:
                (joined,) = at_home
            else:
                dim = self.dims[index]
                assert dim is not None  # `_check_not_whole` has refused several whole parts
                joined = torch.cat(at_home, dim)
            if joined.shape != argument.shape:
                self._refuse_new_shape(index)
            argument.copy_(joined)

    def _check_not_whole(self, index: int) -> None:
        """Refuse a write into a tensor that several lanes have whole: each of them wrote once."""
        if self.dims[index] is None and len(self.sizes) > 1:
            raise ShardError(WRITTEN_WHOLE)

    def _check_shares_no_memory(self, flat: FlatCall, index: int) -> None:
        """Refuse a write into a copy of a tensor that shares memory with another argument.

        Lanes have copies of both, so forward does not see the write in the other one.
        """
        argument = flat.leaves[index]
        for other, leaf in enumerate(flat.leaves):
            # One object at two places has one copy
            if leaf is not argument and _share_memory(argument, leaf):
                msg = (
                    f"forward writes {self._name(index)} in place, which shares memory with "
                    f"{self._name(other)}, and each lane has copies of both. Pass a clone of "
                    f"{self._name(other)}, or use an out-of-place operation"
                )
                raise ShardError(msg)

    def _refuse_new_shape(self, index: int) -> NoReturn:
        msg = f"{self._name(index)}: {_NEW_SHAPE}"
        raise ShardError(msg)

    def _name(self, index: int) -> str:
        return address_in_call(self.spec.paths()[index])


def _share_memory(written: torch.Tensor, other: Any) -> bool:
    """True if two values are dense tensors with a common element.

    Subclasses of tensors are left out: they may have no memory of their own.
    """
    for each in (written, other):
        if type(each) not in TENSORS or not is_dense(each) or each.is_meta:
            return False
    storage = written.untyped_storage()
    if storage.data_ptr() != other.untyped_storage().data_ptr():
        return False
    if written.dtype != other.dtype:  # a view of other elements, such as the parts of a complex one
        return True
    # Marks the written elements: those of two columns of one matrix lie between each other
    elements = torch.zeros(storage.nbytes() // written.element_size(), dtype=torch.bool)
    _view_like(written, elements).fill_(True)
    return bool(_view_like(other, elements).any())


def _view_like(tensor: torch.Tensor, elements: torch.Tensor) -> torch.Tensor:
    """Return a view of `elements` at the places that a tensor has in its own storage."""
    return elements.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _is_empty(value: Any) -> bool:
    """True for an object without rows that forward fills, such as a cache before its first call."""
    rules = splitter_of(value)
    return rules.may_be_empty and rules.rows(value) == 0


class _Written(NamedTuple):
    """The parts of a tensor of which lanes have written one or more.

    Attributes:
        parts: The parts of all lanes, as they are now.
        is_recorded: True if autograd recorded a write.
    """

    parts: Sequence[torch.Tensor]
    is_recorded: bool


def _is_written(moved: Moved) -> bool:
    return version_of(moved.copied) != moved.version


def _move(leaf: Any, device: torch.device) -> Any:
    """Return a leaf on a device, and the value in place of a `WholeLeaf`."""
    is_whole = isinstance(leaf, WholeLeaf)
    if not is_whole and not isinstance(leaf, torch.Tensor):
        return leaf
    is_copied = is_whole or leaf.device != device
    # A copy made in inference mode would have no version, which shows a write in place
    must_have_version = is_copied and torch.is_inference_mode_enabled()
    with lasting() if must_have_version else nullcontext():
        return place_leaf(leaf, device) if is_whole else transfer(leaf, device)


class Cutter:
    """Plans the calls of one method of a target. Threads may share a cutter.

    Args:
        dim: The dim of the rows of arguments that `in_dims` does not name.
        in_dims: Where the rows of arguments lie, by the names of the target's parameters.
        parameters: The names of the target's parameters; None if they are not known.
        lists_are_shared: True for the rules of torch.nn.DataParallel: every lane gets the same list
            or object.
        sizes: Returns the units of each shard, from the number of units and the number of lanes.
        unit: The rows of a unit, which stay together.
        warns: True if plans with a large shard get a hint.
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
        self._dim = dim
        self._in_dims = self._declarations.in_dims
        self._lists_are_shared = lists_are_shared
        self._choose_sizes = sizes
        self._unit = unit
        self._warns = warns
        self._dims: dict[TreeSpec, Dims] = {}
        # The keys are those of `plan_of_tensors` and of `plan`, which differ in length
        self._plans: dict[tuple[Any, ...], ShardPlan] = {}

    def plan_of_tensors(self, args: tuple[Any, ...], lanes: int) -> ShardPlan | None:
        """Return the plan of a call of positional plain tensors on the CPU; None for any other.

        The shapes alone are the key: such a call is not taken apart again.
        """
        if not args or self._in_dims or not TENSOR.issuperset(map(type, args)):
            return None
        if not all(map(_on_cpu, args)) or any(map(_attributes_of, args)):
            return None
        try:
            key = lanes, tuple(map(_shape_of, args))
        except RuntimeError:  # a nested tensor has no shape
            return None
        plan = self._plans.get(key)
        if plan is None:
            plan = self.plan(self.flatten(args, {}), lanes)
            _keep(self._plans, key, plan)
        return plan

    def flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatCall:
        """Return a call taken apart, with sequences that `in_dims` cuts by item as leaves."""
        if self._in_dims:
            args, kwargs = self._declarations.mark_items(args, kwargs)
        leaves, spec = flatten((args, kwargs))
        extents = tuple(map(extent_of, leaves, self._dims_of(spec)))
        return FlatCall(leaves, spec, extents)

    def plan(self, flat: FlatCall, lanes: int) -> ShardPlan:
        """Return the plan for a call.

        Raises:
            ShardError: If row counts disagree, an argument may or may not have one item per row, a
                dim is out of range, or the batch is not a multiple of `unit`.
        """
        key = flat.spec, flat.extents, tuple(map(type, flat.leaves)), lanes
        plan = self._plans.get(key)
        if plan is None:
            plan = self._make_plan(flat, self._dims_of(flat.spec), lanes)
            # Another object of the same class may hold tensors, for which `_make_plan` refuses it
            if OBJECT not in flat.extents:
                _keep(self._plans, key, plan)
        cut = [flat.leaves[index] for index in plan.cut_tensors]
        if any(map(_attributes_of, cut)) and not self._lists_are_shared:
            refuse_attributes(self._declarations, flat, plan.cut_tensors)
        return plan

    def whole(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[ShardPlan, FlatCall]:
        """Return the plan that gives this call uncut to one lane, and the call taken apart.

        Row counts may disagree: the rows of the plan are those of the first leaf with rows.
        """
        leaves, spec = flatten((args, kwargs))
        extents = map(extent_of, leaves, self._dims_of(spec))
        rows = next((extent for extent in extents if extent >= 0), 0)  # 0 without such a leaf
        whole = (None,) * len(leaves)
        return ShardPlan(spec, leaves, whole, (rows,)), FlatCall(leaves, spec)

    def rows(self, args: tuple[Any, ...]) -> int:
        """Return the row count of a call of tensors: that of the first one with rows, or 0."""
        for index, leaf in enumerate(args):
            extent = extent_of(leaf, self._declarations.dim_at((0, index)))
            if extent >= 0:
                return extent
        return 0

    def _make_plan(self, flat: FlatCall, dims: Dims, lanes: int) -> ShardPlan:
        """Return a new plan for a call, or refuse the call."""
        refuse_dims_out_of_range(self._declarations, flat, dims)
        rows = self._read_rows(flat, dims)
        is_cut = rows is not None and rows > 1 and lanes > 1
        # torch.nn.DataParallel gives lists and objects whole to every lane
        is_strict = is_cut and not self._lists_are_shared
        refuse_unclear(self._declarations, flat, rows, is_cut=is_cut, is_strict=is_strict)
        if rows is None:
            whole = (None,) * len(flat.leaves)
            return ShardPlan(flat.spec, flat.leaves, whole, (0,))
        if rows % self._unit:
            refuse_broken_units(flat, rows, self._unit)
        units = rows // self._unit
        sizes = tuple(self._unit * each for each in self._choose_sizes(units, lanes))
        # A leaf of one row goes whole to every lane. A cache without rows is cut into empty caches,
        # which will have the rows of their lanes
        cut_extents = (rows, EMPTY) if rows != 1 else ()
        cut_dims: list[int | None] = []
        for dim, extent in zip(dims, flat.extents, strict=True):
            cut_dims.append(dim if extent in cut_extents else None)
        hint = self._write_hint(sizes, units, lanes) if self._warns else None
        return ShardPlan(flat.spec, flat.leaves, tuple(cut_dims), sizes, hint)

    def _read_rows(self, flat: FlatCall, dims: Dims) -> int | None:
        """Return the row count of a call; None if no leaf has rows."""
        counts = {extent for extent in flat.extents if extent >= 0}
        # One row next to more is the same for every row, as in torch's broadcasting
        other_counts = counts - {1}
        if len(other_counts) > 1:
            refuse_disagreement(self._declarations, flat, dims)
        if other_counts:
            (rows,) = other_counts
            return rows
        return 1 if counts else None  # only leaves of one row, or none with rows

    def _write_hint(self, sizes: Sequence[int], units: int, lanes: int) -> str | None:
        """Return a warning if the first shard is much larger than in a balanced cut."""
        choose_sizes = sizes_of_block(self._unit, are_uneven=False)
        largest_in_units = choose_sizes(units, lanes)[0]
        largest = self._unit * largest_in_units
        return hint_of_sizes(sizes, largest, lanes, self._dim)

    def _dims_of(self, spec: TreeSpec) -> Dims:
        """Return the dim of each leaf of the calls of one structure."""
        if not self._in_dims:
            return (self._dim,) * spec.num_leaves
        dims = self._dims.get(spec)
        if dims is None:
            dims = tuple(map(self._declarations.dim_at, spec.paths()))
            _keep(self._dims, spec, dims)
        return dims


def _keep(cache: dict[Any, Any], key: Any, value: Any) -> None:
    """Add an entry to a cache of limited size."""
    # `clear` and the assignment are one step each, so no lock is needed: at worst, two threads make
    # the same entry, or one thread drops a new entry of another
    if len(cache) >= _MOST_PLANS:
        cache.clear()
    cache[key] = value
