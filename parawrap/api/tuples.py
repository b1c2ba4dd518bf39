"""`cat` and `transpose`: join and transpose tuples that hold one part per device.

The public names are those of the library tuple_parallel, the predecessor of these functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import optree
import torch

from parawrap._public import public
from parawrap.api._containers import (
    check_kinds,
    columns,
    container_kind,
    describe,
    is_container,
    is_list_per_row,
    items_of,
    plain_tuple,
    rebuilt,
    transpose_rows,
)
from parawrap.api.move_to_device import recursive_to
from parawrap.engine.concatenate import have_one_scale
from parawrap.errors import GatherError, ShardError
from parawrap.tree import tensors_in

__all__ = ["cat", "transpose"]


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

    A namedtuple of parts joins like a dict of parts, and nested containers follow the same rules. A list in a part has one
    item per row, such as the texts or the boxes of each image: lists are put together, and tuples are joined item by item.
    Each joined tensor is on the device of its first part. None stays None. Other values are not joined: the result holds
    the tuple of their parts.

    Args:
        returns: The parts.
        dim: The dim that the rows lie on.

    Raises:
        GatherError: If the parts differ in structure, or the shapes of tensors differ beyond ``dim``.

    >>> cat(((torch.zeros(3, 4), torch.zeros(2, 4)), (torch.tensor(1.0), torch.tensor(2.0))))[1]
    tensor([1., 2.])
    """
    if not _is_transposed(returns):
        return _join(tuple(returns), dim, "output")
    items = items_of(returns)
    _check_part_counts(items)
    return rebuilt(plain_tuple(returns), _join_items(items, dim, "output"))


@public
def transpose(rows: Iterable[Any]) -> Any:
    """Turn rows into columns, like ``zip(*rows)`` but without dropping items.

    - Tuples or lists give a tuple of tuples.
    - Namedtuples of one class give a namedtuple of tuples.
    - Dicts give a dict of tuples. A Mapping subclass keeps its type if it can be built from its items.
    - No rows give an empty tuple.

    Raises:
        ShardError: If rows differ in length, keys, or kind. The message names both rows.

    >>> transpose([(1, 2), (3, 4), (5, 6)])
    ((1, 3, 5), (2, 4, 6))
    >>> transpose([{"x": 1}, {"x": 2}])
    {'x': (1, 2)}
    """
    rows = tuple(rows)
    for position, row in enumerate(rows):
        if not is_container(row):
            _refuse_row(f"row {position} is {describe(row)}. Give every row as a tuple, a list, or a dict")
    return transpose_rows(rows, "row", _refuse_row) if rows else ()


def _refuse_row(reason: str) -> NoReturn:
    msg = f"cannot transpose: {reason}"
    raise ShardError(msg)


def _is_transposed(returns: Any) -> bool:
    """True if the outermost level holds the positions or keys of one output, not its parts."""
    if isinstance(returns, Mapping) or optree.is_namedtuple_instance(returns):
        return True
    return len(returns) > 0 and container_kind(returns[0]) is tuple and not all(map(is_list_per_row, returns))


def _check_part_counts(items: dict[Any, Any]) -> None:
    for key, parts in items.items():
        if container_kind(parts) is not tuple:
            msg = f"cannot join output[{key!r}]: it is {describe(parts)}. Give the tuple of its parts"
            raise GatherError(msg)
    counts = {key: len(parts) for key, parts in items.items()}
    if len(set(counts.values())) > 1:
        msg = f"cannot join outputs with different numbers of parts: {counts}. Return one part per device for each output"
        raise GatherError(msg)


def _join_items(items: dict[Any, Any], dim: int, place: str) -> dict[Any, Any]:
    return {key: _join(tuple(parts), dim, f"{place}[{key!r}]") for key, parts in items.items()}


def _join(parts: tuple[Any, ...], dim: int, place: str) -> Any:
    def refuse(reason: str) -> NoReturn:
        msg = f"cannot join {place}: {reason}. Return the same structure on every device"
        raise GatherError(msg)

    if not parts:
        refuse("it has no parts")
    check_kinds(parts, "part", refuse)
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return _join_tensors(parts, dim, place)
    if all(type(part) is list for part in parts):
        device = next((tensor.device for tensor in tensors_in(parts)), None)
        return [item if device is None else recursive_to(item, device) for part in parts for item in part]
    if is_container(first):
        return rebuilt(first, _join_items(columns(parts, "part", refuse), dim, place))
    return None if first is None else parts


def _join_tensors(parts: tuple[torch.Tensor, ...], dim: int, place: str) -> torch.Tensor:
    if len({_shape_except(part, dim) for part in parts}) > 1:
        shapes = ", ".join(str(tuple(part.shape)) for part in parts)
        msg = f"cannot join {place}: shapes {shapes} differ beyond dim {dim}. Pad them, or do not join them"
        raise GatherError(msg)
    here = [part.to(parts[0].device) for part in parts]
    if not have_one_scale(here):
        why = "the parts are quantized with different scales, or per channel"
        msg = f"cannot join {place}: {why}. Return tensor.dequantize()"
        raise GatherError(msg)
    if here[0].dim() == 0:
        return torch.stack(here)
    if not -here[0].dim() <= dim < here[0].dim():
        msg = f"cannot join {place}: shape {tuple(here[0].shape)} has no dim {dim}. Give a dim that it has"
        raise GatherError(msg)
    return torch.cat(here, dim)


def _shape_except(tensor: torch.Tensor, dim: int) -> tuple[int | None, ...]:
    """Return the shape with None in place of ``dim``. Tensors with equal results can be joined on ``dim``."""
    joined = dim % max(tensor.dim(), 1)
    return tuple(None if position == joined else size for position, size in enumerate(tensor.shape))
