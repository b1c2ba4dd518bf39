"""Errors of calls that cannot be cut, and warnings about calls that an option would cut better."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Any, NoReturn, Protocol

from parawrap.errors import ShardError
from parawrap.shards._count_rows import BEYOND, FIXED, FOREIGN, NESTED, OBJECT, has_items
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


class Names(Protocol):
    """Finds the parameter that a path into (args, kwargs) belongs to."""

    def __call__(self, path: Sequence[Any]) -> str | None: ...


def refuse_disagreement(
    spec: TreeSpec, found: dict[int, int], dims: Sequence[int | None], name_at: Names, option: str
) -> None:
    """Refuse leaves with different row counts; `found` has a leaf's index for each count."""
    (rows, first), (other_rows, other) = sorted(found.items(), key=lambda item: item[1])[:2]
    where = addresses(spec, CALL_ROOTS)
    name = name_at(spec.paths()[other]) or "its name"
    msg = (
        f"the rows of the call disagree: {where[other]} has {other_rows} on dim {dims[other]}, "
        f"{where[first]} has {rows} on dim {dims[first]}. If {where[other]} is not cut with the batch, "
        f'use {option}={{"{name}": None}}; if its rows lie on another dim, give that dim; if it is a list with one '
        'tensor per row, give "items"'
    )
    raise ShardError(msg)


def refuse_dims_out_of_range(
    spec: TreeSpec,
    leaves: Sequence[Any],
    extents: Sequence[int],
    dims: Sequence[int | None],
    named: Collection[str],
    name_at: Names,
) -> None:
    """Refuse a tensor without the dim that `in_dims` names for it, or a call without any tensor that has the dim."""
    beyond = [index for index, extent in enumerate(extents) if extent == BEYOND]
    declared = [index for index in beyond if name_at(spec.paths()[index]) in named]
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
    spec: TreeSpec, leaves: Sequence[Any], extents: Sequence[int], name_at: Names, option: str, *, is_strict: bool
) -> None:
    """Refuse an object of an unknown class that holds tensors, and a nested tensor that torch cannot split.

    With `is_strict`, refuse every object of an unknown class: an iterator, a deque, or a generator of random numbers would
    advance or start again in each lane.
    """
    for index, (leaf, extent) in enumerate(zip(leaves, extents, strict=True)):
        kind = type(leaf).__name__
        where, name = addresses(spec, CALL_ROOTS)[index], name_at(spec.paths()[index]) or "its name"
        whole = f'{option}={{"{name}": None}} to give it whole to every lane'
        if extent == NESTED:
            msg = f"{where} is a nested tensor, which torch cannot split. Pad it to cut it, or {whole}"
        elif extent != OBJECT:
            continue
        elif next(tensors_in(leaf), None) is not None:
            msg = (
                f"{where} is a {kind}, which holds tensors, and parawrap does not know how to cut it. Use "
                f"register_split({kind}, ...) to cut it, or {whole}"
            )
        elif is_strict:
            items = (
                f'{option}={{"{name}": "items"}} if it is a sequence with one item per row, or ' if has_items(leaf) else ""
            )
            msg = (
                f"{where} is a {kind}, which may have one item per row, or a state that each lane would change. Use "
                f"{items}{whole}, which all lanes then share"
            )
        else:
            continue
        raise ShardError(msg)


def refuse_ambiguous(spec: TreeSpec, extents: Sequence[int], rows: int, declared: Collection[str], name_at: Names) -> None:
    """Refuse an array, a list or tuple without tensors that is as long as the batch, and a deque without tensors.

    A list may have one item per row or be one value for all rows. An array would be shared by all lanes.
    """
    arrays = [index for index, extent in enumerate(extents) if extent <= FOREIGN]
    if arrays:
        where, named = addresses(spec, CALL_ROOTS)[arrays[0]], name_at(spec.paths()[arrays[0]]) or "its name"
        msg = (
            f"{where} is an array with {FOREIGN - extents[arrays[0]]} rows, and the batch has {rows}. Cut it with "
            f'in_dims={{"{named}": "items"}}, give it whole to every lane with in_dims={{"{named}": None}}, or pass '
            "torch.from_numpy(...) of it"
        )
        raise ShardError(msg)
    for path, node, start in sequences(spec):
        kinds = extents[start : start + node.num_leaves]
        is_refused = node.num_children == rows or node.type is deque  # each lane would have its own deque
        has_rows = any(kind >= 0 and kind != 1 for kind in kinds)  # a tensor of one row would go whole to every lane
        if len(path) < 2 or not is_refused or has_rows:
            continue
        name = name_at(path)
        if name in declared:
            continue
        where, kind = address(CALL_ROOTS[path[0]], path[1:]), _name_of(node)
        named, has = (
            name or "its name",
            "with tensors of one row" if any(kind == 1 for kind in kinds) else "without a tensor",
        )
        msg = (
            f"{where} is a {kind} of {node.num_children} items {has}, and the batch has {rows} rows: it "
            f'may have one item per row or be one value for all rows. in_dims={{"{named}": "items"}} cuts it, '
            f'in_dims={{"{named}": None}} gives it whole to every lane'
        )
        raise ShardError(msg)


def _name_of(node: TreeSpec) -> str:
    return "sequence" if node.type is None else node.type.__name__


def hint_of_items(spec: TreeSpec, extents: Sequence[int], declared: Collection[str], name_at: Names) -> str | None:
    """Return a warning for a call that is not cut although it has texts or arrays; None for any other call."""
    arrays = [(spec.paths()[index], "array") for index, extent in enumerate(extents) if extent < FOREIGN - 1]
    texts = [
        (path, _name_of(node))
        for path, node, start in sequences(spec)
        if len(path) > 1 and node.num_children > 1 and FIXED in extents[start : start + node.num_leaves]
    ]
    for path, kind in arrays + texts:
        name = name_at(path)
        if name is not None and name not in declared:
            return (
                f"a call without tensors runs plainly: {address(CALL_ROOTS[path[0]], path[1:])} is a {kind}. To cut it by "
                f'item, use in_dims={{"{name}": "items"}}; to keep the call plain, use in_dims={{"{name}": None}}'
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
