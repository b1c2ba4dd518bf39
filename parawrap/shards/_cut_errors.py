"""Errors of calls that cannot be cut."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

from parawrap.errors import ShardError
from parawrap.shards._count_rows import BEYOND, FOREIGN, NESTED, NUMBER, OBJECT, TEXT
from parawrap.tree import TreeSpec, address, addresses, sequences, tensors_in

__all__ = ["CALL_ROOTS", "refuse_ambiguous", "refuse_dims_out_of_range", "refuse_disagreement", "refuse_unknown"]

CALL_ROOTS = ("args", "kwargs")
"""How the addresses of a call's leaves begin."""


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


def refuse_unknown(spec: TreeSpec, leaves: Sequence[Any], extents: Sequence[int], name_at: Names, option: str) -> None:
    """Refuse an object of an unknown class that holds tensors, and a nested tensor that torch cannot split."""
    for index, (leaf, extent) in enumerate(zip(leaves, extents, strict=True)):
        if extent == NESTED:
            what, cure = "a nested tensor, which torch cannot split", "Pad it to cut it"
        elif extent == OBJECT and next(tensors_in(leaf), None) is not None:
            kind = type(leaf).__name__
            what = f"a {kind}, which holds tensors, and parawrap does not know how to cut it"
            cure = f"Use register_split({kind}, ...) to cut it"
        else:
            continue
        where, name = addresses(spec, CALL_ROOTS)[index], name_at(spec.paths()[index]) or "its name"
        msg = f'{where} is {what}. {cure}, or {option}={{"{name}": None}} to give it whole to every lane'
        raise ShardError(msg)


def refuse_ambiguous(spec: TreeSpec, extents: Sequence[int], rows: int, declared: Collection[str], name_at: Names) -> None:
    """Refuse a list, tuple, or array without tensors that is as long as the batch.

    It may have one item per row or be one value for all rows. A tuple of numbers alone is a size or a stride.
    """
    arrays = [index for index, extent in enumerate(extents) if extent == FOREIGN - rows]
    if arrays:
        where, named = addresses(spec, CALL_ROOTS)[arrays[0]], name_at(spec.paths()[arrays[0]]) or "its name"
        msg = (
            f"{where} is an array with {rows} rows, as many as the batch. Cut it with "
            f'in_dims={{"{named}": "items"}}, give it whole to every lane with in_dims={{"{named}": None}}, or pass '
            "torch.from_numpy(...) of it"
        )
        raise ShardError(msg)
    for path, node, start in sequences(spec):
        kinds = extents[start : start + node.num_leaves]
        doubtful = min(kinds, default=0) <= TEXT or (node.type is list and NUMBER in kinds)
        if not doubtful or len(path) < 2 or node.num_children != rows or any(kind >= 0 for kind in kinds):
            continue
        name = name_at(path)
        if name in declared:
            continue
        where = address(CALL_ROOTS[path[0]], path[1:])
        kind = "list" if node.type is list else "tuple"
        named = name or "its name"
        msg = (
            f"{where} is a {kind} of {rows} items without a tensor, and the batch has {rows} rows: it may have one "
            f'item per row or be one value for all rows. in_dims={{"{named}": "items"}} cuts it, '
            f'in_dims={{"{named}": None}} gives it whole to every lane'
        )
        raise ShardError(msg)
