"""Errors of calls that cannot be cut.

Each error names every value concerned, and the `in_dims` that settle all of them at once.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from parawrap.engine.flat_call import ARRAY, BEYOND, CALL_ROOTS, OBJECT, FlatCall, has_items
from parawrap.engine.in_dims import InDims
from parawrap.engine.rules.registry import registration_of
from parawrap.engine.rules.transformers_caches import is_cache
from parawrap.errors import ShardError
from parawrap.tree import UNDECLARED, TreeSpec, address, addresses, list_attributes, tensors_in

_MOST_LISTED = 20  # values, in an error; its cure names every argument
_MOST_MULTIPLES = 4  # more values with multiples of the rows are a dict of parameters


class _Unclear(NamedTuple):
    """A value of a call that may or may not be cut: its place, and its description for an error."""

    path: tuple[Any, ...]
    says: str
    may_be_items: bool = False


def refuse_disagreement(
    declarations: InDims, flat: FlatCall, dims: Sequence[int | None]
) -> NoReturn:
    """Refuse leaves with different row counts.

    The batch has the count of most arguments that are tensors; without such arguments, that of most
    leaves.
    """
    where = addresses(flat.spec, CALL_ROOTS)
    paths = flat.spec.paths()
    # One row goes with any batch, as in torch's broadcasting.
    found = {index: rows for index, rows in enumerate(flat.extents) if rows >= 0 and rows != 1}
    of_arguments = [rows for index, rows in found.items() if len(paths[index]) == 2]
    counts = Counter(of_arguments or found.values())
    ((batch, _),) = counts.most_common(1)
    others: list[int] = []
    with_rows: list[int] = []
    for index, rows in found.items():
        if rows == batch:
            with_rows.append(index)
        else:
            others.append(index)

    # A cure names a leaf if its argument has other leaves with the rows, and else the argument.
    cut = {paths[index][:2] for index in with_rows}
    parts: dict[tuple[Any, ...], None] = {}
    for index in others:
        path = paths[index]
        argument = path[:2]
        parts[path if argument in cut else argument] = None
    arguments = {path[:2]: None for path in parts}
    # One leaf with the rows of the batch is enough for the comparison.
    shown = [*others[:_MOST_LISTED], with_rows[0]]
    listed = [f"{where[index]} has {found[index]} on dim {dims[index]}" for index in shown]
    msg = f"the rows of the call disagree: {', '.join(listed)}. "
    # The shorter cure comes first, unless it would leave no argument to cut.
    keeps_an_argument = cut - arguments.keys()
    if arguments != parts and keeps_an_argument:
        places = _join_places(arguments)
        cure = declarations.write_cure(arguments)
        msg += f"To give {places} whole to every lane, such as a dict of parameters, use {cure}. "
    places = _join_places(parts)
    cure = declarations.write_cure(parts)
    msg += f"To give {places} whole to every lane, use {cure}. "
    of_part: dict[tuple[Any, ...], list[int]] = {part: [] for part in parts}
    for index in others:
        part = paths[index] if paths[index] in of_part else paths[index][:2]
        of_part[part].append(index)
    msg += _say_other_cuts(declarations, flat, of_part, batch)
    msg += _say_multiples({where[index]: rows for index, rows in found.items()}, batch)
    msg += (
        "If none of these fits, as for offsets into another argument, give each lane a whole "
        "batch: `map` of the block, or TupleParallel"
    )
    raise ShardError(msg)


def _say_other_cuts(
    declarations: InDims, flat: FlatCall, of_part: Mapping[tuple[Any, ...], list[int]], batch: int
) -> str:
    """Return the `in_dims` that cut values on another dim, or by item, where their sizes allow it.

    `of_part` are the leaves that disagree, by the path of the value that a cure names.
    """
    paths = flat.spec.paths()
    by_dim: dict[tuple[Any, ...], int] = {}
    by_item: dict[tuple[Any, ...], str] = {}
    for part, indices in of_part.items():
        dims = {dim for index in indices for dim in _dims_of_size(flat.leaves[index], batch)}
        has_dim = all(_dims_of_size(flat.leaves[index], batch) for index in indices)
        if len(dims) == 1 and has_dim:
            by_dim[part] = dims.pop()
        items = {path[2] for path in paths if path[:2] == part and len(path) > 2}
        is_sequence = all(isinstance(item, int) for item in items)
        if is_sequence and len(items) == batch and declarations.find(part) != "items":
            by_item[part] = "items"
    whole: dict[tuple[Any, ...], str | int | None] = dict.fromkeys(of_part)
    said = ""
    if by_dim:
        on = " and ".join(f"dim {dim}" for dim in sorted(set(by_dim.values())))
        said += f"If the rows of {_join_places(by_dim)} lie on {on}, use "
        said += f"{declarations.write_cure(whole | by_dim)}. "
    if by_item:
        has = "has" if len(by_item) == 1 else "have"
        said += f"If {_join_places(by_item)} {has} one item per row, use "
        said += f"{declarations.write_cure(whole | by_item)}. "
    return said


def _dims_of_size(leaf: Any, size: int) -> list[int]:
    """Return the dims of a tensor that have this size."""
    if not isinstance(leaf, torch.Tensor) or leaf.is_nested:
        return []
    return [dim for dim, each in enumerate(leaf.shape) if each == size]


def _say_multiples(found: Mapping[str, int], batch: int) -> str:
    """Return what to do with values that have several entries per row, such as patches.

    `found` are the counts of the values by their addresses.
    """
    of_count: dict[int, list[str]] = {}
    # Two arguments do not say which of them is the batch: images, or the patches of all images
    fewest = min(found.values())
    if fewest > 0 and all(rows % fewest == 0 for rows in found.values()):
        batch = fewest
    for place, rows in found.items():
        if batch > 0 and rows > batch and rows % batch == 0:
            of_count.setdefault(rows // batch, []).append(place)
    if sum(map(len, of_count.values())) > _MOST_MULTIPLES:
        return ""
    said = ""
    for count, places in of_count.items():
        one = len(places) == 1
        said += (
            f"If {_list_in_words(places)} {'has' if one else 'have'} {count} entries per row, as "
            f"patches, frames, or masks with one row per head, pass {'it' if one else 'them'} as "
            f"({batch}, {count}, ...), and use flatten(0, 1) in the target. "
        )
    return said


def refuse_attributes(declarations: InDims, flat: FlatCall, cut: Sequence[int]) -> None:
    """Refuse cut tensors with attributes of their own, which their parts would not have."""
    paths = flat.spec.paths()
    found: dict[tuple[Any, ...], None] = {}
    names: dict[str, None] = {}  # a dict, since a set has another order in every process
    rules: set[str] = set()
    for index in cut:
        leaf = flat.leaves[index]
        attributes = list_attributes(leaf)
        if attributes:
            found[paths[index]] = None
            names.update(dict.fromkeys(attributes))
            rules.add(registration_of(type(leaf)))
    if not found:
        return
    registrations = " and ".join(sorted(rules))
    whole = declarations.write_cure(found)
    msg = (
        f"the parts of a cut tensor lose attributes of its own ({', '.join(names)}), as of "
        f"{_join_places(found)}. Use {registrations} to cut them too, pass the attributes as "
        f"arguments of their own, or use {whole} to give the tensor whole to every lane"
    )
    raise ShardError(msg)


def refuse_dims_out_of_range(
    declarations: InDims, flat: FlatCall, dims: Sequence[int | None]
) -> None:
    """Refuse a tensor without its dim.

    `in_dims` names the dim for it, or no tensor of the call has the dim.
    """
    beyond = [index for index, extent in enumerate(flat.extents) if extent == BEYOND]
    paths = flat.spec.paths()
    wrong = [index for index in beyond if declarations.find(paths[index]) is not UNDECLARED]
    # Next to tensors with rows, an undeclared tensor with fewer dims goes whole to every lane.
    has_rows = any(extent >= 0 for extent in flat.extents)
    if not wrong and not has_rows:
        wrong = beyond
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
    where = addresses(flat.spec, CALL_ROOTS)
    # All leaves with rows have this count, so the first one stands for them.
    first = flat.extents.index(rows)
    fewer = rows - rows % unit
    sizes = f"{unit}"
    if fewer:
        sizes = f"{fewer} or {fewer + unit}"
    msg = (
        f"{where[first]} has {rows} rows, not a multiple of unit={unit}. Pass a batch of {sizes} "
        "rows, or another unit"
    )
    raise ShardError(msg)


def refuse_unclear(
    declarations: InDims, flat: FlatCall, rows: int | None, *, is_cut: bool, is_strict: bool
) -> None:
    """Refuse values that parawrap cannot cut, or that may or may not be cut.

    `in_dims` declares them. With `is_strict`, refuse every object: a deque or a generator of random
    numbers would advance or start again in each lane. Lanes of a call that `is_cut` would take
    turns with an iterator.
    """
    found: list[_Unclear] = []
    if is_strict:
        found += _find_sequences(declarations, flat, rows or 0, flat.spec)
    if any(extent <= OBJECT for extent in flat.extents):
        # An object inside a list that is named already needs no entry of its own.
        lists = [each.path for each in found]
        for each in _find_objects(flat, rows, is_cut=is_cut, is_strict=is_strict):
            is_in_list = any(each.path[: len(outer)] == outer for outer in lists)
            if not is_in_list:
                found.append(each)
    if not found:
        return
    it = "them"
    if len(found) == 1:
        it = "it"
    whole: dict[tuple[Any, ...], str | None] = {}
    by_item: dict[tuple[Any, ...], str | None] = {}
    for each in found:
        whole[each.path] = None
        by_item[each.path] = None
        if each.may_be_items:
            by_item[each.path] = "items"
    cures = f"{declarations.write_cure(whole)} gives {it} whole to every lane"
    if by_item != whole:
        cures = f"{declarations.write_cure(by_item)} cuts {it} by item, and {cures}"
    said = "; ".join(each.says for each in found[:_MOST_LISTED])
    msg = f"{said}. {cures}"
    raise ShardError(msg)


def _find_objects(
    flat: FlatCall, rows: int | None, *, is_cut: bool, is_strict: bool
) -> Iterator[_Unclear]:
    """Yield objects of unknown classes and arrays, which all lanes would share."""
    paths = flat.spec.paths()
    for path, leaf, extent in zip(paths, flat.leaves, flat.extents, strict=True):
        place = _join_places([path])
        is_a = f"{place} is a {type(leaf).__name__}"
        if extent <= ARRAY and is_strict:
            says = (
                f"{place} is an array with {ARRAY - extent} rows, and the batch has {rows}. Pass "
                "torch.from_numpy(...) of it"
            )
            yield _Unclear(path, says, may_be_items=True)
        if extent != OBJECT:
            continue
        # Refused in any case: lanes may share other objects, but not tensors on another device.
        has_tensors = next(tensors_in(leaf), None) is not None
        if has_tensors:
            registration = registration_of(type(leaf))
            says = (
                f"{is_a}, which holds tensors, and parawrap does not know how to cut it. Use "
                f"{registration} to cut it"
            )
            if is_cache(leaf):
                says += ", or pass no cache and use_cache=False"
            yield _Unclear(path, says)
        elif isinstance(leaf, Iterator) and (is_strict or is_cut):
            # Raised at once: no entry of `in_dims` gives each lane its own items.
            msg = f"{is_a}, and lanes would take its items from each other. Pass a list of them"
            raise ShardError(msg)
        elif is_strict:
            says = (
                f"{is_a}, which may have one item per row, or a state that each lane would change"
            )
            yield _Unclear(path, says, may_be_items=has_items(leaf))


def _find_sequences(
    declarations: InDims,
    flat: FlatCall,
    rows: int,
    node: TreeSpec,
    path: tuple[Any, ...] = (),
    start: int = 0,
) -> Iterator[_Unclear]:
    """Yield lists and tuples without rows that are as long as the batch, and deques.

    A list may have one item per row or be one value for all rows. Each lane would get a copy of a
    deque. `node` is at this path, and its first leaf has the index `start`.
    """
    kinds = flat.extents[start : start + node.num_leaves]
    kind, items = node.type, node.num_children
    is_argument = len(path) >= 2  # or inside one
    is_long = kind is deque or (kind in (list, tuple) and items == rows)
    # A tensor of one row would go whole to every lane.
    has_rows = any(extent >= 0 and extent != 1 for extent in kinds)
    is_unclear = is_argument and is_long and not has_rows
    if kind is not None and is_unclear and declarations.find(path) is UNDECLARED:
        place = _join_places([path])
        has = "without a tensor"
        if 1 in kinds:
            has = "with tensors of one row"
        says = (
            f"{place} is a {kind.__name__} of {items} items {has}, "
            f"and the batch has {rows} rows: it may have one item per row or be one value for all "
            "rows"
        )
        yield _Unclear(path, says, may_be_items=True)
    for entry, child in zip(node.entries(), node.children(), strict=True):
        yield from _find_sequences(declarations, flat, rows, child, (*path, entry), start)
        start += child.num_leaves


def _join_places(paths: Iterable[Sequence[Any]]) -> str:
    """Return the addresses of values of a call, in words."""
    places = []
    for path in paths:
        root = CALL_ROOTS[path[0]]
        places.append(address(root, path[1:]))
    return _list_in_words(places)


def _list_in_words(places: Sequence[str]) -> str:
    """Return addresses in words."""
    *first, last = places
    if not first:
        return last
    return f"{', '.join(first)} and {last}"
