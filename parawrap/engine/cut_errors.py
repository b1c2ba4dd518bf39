"""Errors of calls that cannot be cut.

Each error names every value concerned, and the `in_dims` that settle all of them at once.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

from parawrap.engine.flat_call import ARRAY, BEYOND, CALL_ROOTS, OBJECT, FlatCall, has_items
from parawrap.engine.in_dims import InDims
from parawrap.engine.rules.registry import registration_of
from parawrap.errors import ShardError
from parawrap.tree import UNDECLARED, TreeSpec, address, addresses, list_attributes, tensors_in

_MOST_LISTED = 20  # values, in an error; its cure names every argument


class _Unclear(NamedTuple):
    """A value of a call that may or may not be cut: its place, and its description for an error."""

    path: tuple[Any, ...]
    says: str
    may_be_items: bool = False


def refuse_disagreement(declarations: InDims, flat: FlatCall, dims: Sequence[int | None]) -> NoReturn:
    """Refuse leaves with different row counts.

    The batch has the count of most arguments that are tensors; without such arguments, of most leaves.
    """
    where, paths = addresses(flat.spec, CALL_ROOTS), flat.spec.paths()
    found = {index: extent for index, extent in enumerate(flat.extents) if extent >= 0 and extent != 1}
    tensors = [extent for index, extent in found.items() if len(paths[index]) == 2]
    rows = Counter(tensors or found.values()).most_common(1)[0][0]
    others = [index for index, extent in found.items() if extent != rows]
    with_rows = [index for index, extent in found.items() if extent == rows]
    cut = {paths[index][:2] for index in with_rows}
    parts = {paths[index] if paths[index][:2] in cut else paths[index][:2]: None for index in others}
    arguments = {path[:2]: None for path in parts}
    listed = [f"{where[index]} has {found[index]} on dim {dims[index]}" for index in (*others[:_MOST_LISTED], with_rows[0])]
    msg = f"the rows of the call disagree: {', '.join(listed)}. "
    if arguments != parts and cut - arguments.keys():
        whole = declarations.write_cure(arguments)
        msg += f"To give {_join_places(arguments)} whole to every lane, such as a dict of parameters, use {whole}. "
    msg += (
        f"To give {_join_places(parts)} whole to every lane, use {declarations.write_cure(parts)}; if rows lie on another "
        'dim, give that dim; for a list with one tensor per row, give "items". Pass a mask with one row per head as '
        "(batch, heads, ...), and flatten it in the target. If none of these fits, as for offsets into another argument, "
        "give each lane a whole batch: `map` of the block, or TupleParallel"
    )
    raise ShardError(msg)


def refuse_attributes(declarations: InDims, flat: FlatCall, cut: Sequence[int]) -> None:
    """Refuse cut tensors with attributes of their own, which their parts would not have."""
    paths = flat.spec.paths()
    found = {paths[index]: flat.leaves[index] for index in cut if list_attributes(flat.leaves[index])}
    if found:
        names = ", ".join(dict.fromkeys(name for leaf in found.values() for name in list_attributes(leaf)))
        rules = " and ".join(sorted({registration_of(type(leaf)) for leaf in found.values()}))
        msg = (
            f"the parts of a cut tensor lose attributes of its own ({names}), as of {_join_places(found)}. "
            f"Use {rules} to cut them too, pass the attributes as arguments of their own, or use "
            f"{declarations.write_cure(dict.fromkeys(found))} to give the tensor whole to every lane"
        )
        raise ShardError(msg)


def refuse_dims_out_of_range(declarations: InDims, flat: FlatCall, dims: Sequence[int | None]) -> None:
    """Refuse a tensor without the dim that `in_dims` names for it, or a call without any tensor that has the dim."""
    beyond = [index for index, extent in enumerate(flat.extents) if extent == BEYOND]
    paths = flat.spec.paths()
    wrong = [index for index in beyond if declarations.find(paths[index]) is not UNDECLARED]
    if not wrong and all(extent < 0 for extent in flat.extents):
        wrong = beyond
    if wrong:
        shape = tuple(flat.leaves[wrong[0]].shape)
        msg = (
            f"dim {dims[wrong[0]]} is out of range for {_join_places(paths[index] for index in wrong)}, of shape {shape}: "
            f"it has {len(shape)} dimensions"
        )
        raise ShardError(msg)


def refuse_broken_units(flat: FlatCall, rows: int, unit: int) -> NoReturn:
    """Refuse a batch that is not a multiple of `unit`."""
    where, fewer = addresses(flat.spec, CALL_ROOTS)[flat.extents.index(rows)], rows - rows % unit
    sizes = f"{fewer} or {fewer + unit}" if fewer else f"{unit}"
    msg = f"{where} has {rows} rows, not a multiple of unit={unit}. Pass a batch of {sizes} rows, or another unit"
    raise ShardError(msg)


def refuse_unclear(declarations: InDims, flat: FlatCall, rows: int | None, *, is_cut: bool, is_strict: bool) -> None:
    """Refuse values that may or may not be cut, or that parawrap cannot cut, until `in_dims` declares them.

    With `is_strict`, refuse every object: a deque or a generator of random numbers would advance or start again in each
    lane. Lanes of a call that `is_cut` would take turns with an iterator.
    """
    found = [*_find_sequences(declarations, flat, rows or 0, flat.spec)] if is_strict else []
    if any(extent <= OBJECT for extent in flat.extents):
        lists = [each.path for each in found]
        objects = _find_objects(flat, rows, is_cut=is_cut, is_strict=is_strict)
        found += [each for each in objects if not any(each.path[: len(outer)] == outer for outer in lists)]
    if not found:
        return
    it = "it" if len(found) == 1 else "them"
    whole = declarations.write_cure({each.path: None for each in found})
    cut = declarations.write_cure({each.path: "items" if each.may_be_items else None for each in found})
    cures = f"{cut} cuts {it} by item, and " if any(each.may_be_items for each in found) else ""
    msg = f"{'; '.join(each.says for each in found[:_MOST_LISTED])}. {cures}{whole} gives {it} whole to every lane"
    raise ShardError(msg)


def _find_objects(flat: FlatCall, rows: int | None, *, is_cut: bool, is_strict: bool) -> Iterator[_Unclear]:
    """Yield objects of unknown classes and arrays, which all lanes would share."""
    for path, leaf, extent in zip(flat.spec.paths(), flat.leaves, flat.extents, strict=True):
        is_a = f"{_join_places([path])} is a {type(leaf).__name__}"
        if extent <= ARRAY and is_strict:
            says = f"{_join_places([path])} is an array with {ARRAY - extent} rows, and the batch has {rows}"
            yield _Unclear(path, f"{says}. Pass torch.from_numpy(...) of it", may_be_items=True)
        elif extent == OBJECT and next(tensors_in(leaf), None) is not None:
            rules = registration_of(type(leaf))
            yield _Unclear(
                path, f"{is_a}, which holds tensors, and parawrap does not know how to cut it. Use {rules} to cut it"
            )
        elif extent == OBJECT and isinstance(leaf, Iterator) and (is_strict or is_cut):
            msg = f"{is_a}, and lanes would take its items from each other. Pass a list of them"
            raise ShardError(msg)
        elif extent == OBJECT and is_strict:
            says = f"{is_a}, which may have one item per row, or a state that each lane would change"
            yield _Unclear(path, says, may_be_items=has_items(leaf))


def _find_sequences(
    declarations: InDims, flat: FlatCall, rows: int, node: TreeSpec, path: tuple[Any, ...] = (), start: int = 0
) -> Iterator[_Unclear]:
    """Yield lists and tuples without rows that are as long as the batch, and deques, which each lane would get a copy of.

    A list may have one item per row or be one value for all rows. `node` is at this path, and its first leaf has the index
    `start`.
    """
    kinds = flat.extents[start : start + node.num_leaves]
    is_long = node.type is deque or (node.type in (list, tuple) and node.num_children == rows)
    has_rows = any(kind >= 0 and kind != 1 for kind in kinds)  # a tensor of one row would go whole to every lane
    if node.type is not None and len(path) >= 2 and is_long and not has_rows and declarations.find(path) is UNDECLARED:
        has = "with tensors of one row" if 1 in kinds else "without a tensor"
        says = (
            f"{_join_places([path])} is a {node.type.__name__} of {node.num_children} items {has}, and the batch has "
            f"{rows} rows: it may have one item per row or be one value for all rows"
        )
        yield _Unclear(path, says, may_be_items=True)
    for entry, child in zip(node.entries(), node.children(), strict=True):
        yield from _find_sequences(declarations, flat, rows, child, (*path, entry), start)
        start += child.num_leaves


def _join_places(paths: Iterable[Sequence[Any]]) -> str:
    """Return the addresses of values of a call, in words."""
    *first, last = (address(CALL_ROOTS[path[0]], path[1:]) for path in paths)
    return f"{', '.join(first)} and {last}" if first else last
