"""`gather_rows`: collect the results for all rows of a dataset from the ranks that evaluated them."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, Sampler, SequentialSampler

from parawrap.errors import GatherError
from parawrap.functional._collectives import find_difference, gather_objects, require_group
from parawrap.functional._rank_samplers import ContiguousShare, EachEpoch, OrderedShare
from parawrap.functional._seeded_loader import share_of
from parawrap.tree import WholeLeaf, addresses, flatten, replace_nodes, unflatten

__all__ = ["gather_rows"]

T = TypeVar("T")

_PLAIN = (str, bool, int, float)  # JSON keeps these, and None
_ITEM = "an item of a list"
_CPU = torch.device("cpu")


class _Column(NamedTuple):
    """One leaf of a rank's tree.

    Attributes:
        kind: The dtype and shape of a row of a tensor, or the type of an item of a list. The same on every rank with rows.
        rows: The leaf, with its tensors on the CPU and without their graphs.
    """

    kind: str
    rows: Any


class _Report(NamedTuple):
    """What a rank sends to the others."""

    indices: list[int]
    places: list[str]
    columns: list[_Column]


def gather_rows(tree: T, sampler: Sampler[Any] | DataLoader[Any] | None) -> T:
    """Return the rows of the whole dataset in its order, each row once, from the rows of all ranks.

    A padding sampler gives some rows to two ranks. The values of the lower rank count then. Rows travel through
    ``torch.distributed.all_gather_object``, which pickles them.

    Args:
        tree: This rank's results: a tensor with the rows on dim 0, a list with one item per row, or a tuple, dict, or
            dataclass of these. An item of a list is None, a tensor of any shape, or any value that can be pickled. The rows
            are in the order of this rank's sampler. A rank without rows gives empty tensors and lists, of any dtype and
            shape.
        sampler: The sampler that gave this rank its rows: from `get_dataset_sampler`, torch's DistributedSampler, or a
            loader from `shard_loader`. Call `gather_rows` before the loader's next epoch begins. With None, which
            `get_dataset_sampler` returns for one rank, the result is `tree`.

    Returns:
        The structure of `tree`, on every rank. Tensors are on the device of this rank's tensors, and have no autograd
        graph.

    Raises:
        GatherError: If the row count of a tensor or list differs from that of the sampler, ranks differ in structure or
            dtype, rows of a tensor differ in shape, items of a list differ in type, dtype, or dims, or a row is missing on
            all ranks.
        TypeError: If a value is neither a dense tensor nor a list, or `sampler` does not show the rows of the other ranks.
        PlatformError: If there are several ranks, but ``ipc_groups=None`` forms no process group.

    Example:
        >>> import torch
        >>> from torch.utils.data import DataLoader
        >>> from parawrap import Platform, functional, wrapper
        >>> @wrapper(Platform(device="cpu", n_cpus=2))
        ... def squares():
        ...     loader = functional.shard_loader(DataLoader(torch.arange(5), batch_size=2), pad=False)
        ...     return functional.gather_rows(torch.cat([batch**2 for batch in loader]), loader).tolist()
        >>> squares()
        RankResults([0, 1, 4, 9, 16], [0, 1, 4, 9, 16])
    """
    ranks = require_group("gather_rows")
    if sampler is None and ranks == 1:
        return tree
    indices, whole = _find_indices(sampler, ranks)
    leaves, spec = flatten(replace_nodes(tree, _is_list_of_rows, WholeLeaf))
    places = addresses(spec, ("tree",))
    columns = [_make_column(leaf, place, len(indices)) for leaf, place in zip(leaves, places, strict=True)]
    reports = gather_objects(_Report(indices, places, columns))
    if difference := find_difference([report.places for report in reports]):
        rank, here, there = difference
        msg = f"gather_rows: rank 0 has {here}, but rank {rank} has {there}. Give all ranks the same structure."
        raise GatherError(msg)
    order = _find_order([index for report in reports for index in report.indices], whole)
    found = []
    for leaf, place, *others in zip(leaves, places, *(report.columns for report in reports), strict=True):
        with_rows = {rank: column for rank, column in enumerate(others) if reports[rank].indices}
        _check_kinds(place, {rank: column.kind for rank, column in with_rows.items()})
        found.append(_put_in_order([column.rows for column in with_rows.values()], order, leaf))
    return unflatten(spec, found)  # type: ignore[no-any-return]


# --- the order of rows ---


def _find_indices(sampler: Any, ranks: int) -> tuple[list[int], Iterable[int]]:
    """Return the dataset indices of this rank's rows, and the sorted indices of all rows."""
    share = share_of(sampler) if isinstance(sampler, DataLoader) else sampler
    share = share.share if isinstance(share, EachEpoch) else share
    if isinstance(share, DistributedSampler):
        return list(share), range(len(share.dataset))  # type: ignore[arg-type]
    if isinstance(share, ContiguousShare):
        return list(share), share.whole
    if isinstance(share, OrderedShare):
        return _flat(share), sorted(set(_flat(share.order)))
    if type(share) is SequentialSampler and ranks == 1:
        return list(share), range(len(share))
    msg = (
        f"gather_rows cannot know which rows a {type(share).__qualname__} gave to the {ranks} rank(s). "
        "Pass a loader from functional.shard_loader, or a sampler from functional.get_dataset_sampler."
    )
    raise TypeError(msg)


def _flat(items: Iterable[Any]) -> list[int]:
    """Flatten items that are indices or batches of indices."""
    found: list[int] = []
    for item in items:
        try:
            found += [operator.index(index) for index in (item if isinstance(item, (list, tuple)) else (item,))]
        except TypeError:
            msg = f"gather_rows orders rows by index, but the sampler gave {item!r}. Use a dataset with integer indices."
            raise TypeError(msg) from None
    return found


def _find_order(indices: list[int], whole: Iterable[int]) -> list[int]:
    """Return the first position of each row of the dataset among the rows of all ranks."""
    first: dict[int, int] = {}
    for position, index in enumerate(indices):
        first.setdefault(index, position)
    missing = [index for index in whole if index not in first]
    if missing:
        some = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
        msg = (
            f"gather_rows: {len(missing)} row(s) of the dataset are missing on all ranks: {some}. "
            "Use a sampler with drop_last=False, and the same number of epochs on every rank."
        )
        raise GatherError(msg)
    order = [first.pop(index) for index in whole]
    if first:
        msg = (
            f"gather_rows: another rank has row {min(first)}, which this rank's sampler never gives. "
            "Give all ranks one dataset."
        )
        raise GatherError(msg)
    return order


# --- columns ---


def _is_list_of_rows(value: Any) -> bool:
    """True for a list, which has one item per row, and for a plain tuple of strings or numbers."""
    return type(value) is list or (type(value) is tuple and all(isinstance(item, _PLAIN) for item in value))


def _make_column(leaf: Any, place: str, rows: int) -> _Column:
    if isinstance(leaf, WholeLeaf):
        return _make_column_of_items(leaf.value, place, rows)
    value = _require_dense(leaf, place)
    if value.dim() == 0:
        msg = (
            f"{place} is a tensor without dims. Give a list with one tensor per row, or stack them; "
            "functional.reduce_metrics takes single numbers."
        )
        raise GatherError(msg)
    if len(value) != rows:
        msg = (
            f"{place} has {len(value)} row(s), but the sampler gave this rank {rows} row(s). "
            "Give the results of one whole epoch, in the sampler's order, from a loader with drop_last=False."
        )
        raise GatherError(msg)
    return _Column(f"{value.dtype} {tuple(value.shape[1:])}", _move(value, _CPU))


def _make_column_of_items(items: Sequence[Any], place: str, rows: int) -> _Column:
    if len(items) != rows:
        msg = (
            f"{place} is a list of {len(items)} item(s), but the sampler gave this rank {rows} row(s), and a list has "
            "one item per row. Give several columns as a tuple or dict, and concatenate the outputs of batches."
        )
        raise GatherError(msg)
    kinds = {i: _kind_of(item) for i, item in enumerate(items) if item is not None}
    first = next(iter(kinds), 0)
    for i, kind in kinds.items():
        if kind != kinds[first]:
            msg = f"{place}[{first}] is {kinds[first]}, but {place}[{i}] is {kind}. Give all rows the same type and dtype."
            raise GatherError(msg)
    kind = f"{_ITEM}: {kinds[first]}" if kinds else _ITEM
    return _Column(kind, [_move(item, _CPU) for item in items])


def _kind_of(item: Any) -> str:
    return f"{item.dtype} with {item.dim()} dim(s)" if isinstance(item, Tensor) else type(item).__qualname__


def _require_dense(value: Any, place: str) -> Tensor:
    """Return the value if it is a dense tensor.

    Raises:
        TypeError: If it is not.
    """
    is_tensor = isinstance(value, Tensor)
    if not is_tensor or hasattr(value, "full_tensor") or value.is_nested or value.layout is not torch.strided:
        what = f"a tensor of {value.layout}" if is_tensor else f"a {type(value).__qualname__}"
        msg = f"{place} is {what}. gather_rows takes dense tensors with the rows on dim 0, and lists with one item per row"
        raise TypeError(msg)
    tensor: Tensor = value
    return tensor


def _move(value: Any, device: torch.device) -> Any:
    """Return a nested value with its tensors on a device, without their graphs."""

    def move(tensor: Tensor) -> Tensor:
        return tensor.detach().resolve_conj().resolve_neg().to(device).contiguous()

    return replace_nodes(value, lambda node: isinstance(node, Tensor), move)


def _check_kinds(place: str, kinds: dict[int, str]) -> None:
    """Raise if ranks with rows have rows of different kinds. A list of None agrees with every list."""
    first = max(kinds, key=lambda rank: len(kinds[rank]), default=0)
    for rank, kind in kinds.items():
        if not kinds[first].startswith(kind):
            msg = (
                f"{place}: a row is {kinds[first]} on rank {first}, but {kind} on rank {rank}. Give all ranks the same "
                "structure and dtype. If rows differ in shape, give a list with one item per row, such as list(tensor)."
            )
            raise GatherError(msg)


def _device_of(leaf: Any) -> torch.device:
    """Return the device of a leaf's first tensor; the CPU without one."""
    parts = flatten(leaf.value)[0] if isinstance(leaf, WholeLeaf) else [leaf]
    return next((part.device for part in parts if isinstance(part, Tensor)), _CPU)


def _put_in_order(rows: list[Any], order: list[int], leaf: Any) -> Any:
    """Return the rows of all ranks that have some, in the order of the dataset, as a value like `leaf`."""
    if not rows:
        return leaf.value if isinstance(leaf, WholeLeaf) else leaf.detach().clone()
    if isinstance(rows[0], Tensor):
        return torch.cat(rows)[order].to(_device_of(leaf))
    items = [item for part in rows for item in part]
    items = [_move(items[i], _device_of(leaf)) for i in order]
    return tuple(items) if isinstance(leaf, WholeLeaf) and isinstance(leaf.value, tuple) else items
