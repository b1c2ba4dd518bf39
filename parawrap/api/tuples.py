"""`cat` and `transpose`: join and transpose tuples that hold one part per device.

The public names are those of the library tuple_parallel, the predecessor of these functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NoReturn

import optree
import torch

from parawrap._public import public
from parawrap.api._containers import (
    check_kinds,
    collect_columns,
    container_kind,
    describe_type,
    is_container,
    is_list_per_row,
    items_of,
    plain_tuple,
    rebuild,
    transpose_rows,
)
from parawrap.api.move_to_device import recursive_to
from parawrap.engine.columns import are_auxiliary
from parawrap.engine.concatenate import other_sizes, shapes_of
from parawrap.errors import GatherError, ShardError
from parawrap.tree import flatten, tensors_in


@public
def cat(returns: Any, dim: int = 0) -> Any:
    """Join the parts that ``TupleParallel`` or ``tuple_fn`` returned.

    Use it as a reduction: ``TupleParallel(model, devices, reduction=cat)``.

    =========================================  ==============================================
    ``returns``                                result
    =========================================  ==============================================
    ``(x1, x2)``                               ``x``, joined along ``dim``
    ``(x1, x2)`` of 0-d tensors (a loss)       a vector with one entry per part
    ``((x1, x2), (y1, y2))``                   ``(x, y)``
    ``({"x": x1}, {"x": x2})``                 ``{"x": x}``
    ``{"x": (x1, x2)}``, as from `tp_collate`  ``{"x": x}``
    ``(["a", "b"], ["c"])``                    ``["a", "b", "c"]``
    =========================================  ==============================================

    A namedtuple of parts joins like a dict of parts, and nested containers follow the same rules.
    Tuples are joined item by item. Lists are joined item by item if all their tensors have the rows
    of their part, as the levels of a feature pyramid or the auxiliary outputs of DETR. Other lists
    have one item per row, such as the texts or the boxes of each image, and are concatenated. The
    arguments of `TupleParallel` show the rows of a part; without them, the tensors next to the
    lists do. Each joined tensor is on the device of its first part. None stays None. Other values
    are not joined: the result holds the tuple of their parts.

    Args:
        returns: The parts.
        dim: The dim that the rows lie on.

    Raises:
        GatherError: If the parts differ in structure, if the shapes of tensors differ beyond
            ``dim``, or if nothing shows whether a list has one item per row or all rows in each
            item.

    >>> rows = torch.zeros(3, 4), torch.zeros(2, 4)
    >>> losses = torch.tensor(1.0), torch.tensor(2.0)
    >>> cat((rows, losses))[1]
    tensor([1., 2.])
    """
    return cat_rows(returns, dim, None)


def cat_rows(returns: Any, dim: int, rows: Sequence[set[int]] | None) -> Any:
    """Join parts like `cat`.

    `rows` has the possible row counts of each part; None if the arguments do not show them.
    """
    parts = _parts_of(plain_tuple(returns)) if _is_transposed(returns) else tuple(returns)
    rows = rows or rows_of_parts(parts, dim, reads_lists=False)
    return _PartJoin(dim, rows).join(parts, "output")


@public
def transpose(rows: Iterable[Any]) -> Any:
    """Turn rows into columns, like ``zip(*rows)`` but without dropping items.

    - Tuples or lists give a tuple of tuples.
    - Namedtuples of one class give a namedtuple of tuples.
    - Dicts give a dict of tuples. Other mappings keep their type.
    - No rows give an empty tuple.

    Args:
        rows: The rows. Their items may be any values.

    Raises:
        ShardError: If rows differ in length, keys, or kind. The message names both rows.

    >>> transpose([(1, 2), (3, 4), (5, 6)])
    ((1, 3, 5), (2, 4, 6))
    >>> transpose([{"x": 1}, {"x": 2}])
    {'x': (1, 2)}
    """
    rows = tuple(rows)
    if not rows:
        return ()
    for position, row in enumerate(rows):
        if not is_container(row):
            kind = describe_type(row)
            _refuse_row(f"row {position} is {kind}. Give every row as a tuple, a list, or a dict")
    return transpose_rows(rows, "row", _refuse_row)


def _refuse_row(reason: str) -> NoReturn:
    msg = f"cannot transpose: {reason}"
    raise ShardError(msg)


def _is_transposed(returns: Any) -> bool:
    """True if the outermost level holds the positions or keys of one output, not its parts."""
    # Parts are in plain tuples and lists only
    if isinstance(returns, Mapping) or optree.is_namedtuple_instance(returns):
        return True
    if len(returns) == 0 or container_kind(returns[0]) is not tuple:
        return False
    # A list with one item per row is a part itself, and does not hold parts
    return not all(map(is_list_per_row, returns))


def _parts_of(returns: Any) -> tuple[Any, ...]:
    """Return one output per part, from an output with a tuple of parts for each position or key."""
    items = items_of(returns)
    for key, parts in items.items():
        if container_kind(parts) is not tuple:
            kind = describe_type(parts)
            msg = f"cannot join output[{key!r}]: it is {kind}. Give the tuple of its parts"
            raise GatherError(msg)
    counts = {key: len(parts) for key, parts in items.items()}
    if len(set(counts.values())) > 1:
        msg = (
            f"cannot join outputs with different numbers of parts: {counts}. Return one part per "
            "device for each output"
        )
        raise GatherError(msg)
    found = []
    for part in zip(*items.values(), strict=True):
        values = dict(zip(items, part, strict=True))
        found.append(rebuild(returns, values))
    return tuple(found)


def rows_of_parts(parts: Sequence[Any], dim: int, *, reads_lists: bool) -> list[set[int]] | None:
    """Return the possible row counts of each part; None if a part does not show any.

    The tensors outside of lists have the rows on `dim`. If their sizes differ, they show nothing.

    Args:
        parts: The parts. With `reads_lists`, each is a tuple of values.
        dim: The dim that the rows lie on.
        reads_lists: Read the lists of a part without such tensors. A list may have one item per
            row, or all rows in each item, so both counts are possible.
    """
    rows = []
    for part in parts:
        sizes = _sizes_on(dim, _tensors_beside_lists(part))
        lengths: set[int] = set()
        if reads_lists and not sizes:
            sizes = _sizes_on(dim, tensors_in(part))
            lengths = {len(value) for value in part if type(value) is list}
        possible = sizes | lengths
        if len(sizes) > 1 or not possible:
            return None
        rows.append(possible)
    return rows


def _sizes_on(dim: int, tensors: Iterable[torch.Tensor]) -> set[int]:
    """Return the sizes of the tensors that have the dim."""
    return {tensor.shape[dim] for tensor in tensors if _has_dim(tensor, dim)}


def _tensors_beside_lists(value: Any) -> list[torch.Tensor]:
    """Return the tensors in tuples and mappings, but not in lists."""
    leaves, _ = flatten(value, lambda node: type(node) is list or not is_container(node))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _has_dim(tensor: torch.Tensor, dim: int) -> bool:
    return -tensor.ndim <= dim < tensor.ndim


class _PartJoin:
    """Joins parts along a dim. Never changed, so it is thread-safe.

    `rows` has the possible row counts of each part; None if they are unknown.
    """

    def __init__(self, dim: int, rows: Sequence[set[int]] | None) -> None:
        self._dim = dim
        self._rows = rows

    def join(
        self, parts: tuple[Any, ...], place: str, siblings: Mapping[Any, Any] | None = None
    ) -> Any:
        """Join the parts of one value.

        Args:
            parts: The parts of the value.
            place: The place of the value in the output, for messages.
            siblings: The first part of each value in the same container, by key. None for an output
                itself, and for an item of a list.
        """

        def refuse(reason: str) -> NoReturn:
            msg = f"cannot join {place}: {reason}. Return the same structure on every device"
            raise GatherError(msg)

        if not parts:
            msg = f"cannot join {place}: it has no parts. Give one part per device"
            raise GatherError(msg)
        check_kinds(parts, "part", refuse)
        first = parts[0]
        if first is None:
            return None
        if isinstance(first, torch.Tensor):
            return _join_tensors(parts, self._dim, place)
        # Lists may have one item per row. The items of tuples are always outputs of their own
        if all(type(part) is list for part in parts):
            return self._join_lists(parts, place, siblings or {})
        if is_container(first):
            firsts = items_of(first)
            joined = {}
            for key, column in collect_columns(parts, "part", refuse).items():
                joined[key] = self.join(column, f"{place}[{key!r}]", firsts)
            return rebuild(first, joined)
        return parts  # such as numbers: nothing shows how to join them

    def _join_lists(
        self, parts: tuple[list[Any], ...], place: str, siblings: Mapping[Any, Any]
    ) -> list[Any]:
        if self._has_rows_in_items(parts, place, siblings):
            columns = enumerate(zip(*parts, strict=True))
            return [self.join(column, f"{place}[{index}]") for index, column in columns]
        items = list(chain.from_iterable(parts))
        # Part by part: `tensors_in` has no order, and the device is that of the first part
        first = next(chain.from_iterable(map(tensors_in, parts)), None)
        return items if first is None else [recursive_to(item, first.device) for item in items]

    def _has_rows_in_items(
        self, parts: tuple[list[Any], ...], place: str, siblings: Mapping[Any, Any]
    ) -> bool:
        """True if each item of the lists has all rows; False if there is one item per row.

        The part of two images may be ``[level_0, level_1]`` of a feature pyramid, with two rows in
        each item, or ``[boxes_of_image_0, boxes_of_image_1]``.

        Raises:
            GatherError: If both are possible.
        """
        counts = self._row_counts(parts)
        if counts is None or not self._may_be_rows(counts):
            return False
        # Auxiliary outputs, as of DETR, repeat the keys and shapes next to their list
        if are_auxiliary(parts[0], siblings):
            return True
        # Both are possible if each list also has as many items as its part has rows
        if self._may_be_rows([len(part) for part in parts]):
            msg = (
                f"cannot join {place}: its parts are lists of {len(parts[0])} items, whose "
                f"tensors have {', '.join(map(str, counts))} rows: one item per row, or all rows "
                "in each item. Return a tuple to join its items, or a tensor instead of one item "
                "per row"
            )
            raise GatherError(msg)
        return True

    def _may_be_rows(self, counts: list[int]) -> bool:
        """True if each number may be the row count of its part, as far as row counts are known."""
        if self._rows is None:
            return True
        return all(count in possible for count, possible in zip(counts, self._rows, strict=True))

    def _row_counts(self, parts: tuple[list[Any], ...]) -> list[int] | None:
        """Return the size of the tensors of each part on the dim of rows.

        None if a part has no tensor, if its tensors differ in size, or if the parts have different
        numbers of items.
        """
        if len({len(part) for part in parts}) > 1:
            return None
        counts = []
        for part in parts:
            tensors = list(tensors_in(part))
            if not all(_has_dim(tensor, self._dim) for tensor in tensors):
                return None
            sizes = _sizes_on(self._dim, tensors)
            if len(sizes) != 1:
                return None
            (size,) = sizes
            counts.append(size)
        return counts


def _join_tensors(parts: tuple[torch.Tensor, ...], dim: int, place: str) -> torch.Tensor:
    """Concatenate tensors, or stack them if they are 0-d, on the device of the first one."""
    if len({(part.dim(), other_sizes(part.shape, dim)) for part in parts}) > 1:
        msg = (
            f"cannot join {place}: shapes {shapes_of(parts)} differ beyond dim {dim}. Pad them, or "
            "do not join them"
        )
        raise GatherError(msg)
    first = parts[0]
    if first.is_quantized:
        msg = (
            f"cannot join {place}: the parts are quantized, and may have different scales. Return "
            "tensor.dequantize()"
        )
        raise GatherError(msg)
    moved = [part.to(first.device) for part in parts]
    if first.dim() == 0:  # such as losses: one entry per part
        return torch.stack(moved)
    if not _has_dim(first, dim):
        msg = (
            f"cannot join {place}: shape {tuple(first.shape)} has no dim {dim}. Give a dim that "
            "it has"
        )
        raise GatherError(msg)
    return torch.cat(moved, dim)
