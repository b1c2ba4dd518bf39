"""Lists in the outputs of torch.nn.DataParallel: which have one item per row, and which are joined item by item.

torch joins lists of tensors item by item, and refuses all others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from parawrap.engine.concatenate import list_values
from parawrap.engine.join_rules import Refusal
from parawrap.tree import TreeSpec, WholeLeaf, flatten

Flat: TypeAlias = tuple[list[Any], TreeSpec]
"""The leaves of an output, and its structure."""


def are_items_as_torch(column: Sequence[Any], sizes: Sequence[int] | None, around: Flat | None = None) -> bool:
    """True if lists have one item per row; False if their items are joined one by one.

    `sizes` are the rows of the lanes. `around` is the flattened output of the first lane that holds the list.

    Others are joined here if they have one item per row. A tuple of lists is a structure if each list has one. A list
    of dicts has one item per row if its tensors do not all have the rows: detections, for instance.
    """
    if not any(map(len, column)):
        return False
    if not holds_only_values(column):
        return _are_detections(column, sizes, around)
    if all(item is None for value in column for item in value):
        return False  # torch returns such a list once
    follows = list(map(len, column)) == list(sizes or ())
    kinds = (list,) if type(column[0]) is tuple else (list, tuple)  # a tuple of tuples has one item per row
    columns_follow = sizes is not None and all(
        type(item) in kinds and len(item) == rows for value, rows in zip(column, sizes, strict=True) for item in value
    )
    if columns_follow and (type(column[0]) is tuple or not follows):
        return False
    if follows and not columns_follow:
        return True
    what = type(column[0]).__name__
    returned = f"returned a {what} of {list_values(list(map(len, column)))} items without tensors"
    if columns_follow:
        why = f"had {list_values(sizes or [])} rows, and both the {what} and each list in it follow. Return a tensor"
    elif sizes is None:
        why = f"{returned}, and gather alone has no row counts to compare with. Return a tensor"
    else:
        why = f"had {list_values(sizes or [])} rows and {returned}. Return a tensor, or a list with one item per row"
    msg = f"the lanes {why}"
    raise Refusal(msg)


def _are_detections(column: Sequence[Any], sizes: Sequence[int] | None, around: Flat | None) -> bool:
    """True if lists with tensors have one item per row: as many dicts as rows, and their tensors without the rows.

    torch joins lists item by item. Two heads of a model on two rows are such lists: their tensors have the rows.

    Raises:
        Refusal: If lists may be both: as many 0-d tensors or vectors as rows, dicts of tensors with the rows, or tensors of
            different sizes and unknown rows. If lists of tensors have one item per row: with another number of rows they
            might look like the heads of a model.
    """
    if type(column[0]) is not list:
        return False  # a tuple is a structure
    items = [[flatten(item) for item in value] for value in column]
    follows = list(map(len, column)) == list(sizes or ())
    kinds = [[(spec, *(leaf is None for leaf in leaves)) for leaves, spec in value] for value in items]
    if follows and any(len(set(place)) > 1 for place in zip(*kinds, strict=False)):
        return True  # nothing that torch joins item by item
    tensors = [[leaf for leaves, _ in value for leaf in leaves if isinstance(leaf, torch.Tensor)] for value in items]
    fewest_dims = min((leaf.ndim for found in tensors for leaf in found), default=0)
    is_bare = isinstance(next(item for value in column for item in value), torch.Tensor)
    if follows and (fewest_dims == 0 or (fewest_dims == 1 and is_bare)):
        what = "0-d tensors" if fewest_dims == 0 else "vectors"
        raise _both(column, sizes, f"with {what}, which are those of single rows or of all rows together")
    if fewest_dims == 0:
        return False
    counts = [{leaf.shape[0] for leaf in found} for found in tensors]
    are_alike = _are_alike([item for value in items for item in value])
    if sizes is None and are_alike and any(len(each) > 1 for each in counts):
        msg = (
            "the lanes returned lists of tensors of different sizes, which may have one item per row, and gather alone "
            "has no row counts to compare with. Concatenate lists of detections, or return a tuple to join its items"
        )
        raise Refusal(msg)
    if not follows:
        return False
    has_rows = counts == [{each} for each in sizes or ()]
    first = next(item for value in column for item in value if item is not None)
    holds_tensors = isinstance(first, torch.Tensor | tuple | list)
    if has_rows and (not are_alike or holds_tensors):
        return False
    if has_rows and are_auxiliary(column[0], _tensors_by_key(around)):
        return False
    if are_alike and not has_rows and not holds_tensors:
        return True
    why = "whose tensors have the rows too" if has_rows else "whose tensors do not have the rows"
    if not are_alike:
        why = f"which differ, and {why}"
    raise _both(column, sizes, why)


def _tensors_by_key(around: Flat | None) -> dict[Any, Any]:
    """Return the leaves of an output by their last keys."""
    return {} if around is None else {path[-1]: leaf for path, leaf in zip(around[1].paths(), around[0], strict=True)}


def are_auxiliary(items: Sequence[Any], beside: Mapping[Any, Any]) -> bool:
    """True if dicts in a list repeat tensors next to the list: the same keys and shapes, as the `aux_outputs` of DETR."""
    return all(
        isinstance(item, Mapping) and item and all(_has_shape_of(beside.get(key), value) for key, value in item.items())
        for item in items
    )


def _has_shape_of(one: Any, other: Any) -> bool:
    return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and one.shape == other.shape


def _both(column: Sequence[Any], sizes: Sequence[int] | None, why: str) -> Refusal:
    """Return the refusal of lists with as many items as rows: they may be one item per row, or parts of every row."""
    kind = type(next(item for value in column for item in value if item is not None)).__name__
    msg = (
        f"the lanes had {list_values(sizes or [])} rows and returned as many items of type {kind}, {why}: one item per "
        "row, or parts of every row. Use parallel(model, devices): its unequal shards show the difference, and "
        'out_dims="items" declares one item per row. Return a tuple to join its items'
    )
    return Refusal(msg)


def holds_only_values(column: Sequence[Any]) -> bool:
    """True if no lane returned a tensor, or a value with rules of its own."""
    return not any(isinstance(leaf, (torch.Tensor, WholeLeaf)) for value in column for leaf in flatten(value)[0])


def _form_of(leaf: Any) -> object:
    """Return what tensors that can be concatenated on dim 0 have in common; of any other leaf, nothing."""
    return (leaf.dtype, leaf.ndim, leaf.shape[1:]) if isinstance(leaf, torch.Tensor) else None


def _are_alike(items: Sequence[tuple[Sequence[Any], Any]]) -> bool:
    """True if all flattened items have the same structure, and tensors at the same places that can be concatenated.

    A place may be None in some items.
    """
    if len({spec for _, spec in items}) > 1:
        return False
    places = zip(*(leaves for leaves, _ in items), strict=True)
    return all(len({_form_of(leaf) for leaf in place if leaf is not None}) <= 1 for place in places)
