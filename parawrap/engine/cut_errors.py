"""Errors of calls that cannot be cut, and the warning of a call that an option would cut better.

Each error names every value concerned, and the `in_dims` that settle all of them at once.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from parawrap.engine.declarations import Declarations
from parawrap.engine.extents import ARRAY, BEYOND, CALL_ROOTS, OBJECT, FlatCall, has_items
from parawrap.engine.rules.registry import registration_of
from parawrap.errors import ShardError
from parawrap.tree import UNDECLARED, TreeSpec, address, addresses, list_attributes, sequences, tensors_in

_MOST_NAMED = 4  # attributes of a tensor
_MOST_LISTED = 20  # values, in an error; its cure names every argument
_UNEVEN_BEYOND = 1.125  # an eighth: lanes usually differ by as much


class _Unclear(NamedTuple):
    """A value of a call that may or may not be cut: its place, and its description for an error."""

    path: tuple[Any, ...]
    says: str
    may_be_items: bool = False
    holds_tensors: bool = False


def refuse_disagreement(declarations: Declarations, flat: FlatCall, dims: Sequence[int | None]) -> NoReturn:
    """Refuse leaves with different row counts.

    The batch has the count of most arguments. Among two, a tensor counts more than a structure; in one, most leaves decide.
    """
    where, paths = addresses(flat.spec, CALL_ROOTS), flat.spec.paths()
    found = {index: extent for index, extent in enumerate(flat.extents) if extent >= 0 and extent != 1}
    counts: dict[tuple[Any, ...], set[int]] = {}  # by argument
    for index, extent in found.items():
        counts.setdefault(paths[index][:2], set()).add(extent)
    are_even = {next(iter(each)) for each in counts.values() if len(each) == 1}
    are_tensors = {extent for index, extent in found.items() if paths[index][:2] == paths[index]}
    leaves = Counter(found.values() if len(counts) == 1 else ())

    def rank(count: int) -> tuple[int, bool, bool, int]:
        arguments = sum(count in each for each in counts.values())
        return arguments, count in are_even, count in are_tensors, leaves[count]

    rows = max(found.values(), key=rank)
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
        msg += f"If {whole} has no rows at all, such as a dict of parameters, use {declarations.write_cure(arguments)}. "
    are, cure = "is" if len(parts) == 1 else "are", declarations.write_cure(parts)
    msg += (
        f"If {names} {are} not cut with the batch, use {cure}; if rows lie on another dim, give that dim; for a list with "
        'one tensor per row, give "items"'
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


def refuse_attributes(declarations: Declarations, flat: FlatCall, cut: Sequence[int]) -> None:
    """Refuse cut tensors with attributes of their own, which their parts would not have."""
    where, paths = addresses(flat.spec, CALL_ROOTS), flat.spec.paths()
    found = {index: names for index in cut if (names := list_attributes(flat.leaves[index]))}
    if not found:
        return
    kinds = {index: type(flat.leaves[index]).__name__ for index in found}
    says = [
        f"{where[index]} is a {kinds[index]} with attributes of its own ({', '.join(names[:_MOST_NAMED])})"
        for index, names in found.items()
    ]
    classes = {type(flat.leaves[index]) for index in found} - {torch.Tensor}
    rules = " and ".join(sorted(map(registration_of, classes))) or "a class of your own with register_split"
    msg = (
        f"{_join_words(says)}, which the parts of a cut tensor lose. Use {rules} to cut them too, pass the attributes as "
        f"arguments of their own, or use {declarations.write_cure({paths[index]: None for index in found})} to give "
        f"{'it' if len(found) == 1 else 'them'} whole to every lane"
    )
    raise ShardError(msg)


def refuse_dims_out_of_range(declarations: Declarations, flat: FlatCall, dims: Sequence[int | None]) -> None:
    """Refuse a tensor without the dim that `in_dims` names for it, or a call without any tensor that has the dim."""
    beyond = [index for index, extent in enumerate(flat.extents) if extent == BEYOND]
    paths = flat.spec.paths() if beyond else []
    declared = [index for index in beyond if declarations.find(paths[index]) is not UNDECLARED]
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


def refuse_broken_units(flat: FlatCall, rows: int, unit: int) -> NoReturn:
    """Refuse a batch that is not a multiple of `unit`."""
    where = addresses(flat.spec, CALL_ROOTS)[flat.extents.index(rows)]
    sizes = f"{unit}" if rows < unit else f"{rows - rows % unit} or {rows - rows % unit + unit}"
    msg = (
        f"{where} has {rows} rows, which is not a multiple of unit={unit}. With unit={unit}, {unit} rows that follow each "
        f"other stay in one lane. Pass a batch of {sizes} rows, or another unit"
    )
    raise ShardError(msg)


def refuse_unclear(declarations: Declarations, flat: FlatCall, rows: int | None, *, is_cut: bool, is_strict: bool) -> None:
    """Refuse values that may or may not be cut, or that parawrap cannot cut, until `in_dims` declares them.

    With `is_strict`, refuse every object: a deque or a generator of random numbers would advance or start again in each
    lane. Lanes of a call that `is_cut` would take turns with an iterator.
    """
    lists = [*_find_sequences(declarations, flat, rows or 0)] if is_strict else []
    objects = [
        each
        for each in _find_objects(flat, rows, is_cut=is_cut, is_strict=is_strict)
        if each.holds_tensors or not any(each.path[: len(outer.path)] == outer.path for outer in lists)
    ]
    found = objects + lists
    if not found:
        return
    whole = declarations.write_cure({each.path: None for each in found})
    cut = declarations.write_cure({each.path: "items" if each.may_be_items else None for each in found})
    it = "it" if len(found) == 1 else "them"
    cures = f"{cut} cuts {it} by item, and " if any(each.may_be_items for each in found) else ""
    more = f"; and {len(found) - _MOST_LISTED} more" if len(found) > _MOST_LISTED else ""
    msg = f"{'; '.join(each.says for each in found[:_MOST_LISTED])}{more}. {cures}{whole} gives {it} whole to every lane"
    raise ShardError(msg)


def _find_objects(flat: FlatCall, rows: int | None, *, is_cut: bool, is_strict: bool) -> Iterator[_Unclear]:
    """Yield objects of unknown classes and arrays, which all lanes would share."""
    if all(extent > OBJECT for extent in flat.extents):
        return
    where, paths = addresses(flat.spec, CALL_ROOTS), flat.spec.paths()
    for index, (leaf, extent) in enumerate(zip(flat.leaves, flat.extents, strict=True)):
        place, path, kind = where[index], paths[index], type(leaf).__name__
        if extent <= ARRAY and is_strict:
            says = f"{place} is an array with {ARRAY - extent} rows, and the batch has {rows}"
            yield _Unclear(path, f"{says}. Pass torch.from_numpy(...) of it", may_be_items=True)
        elif extent == OBJECT and next(tensors_in(leaf), None) is not None:
            says = f"{place} is a {kind}, which holds tensors, and parawrap does not know how to cut it. Use "
            yield _Unclear(path, f"{says}{registration_of(type(leaf))} to cut it", holds_tensors=True)
        elif extent == OBJECT and (is_strict or (is_cut and isinstance(leaf, Iterator))):
            says = f"{place} is a {kind}, which may have one item per row, or a state that each lane would change"
            yield _Unclear(path, says, may_be_items=has_items(leaf))


def _find_sequences(declarations: Declarations, flat: FlatCall, rows: int) -> Iterator[_Unclear]:
    """Yield lists and tuples without rows that are as long as the batch, and deques, which each lane would get a copy of.

    A list may have one item per row or be one value for all rows.
    """
    for path, node, start in sequences(flat.spec):
        kinds = flat.extents[start : start + node.num_leaves]
        is_long = node.num_children == rows or node.type is deque
        has_rows = any(kind >= 0 and kind != 1 for kind in kinds)  # a tensor of one row would go whole to every lane
        if len(path) < 2 or not is_long or has_rows or declarations.find(path) is not UNDECLARED:
            continue
        has = "with tensors of one row" if any(kind == 1 for kind in kinds) else "without a tensor"
        says = (
            f"{address(CALL_ROOTS[path[0]], path[1:])} is a {_kind_of(node)} of {node.num_children} items {has}, and the "
            f"batch has {rows} rows: it may have one item per row or be one value for all rows"
        )
        yield _Unclear(path, says, may_be_items=True)


def hint_of_sizes(sizes: Sequence[int], largest: int, lanes: int) -> str | None:
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
