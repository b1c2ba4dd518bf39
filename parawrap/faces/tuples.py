"""Values in tuple form, one part a device: join them, transpose them.

Knows tuples, lists, namedtuples and mappings of tensors; refuses to know modules, lanes and plans. The public names are
those of the library tuple_parallel, which this succeeds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import optree
import torch

from parawrap.errors import GatherError, ShardError
from parawrap.faces._containers import (
    check_kinds,
    columns,
    described,
    is_container,
    items_of,
    kind_of,
    plain_tuple,
    rebuilt,
    transposed,
)

__all__ = ["cat", "transpose"]


def cat(returns: Any, dim: int = 0) -> Any:
    """Join what ``TupleParallel`` or ``tuple_fn`` returned: ``TupleParallel(model, devices, reduction=cat)``.

    =========================================================  ======================================
    ``returns``                                                the result
    =========================================================  ======================================
    ``(x1, x2)``, tensors: ``forward`` returned a tensor       ``x``, joined along ``dim``
    0-d tensors: it returned a loss                            a vector with an entry per part
    ``((x1, x2), (y1, y2))``: it returned a tuple or list      ``(x, y)``
    ``({"x": x1}, {"x": x2})``: it returned a dict             ``{"x": x}``
    a dict or namedtuple of tuples, as ``tp_collate`` has it   that dict or namedtuple of joined values
    =========================================================  ======================================

    Deeper levels follow the same rule per position or key. Every joined tensor lies on the device of its first part.
    None stays None; any other value that is no tensor cannot be joined and stays a tuple of its parts.

    Raises:
        GatherError: parts of unequal structure, or tensors whose shapes differ elsewhere than on ``dim``.

    >>> cat(((torch.zeros(3, 4), torch.zeros(2, 4)), (torch.tensor(1.0), torch.tensor(2.0))))[1]
    tensor([1., 2.])
    """
    if not _is_transposed(returns):
        return _joined(tuple(returns), dim, "output")
    items = items_of(returns)
    _check_part_counts(items)
    return rebuilt(plain_tuple(returns), _joined_items(items, dim, "output"))


def transpose(rows: Iterable[Any]) -> Any:
    """Turn rows into columns: what ``zip(*rows)`` does, but without dropping anything.

    Rows of tuples or lists give a tuple of tuples, rows of one namedtuple class that namedtuple of tuples, rows of
    dicts a dict of tuples (a Mapping subclass keeps its type where it can). No rows give an empty tuple.

    Raises:
        ShardError: rows of unequal lengths, keys or kinds; the message names both rows.

    >>> transpose([(1, 2), (3, 4), (5, 6)])
    ((1, 3, 5), (2, 4, 6))
    >>> transpose([{"x": 1}, {"x": 2}])
    {'x': (1, 2)}
    """
    rows = tuple(rows)
    for position, row in enumerate(rows):
        if not is_container(row):
            _refuse_row(f"row {position} is {described(row)}: give every row as a tuple, a list or a dict")
    return transposed(rows, "row", _refuse_row) if rows else ()


def _refuse_row(reason: str) -> NoReturn:
    msg = f"cannot transpose: {reason}"
    raise ShardError(msg)


def _is_transposed(returns: Any) -> bool:
    """Whether the outermost level is the positions or keys of one output, not the parts of it."""
    if isinstance(returns, Mapping) or optree.is_namedtuple_instance(returns):
        return True
    return len(returns) > 0 and kind_of(returns[0]) is tuple


def _check_part_counts(items: dict[Any, Any]) -> None:
    for key, parts in items.items():
        if kind_of(parts) is not tuple:
            msg = f"cannot join output[{key!r}]: it is {described(parts)}, not the tuple of its parts"
            raise GatherError(msg)
    counts = {key: len(parts) for key, parts in items.items()}
    if len(set(counts.values())) > 1:
        msg = f"cannot join outputs of unequal numbers of parts: {counts}: return one part per device for each of them"
        raise GatherError(msg)


def _joined_items(items: dict[Any, Any], dim: int, place: str) -> dict[Any, Any]:
    return {key: _joined(tuple(parts), dim, f"{place}[{key!r}]") for key, parts in items.items()}


def _joined(parts: tuple[Any, ...], dim: int, place: str) -> Any:
    def refuse(reason: str) -> NoReturn:
        msg = f"cannot join {place}: {reason}; return the same structure on every device"
        raise GatherError(msg)

    if not parts:
        refuse("it has no parts")
    check_kinds(parts, "part", refuse)
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return _joined_tensors(parts, dim, place)
    if is_container(first):
        return rebuilt(first, _joined_items(columns(parts, "part", refuse), dim, place))
    return None if first is None else parts


def _joined_tensors(parts: tuple[torch.Tensor, ...], dim: int, place: str) -> torch.Tensor:
    if len({_shape_beside(part, dim) for part in parts}) > 1:
        shapes = ", ".join(str(tuple(part.shape)) for part in parts)
        msg = f"cannot join {place}: shapes {shapes} differ elsewhere than on dim {dim}: pad them, or do not join"
        raise GatherError(msg)
    here = [part.to(parts[0].device) for part in parts]
    if here[0].dim() == 0:
        return torch.stack(here)
    if not -here[0].dim() <= dim < here[0].dim():
        msg = f"cannot join {place}: shape {tuple(here[0].shape)} has no dim {dim}: give a dim that it has"
        raise GatherError(msg)
    return torch.cat(here, dim)


def _shape_beside(tensor: torch.Tensor, dim: int) -> tuple[int | None, ...]:
    """The shape with ``dim`` blanked out, so that equality means that the tensors can be joined on it."""
    joined = dim % max(tensor.dim(), 1)
    return tuple(None if position == joined else size for position, size in enumerate(tensor.shape))
