"""Errors of calls that cannot be cut, and warnings about calls that an option would cut better."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, Protocol

from parawrap.errors import ShardError
from parawrap.shards._extent import BEYOND, FIXED, FOREIGN, NESTED, OBJECT, has_items
from parawrap.shards._register_split import registration_of
from parawrap.tree import TreeSpec, address, addresses, sequences, tensors_in

__all__ = [
    "CALL_ROOTS",
    "hint_of_items",
    "hint_of_sizes",
    "refuse_ambiguous",
    "refuse_broken_units",
    "refuse_dims_out_of_range",
    "refuse_disagreement",
    "refuse_unknown",
]

CALL_ROOTS = ("args", "kwargs")
"""How the addresses of a call's leaves begin."""

_UNEVEN_BEYOND = 1.125  # an eighth: lanes usually differ by as much


class IsDeclared(Protocol):
    """True if `in_dims` says how the value at a path into (args, kwargs) is cut."""

    def __call__(self, path: Sequence[Any]) -> bool: ...


class Names(Protocol):
    """Finds the parameter that a path into (args, kwargs) belongs to."""

    def __call__(self, path: Sequence[Any]) -> str | None: ...


def _entry(path: Sequence[Any], name_at: Names, value: str) -> str:
    """Return the `in_dims` that gives the value at a path this entry, or the whole argument where keys are not names."""
    keys = path[2:] if all(isinstance(key, str) for key in path[2:]) else ()
    for key in reversed([name_at(path) or "its name", *keys]):
        value = f'{{"{key}": {value}}}'
    return value


def refuse_disagreement(
    spec: TreeSpec, found: dict[int, int], dims: Sequence[int | None], name_at: Names, option: str
) -> None:
    """Refuse leaves with different row counts; `found` has a leaf's index for each count."""
    (rows, first), (other_rows, other) = sorted(found.items(), key=lambda item: item[1])[:2]
    where = addresses(spec, CALL_ROOTS)
    whole = _entry(spec.paths()[other], name_at, "None")
    msg = (
        f"the rows of the call disagree: {where[other]} has {other_rows} on dim {dims[other]}, "
        f"{where[first]} has {rows} on dim {dims[first]}. If {where[other]} is not cut with the batch, "
        f"use {option}={whole}; if its rows lie on another dim, give that dim; if it is a list with one "
        'tensor per row, give "items"'
    )
    raise ShardError(msg)


def refuse_dims_out_of_range(
    spec: TreeSpec,
    leaves: Sequence[Any],
    extents: Sequence[int],
    dims: Sequence[int | None],
    is_declared: IsDeclared,
) -> None:
    """Refuse a tensor without the dim that `in_dims` names for it, or a call without any tensor that has the dim."""
    beyond = [index for index, extent in enumerate(extents) if extent == BEYOND]
    declared = [index for index in beyond if is_declared(spec.paths()[index])]
    nothing_has_it = all(extent < 0 for extent in extents)
    wrong = declared or (beyond if nothing_has_it else [])
    if wrong:
        where = addresses(spec, CALL_ROOTS)[wrong[0]]
        shape = tuple(leaves[wrong[0]].shape)
        msg = f"dim {dims[wrong[0]]} is out of range for {where}, of shape {shape}: it has {len(shape)} dimensions"
        raise ShardError(msg)


def refuse_broken_units(spec: TreeSpec, extents: Sequence[int], rows: int, unit: int) -> NoReturn:
    """Refuse a batch that is not a multiple of `unit`."""
    where = addresses(spec, CALL_ROOTS)[list(extents).index(rows)]
    sizes = f"{unit}" if rows < unit else f"{rows - rows % unit} or {rows - rows % unit + unit}"
    msg = (
        f"{where} has {rows} rows, which is not a multiple of unit={unit}. With unit={unit}, {unit} rows that follow each "
        f"other stay in one lane. Pass a batch of {sizes} rows, or another unit"
    )
    raise ShardError(msg)


def refuse_unknown(
    spec: TreeSpec,
    leaves: Sequence[Any],
    extents: Sequence[int],
    name_at: Names,
    option: str,
    *,
    is_cut: bool,
    is_strict: bool,
) -> None:
    """Refuse an object of an unknown class that holds tensors, and a nested tensor that torch cannot split.

    With `is_strict`, refuse every object of an unknown class: a deque or a generator of random numbers would advance or
    start again in each lane. Lanes of a call that `is_cut` would take turns with an iterator.
    """
    for index, (leaf, extent) in enumerate(zip(leaves, extents, strict=True)):
        kind = type(leaf).__name__
        where, path = addresses(spec, CALL_ROOTS)[index], spec.paths()[index]
        whole = f"{option}={_entry(path, name_at, 'None')} to give it whole to every lane"
        if extent == NESTED:
            msg = f"{where} is a nested tensor, which torch cannot split. Pad it to cut it, or {whole}"
        elif extent != OBJECT:
            continue
        elif next(tensors_in(leaf), None) is not None:
            msg = (
                f"{where} is a {kind}, which holds tensors, and parawrap does not know how to cut it. Use "
                f"{registration_of(type(leaf))} to cut it, or {whole}"
            )
        elif is_strict or (is_cut and isinstance(leaf, Iterator)):
            cut = _entry(path, name_at, '"items"')
            items = f"{option}={cut} if it is a sequence with one item per row, or " if has_items(leaf) else ""
            msg = (
                f"{where} is a {kind}, which may have one item per row, or a state that each lane would change. Use "
                f"{items}{whole}, which all lanes then share"
            )
        else:
            continue
        raise ShardError(msg)


def refuse_ambiguous(spec: TreeSpec, extents: Sequence[int], rows: int, is_declared: IsDeclared, name_at: Names) -> None:
    """Refuse an array, a list or tuple without tensors that is as long as the batch, and a deque without tensors.

    A list may have one item per row or be one value for all rows. An array would be shared by all lanes.
    """
    arrays = [index for index, extent in enumerate(extents) if extent <= FOREIGN]
    if arrays:
        where, path = addresses(spec, CALL_ROOTS)[arrays[0]], spec.paths()[arrays[0]]
        cut, whole = (_entry(path, name_at, value) for value in ('"items"', "None"))
        msg = (
            f"{where} is an array with {FOREIGN - extents[arrays[0]]} rows, and the batch has {rows}. Cut it with "
            f"in_dims={cut}, give it whole to every lane with in_dims={whole}, or pass "
            "torch.from_numpy(...) of it"
        )
        raise ShardError(msg)
    for path, node, start in sequences(spec):
        kinds = extents[start : start + node.num_leaves]
        is_refused = node.num_children == rows or node.type is deque  # each lane would have its own deque
        has_rows = any(kind >= 0 and kind != 1 for kind in kinds)  # a tensor of one row would go whole to every lane
        if len(path) < 2 or not is_refused or has_rows:
            continue
        if is_declared(path):
            continue
        where, kind = address(CALL_ROOTS[path[0]], path[1:]), _name_of(node)
        has = "with tensors of one row" if any(kind == 1 for kind in kinds) else "without a tensor"
        cut, whole = (_entry(path, name_at, value) for value in ('"items"', "None"))
        msg = (
            f"{where} is a {kind} of {node.num_children} items {has}, and the batch has {rows} rows: it "
            f"may have one item per row or be one value for all rows. in_dims={cut} cuts it, in_dims={whole} "
            "gives it whole to every lane"
        )
        raise ShardError(msg)


def _name_of(node: TreeSpec) -> str:
    return "sequence" if node.type is None else node.type.__name__


def hint_of_items(spec: TreeSpec, extents: Sequence[int], is_declared: IsDeclared, name_at: Names) -> str | None:
    """Return a warning for a call that is not cut although it has texts or arrays; None for any other call."""
    arrays = [(spec.paths()[index], "array") for index, extent in enumerate(extents) if extent < FOREIGN - 1]
    texts = [
        (path, _name_of(node))
        for path, node, start in sequences(spec)
        if len(path) > 1 and node.num_children > 1 and FIXED in extents[start : start + node.num_leaves]
    ]
    for path, kind in arrays + texts:
        if name_at(path) is not None and not is_declared(path):
            cut, whole = (_entry(path, name_at, value) for value in ('"items"', "None"))
            return (
                f"a call without tensors runs plainly: {address(CALL_ROOTS[path[0]], path[1:])} is a {kind}. To cut it by "
                f"item, use in_dims={cut}; to keep the call plain, use in_dims={whole}"
            )
    return None


def hint_of_sizes(sizes: Sequence[int], largest: int, lanes: int) -> str | None:
    """Return a warning for a shard that is much larger than `largest`, its size in a balanced cut."""
    if sizes[0] <= _UNEVEN_BEYOND * largest:
        return None
    does = "runs whole" if len(sizes) == 1 else f"has a shard of {sizes[0]} rows"
    return (
        f"a call of {sum(sizes)} rows on {lanes} lanes {does}, because the sizes of shards must differ to show which "
        f"outputs follow the rows. With out_dims=0, the largest shard has {largest} of them"
    )
