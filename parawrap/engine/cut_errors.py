"""Errors of calls that cannot be cut.

Each error names every value concerned, and the `in_dims` that settle all of them at once.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from parawrap.engine.flat_call import (
    ARRAY,
    BEYOND,
    OBJECT,
    FlatCall,
    address_in_call,
    has_items,
)
from parawrap.engine.in_dims import InDims
from parawrap.engine.lent_containers import Path
from parawrap.engine.rules.registry import registration_of
from parawrap.engine.rules.transformers_caches import is_cache
from parawrap.errors import ShardError
from parawrap.tree import UNDECLARED, TreeSpec, list_attributes, tensors_in

# Values that an error describes, so that it stays readable; its cure names every argument
_MOST_LISTED = 20
# If more values have a multiple of the rows, they are rather a dict of parameters: a guess that no
# test has contradicted
_MOST_MULTIPLES = 4

Entries = dict[Path, str | int | None]
"""Entries of `in_dims`, by the path of an argument or of a value in it. None: it goes whole."""


class _LeafWithRows(NamedTuple):
    """A leaf of a call that has rows: its path, their number, and the dim that they lie on."""

    leaf: Any
    path: Path
    rows: int
    dim: int | None

    @property
    def argument(self) -> Path:
        """The path to the argument that the leaf lies in."""
        return self.path[:2]


class _Unclear(NamedTuple):
    """A value that is refused until `in_dims` declares it.

    Attributes:
        path: The path to the value.
        description: The value and why it is refused, in words.
        may_be_items: True if the value may have one item per row.
    """

    path: Path
    description: str
    may_be_items: bool = False


def refuse_disagreement(
    declarations: InDims, flat: FlatCall, dims: Sequence[int | None]
) -> NoReturn:
    """Refuse leaves with different row counts."""
    leaves = _find_leaves_with_rows(flat, dims)
    batch = _guess_batch(leaves)
    with_rows = [leaf for leaf in leaves if leaf.rows == batch]
    others = [leaf for leaf in leaves if leaf.rows != batch]

    # One leaf with the rows of the batch is enough for the comparison
    shown = [*others[:_MOST_LISTED], with_rows[0]]
    listed = [f"{address_in_call(leaf.path)} has {leaf.rows} on dim {leaf.dim}" for leaf in shown]
    msg = f"the rows of the call disagree: {', '.join(listed)}. "

    # A cure names a leaf if its argument has other leaves with the rows, and else the argument
    cut_arguments = {leaf.argument for leaf in with_rows}
    refused: dict[Path, list[_LeafWithRows]] = {}  # by the path that a cure names
    for leaf in others:
        path = leaf.path if leaf.argument in cut_arguments else leaf.argument
        refused.setdefault(path, []).append(leaf)
    whole: Entries = dict.fromkeys(refused)
    whole_arguments: Entries = {path[:2]: None for path in refused}
    cures = [whole]
    # The shorter cure comes first, unless it would leave no argument to cut
    keeps_an_argument = bool(cut_arguments - whole_arguments.keys())
    if whole_arguments != whole and keeps_an_argument:
        cures.insert(0, whole_arguments)
    for entries in cures:
        places = _join_places(entries)
        such_as = "" if entries is whole else ", such as a dict of parameters"
        cure = declarations.write_cure(entries, flat.spec.paths())
        msg += f"To give {places} whole to every lane{such_as}, use {cure}. "

    # Other meanings of the values, and their cures
    msg += _say_other_dims(declarations, flat, refused, batch)
    msg += _say_items(declarations, flat, whole, batch)
    msg += _say_multiples(leaves, batch)
    msg += (
        "If none of these fits, as for offsets into another argument, give each lane a whole "
        "batch: `map` of the block, or TupleParallel"
    )
    raise ShardError(msg)


def _find_leaves_with_rows(flat: FlatCall, dims: Sequence[int | None]) -> list[_LeafWithRows]:
    """Return the leaves with rows, except those of one row, which fit any batch."""
    found: list[_LeafWithRows] = []
    columns = zip(flat.leaves, flat.spec.paths(), flat.extents, dims, strict=True)
    for leaf, path, extent, dim in columns:
        if extent >= 0 and extent != 1:
            found.append(_LeafWithRows(leaf, path, extent, dim))
    return found


def _guess_batch(leaves: Sequence[_LeafWithRows]) -> int:
    """Return the row count of most arguments that are leaves; if there are none, of most leaves."""
    # A container, such as a dict of parameters, often has more tensors than there are arguments
    of_arguments = [leaf.rows for leaf in leaves if leaf.path == leaf.argument]
    of_leaves = [leaf.rows for leaf in leaves]
    ((batch, _),) = Counter(of_arguments or of_leaves).most_common(1)
    return batch


def _say_other_dims(
    declarations: InDims,
    flat: FlatCall,
    refused: Mapping[Path, Sequence[_LeafWithRows]],
    batch: int,
) -> str:
    """Return the `in_dims` that cut values on another dim, if one other dim has the rows.

    `refused` are the leaves that disagree, by the path that a cure names.
    """
    whole: Entries = dict.fromkeys(refused)
    by_dim: dict[Path, int] = {}
    for path, leaves in refused.items():
        # All leaves at the path must have the size on the same dim, and on no other
        dims_of_leaves = [_dims_of_size(each.leaf, batch) for each in leaves]
        all_have_size = all(dims_of_leaves)  # an empty set is false
        dims = set().union(*dims_of_leaves)
        if all_have_size and len(dims) == 1:
            by_dim[path] = dims.pop()
    if not by_dim:
        return ""
    named = " and ".join(f"dim {dim}" for dim in sorted(set(by_dim.values())))
    cure = declarations.write_cure(whole | by_dim, flat.spec.paths())
    return f"If the rows of {_join_places(by_dim)} lie on {named}, use {cure}. "


def _dims_of_size(leaf: Any, size: int) -> set[int]:
    """Return the dims of a tensor that have this size."""
    if not isinstance(leaf, torch.Tensor) or leaf.is_nested:
        return set()
    return {dim for dim, each in enumerate(leaf.shape) if each == size}


def _say_items(declarations: InDims, flat: FlatCall, whole: Entries, batch: int) -> str:
    """Return the `in_dims` that cut values by item, if they are as long as the batch.

    `whole` are the entries that give each value whole to every lane.
    """
    paths = flat.spec.paths()
    by_item: Entries = {}
    for argument in whole:
        # The path of a value in an argument is longer than two keys, so nothing is found for it
        items = {path[2] for path in paths if path[:2] == argument and len(path) > 2}
        is_sequence = all(isinstance(item, int) for item in items)
        is_declared = declarations.find(argument) == "items"
        if is_sequence and len(items) == batch and not is_declared:
            by_item[argument] = "items"
    if not by_item:
        return ""
    has = "has" if len(by_item) == 1 else "have"
    cure = declarations.write_cure(whole | by_item, paths)
    return f"If {_join_places(by_item)} {has} one item per row, use {cure}. "


def _say_multiples(leaves: Sequence[_LeafWithRows], batch: int) -> str:
    """Return the advice for values that have several entries per row, such as patches."""
    # `batch` is the most frequent count, which may be that of the patches. If each count is a
    # multiple of the smallest one, the smallest one is the batch
    fewest = min(leaf.rows for leaf in leaves)
    if fewest > 0 and all(leaf.rows % fewest == 0 for leaf in leaves):
        batch = fewest
    if batch == 0:
        return ""
    multiples = [leaf for leaf in leaves if leaf.rows > batch and leaf.rows % batch == 0]
    if len(multiples) > _MOST_MULTIPLES:
        return ""
    by_count: dict[int, list[Path]] = {}
    for leaf in multiples:
        by_count.setdefault(leaf.rows // batch, []).append(leaf.path)
    said = ""
    for count, paths in by_count.items():
        has, it = ("has", "it") if len(paths) == 1 else ("have", "them")
        said += (
            f"If {_join_places(paths)} {has} {count} entries per row, as "
            f"patches, frames, or masks with one row per head, pass {it} as "
            f"({batch}, {count}, ...), and use flatten(0, 1) in the target. "
        )
    return said


def refuse_attributes(declarations: InDims, flat: FlatCall, cut: Sequence[int]) -> None:
    """Refuse cut tensors with attributes, which their parts would not have.

    `cut` are the indices of the leaves to look at.
    """
    paths = flat.spec.paths()
    whole: Entries = {}
    names: dict[str, None] = {}  # a dict, since the order of a set differs between processes
    registrations: set[str] = set()
    for index in cut:
        leaf = flat.leaves[index]
        attributes = list_attributes(leaf)
        if attributes:
            whole[paths[index]] = None
            names.update(dict.fromkeys(attributes))
            registrations.add(registration_of(type(leaf)))
    if not whole:
        return
    cure = declarations.write_cure(whole, paths)
    msg = (
        f"the parts of a cut tensor lose attributes of its own ({', '.join(names)}), as of "
        f"{_join_places(whole)}. Use {' and '.join(sorted(registrations))} to cut them too, pass "
        f"the attributes as arguments of their own, or use {cure} to give the tensor whole to "
        "every lane"
    )
    raise ShardError(msg)


def refuse_dims_out_of_range(
    declarations: InDims, flat: FlatCall, dims: Sequence[int | None]
) -> None:
    """Refuse tensors without the dim of their rows.

    `in_dims` names the dim for them, or no tensor of the call has the dim.
    """
    without_dim = [index for index, extent in enumerate(flat.extents) if extent == BEYOND]
    paths = flat.spec.paths()
    wrong = [index for index in without_dim if declarations.find(paths[index]) is not UNDECLARED]
    # Next to tensors with rows, an undeclared tensor with fewer dims goes whole to every lane
    has_rows = any(extent >= 0 for extent in flat.extents)
    if not wrong and not has_rows:
        wrong = without_dim
    if not wrong:
        return
    first = wrong[0]
    shape = tuple(flat.leaves[first].shape)
    places = _join_places(paths[index] for index in wrong)
    msg = (
        f"dim {dims[first]} is out of range for {places}, of shape {shape}: it has "
        f"{len(shape)} dimensions. Use a dim from {-len(shape)} to {len(shape) - 1}"
    )
    raise ShardError(msg)


def refuse_broken_units(flat: FlatCall, rows: int, unit: int) -> NoReturn:
    """Refuse a batch that is not a multiple of `unit`."""
    # All leaves with rows have this count, so the error names the first one
    first = flat.spec.paths()[flat.extents.index(rows)]
    fewer = rows - rows % unit
    sizes = f"{fewer} or {fewer + unit}" if fewer else f"{unit}"
    msg = (
        f"{address_in_call(first)} has {rows} rows, not a multiple of unit={unit}. Pass a batch of "
        f"{sizes} rows, or another unit"
    )
    raise ShardError(msg)


def refuse_unclear(
    declarations: InDims, flat: FlatCall, rows: int | None, *, is_cut: bool, is_strict: bool
) -> None:
    """Refuse values that parawrap cannot cut, or that may or may not be cut.

    If the call `is_cut`, iterators are refused, since lanes would take turns with them. With
    `is_strict`, each object of an unknown class is refused until `in_dims` declares it, and each
    sequence that is as long as the batch.
    """
    found: list[_Unclear] = []
    if is_strict:
        found += _find_sequences(declarations, flat.spec, flat.extents, rows or 0)
    if any(extent == OBJECT or extent <= ARRAY for extent in flat.extents):
        # An object inside a list that is named already needs no second entry
        lists = [each.path for each in found]
        for each in _find_objects(flat, rows, is_cut=is_cut, is_strict=is_strict):
            is_in_list = any(each.path[: len(outer)] == outer for outer in lists)
            if not is_in_list:
                found.append(each)
    if not found:
        return
    it = "it" if len(found) == 1 else "them"
    whole: Entries = {each.path: None for each in found}
    by_item: Entries = {each.path: "items" if each.may_be_items else None for each in found}
    paths = flat.spec.paths()
    cures = f"{declarations.write_cure(whole, paths)} gives {it} whole to every lane"
    if by_item != whole:
        cures = f"{declarations.write_cure(by_item, paths)} cuts {it} by item, and {cures}"
    said = "; ".join(each.description for each in found[:_MOST_LISTED])
    msg = f"{said}. {cures}"
    raise ShardError(msg)


def _find_objects(
    flat: FlatCall, rows: int | None, *, is_cut: bool, is_strict: bool
) -> Iterator[_Unclear]:
    """Yield objects of unknown classes and arrays, which all lanes would share."""
    for path, leaf, extent in zip(flat.spec.paths(), flat.leaves, flat.extents, strict=True):
        place = address_in_call(path)
        is_a = f"{place} is a {type(leaf).__name__}"
        if extent <= ARRAY and is_strict:
            length = ARRAY - extent
            fits = length in (1, rows)  # one item is the same for every row
            description = f"{place} is an array with {length} rows, and the batch has {rows}"
            if fits:
                description += ". Pass torch.from_numpy(...) of it"
            yield _Unclear(path, description, may_be_items=fits)
        if extent != OBJECT:
            continue
        has_tensors = any(True for _ in tensors_in(leaf))
        if isinstance(leaf, torch.Tensor):
            description = (
                f"{place} is a nested tensor whose parts differ in size on the dim of the rows, so "
                "it has no row count. Pass a dense tensor to cut it"
            )
            yield _Unclear(path, description)
        elif has_tensors:
            # Refused in any case: in a lane on another device, it would have tensors of this one
            description = (
                f"{is_a}, which holds tensors, and parawrap does not know how to cut it. Use "
                f"{registration_of(type(leaf))} to cut it"
            )
            if is_cache(leaf):
                description += ", or pass no cache and use_cache=False"
            yield _Unclear(path, description)
        elif isinstance(leaf, Iterator) and (is_strict or is_cut):
            # Raised at once: no entry of `in_dims` gives each lane its own items
            msg = f"{is_a}, and lanes would take its items from each other. Pass a list of them"
            raise ShardError(msg)
        elif is_strict:
            description = (
                f"{is_a}, which may have one item per row, or a state that each lane would change"
            )
            yield _Unclear(path, description, may_be_items=_may_have_items(leaf, rows))


def _may_have_items(value: Any, rows: int | None) -> bool:
    """True if a value may have one item per row. A single item is the same for every row."""
    return has_items(value) and len(value) in (1, rows)


def _find_sequences(
    declarations: InDims,
    node: TreeSpec,
    extents: Sequence[int],
    rows: int,
    path: Path = (),
) -> Iterator[_Unclear]:
    """Yield undeclared lists and tuples without rows that are as long as the batch, and deques.

    A list may have one item per row or be one value for all rows. Each lane would get its own copy
    of a deque. `node` is at this path, and its leaves have these extents.
    """
    kind, items = node.type, node.num_children
    is_in_arguments = len(path) >= 2  # and not the pair (args, kwargs), args, or kwargs
    may_be_items = kind is deque or (kind in (list, tuple) and items == rows)
    # A tensor of one row does not count: it would go whole to every lane
    has_rows = any(extent >= 0 and extent != 1 for extent in extents)
    is_unclear = is_in_arguments and may_be_items and not has_rows
    if is_unclear and declarations.find(path) is UNDECLARED:
        assert kind is not None  # which only a leaf has
        has = "with tensors of one row" if 1 in extents else "without a tensor"
        fits = items in (1, rows)  # one item is the same for every row
        why = "each lane would get its own copy"
        if fits:
            why = "it may have one item per row or be one value for all rows"
        description = (
            f"{address_in_call(path)} is a {kind.__name__} of {items} items {has}, "
            f"and the batch has {rows} rows: {why}"
        )
        yield _Unclear(path, description, may_be_items=fits)
    start = 0  # the leaves of the children follow each other
    for entry, child in zip(node.entries(), node.children(), strict=True):
        end = start + child.num_leaves
        below = extents[start:end]
        yield from _find_sequences(declarations, child, below, rows, (*path, entry))
        start = end


def _join_places(paths: Iterable[Path]) -> str:
    """Return the addresses of values of a call, in words."""
    *first, last = map(address_in_call, paths)
    return f"{', '.join(first)} and {last}" if first else last
