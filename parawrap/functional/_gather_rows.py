"""`gather_rows`: collect the results for all rows of a dataset from the ranks that evaluated them."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, Sampler, SequentialSampler

from parawrap.errors import GatherError
from parawrap.functional._collectives import find_difference, gather_objects, require_group
from parawrap.functional._rank_samplers import RankSampler
from parawrap.tree import WholeLeaf, addresses, flatten, replace_nodes, unflatten

T = TypeVar("T")

_CPU = torch.device("cpu")


class _Report(NamedTuple):
    """What a rank sends to the others: the indices of its rows, and the addresses and columns of its results."""

    indices: list[int]
    places: list[str]
    columns: list[Any]


def gather_rows(tree: T, sampler: Sampler[Any] | DataLoader[Any] | None) -> T:
    """Return the rows of the whole dataset in its order, each row once, from the rows of all ranks.

    A padding sampler gives some rows to two ranks. The values of the lower rank count then. Rows travel through
    ``torch.distributed.all_gather_object``, which pickles them.

    Args:
        tree: This rank's results: a tensor with the rows on dim 0, a list with one item per row, or a tuple, dict, or
            dataclass of these. An item of a list is any value that can be pickled. The rows are in the order of this rank's
            sampler. A rank without rows gives empty tensors and lists, of any dtype and shape.
        sampler: The sampler that gave this rank its rows: from `get_dataset_sampler`, torch's DistributedSampler, or a
            loader from `shard_loader`. Call `gather_rows` before the loader's next epoch begins. With None, which
            `get_dataset_sampler` returns for one rank, the result is `tree`.

    Returns:
        The structure of `tree`, on every rank. Tensors are on the device of this rank's tensors, and have no autograd
        graph.

    Raises:
        GatherError: If the row count of a tensor or list differs from that of the sampler, ranks differ in structure, rows
            of a tensor differ in dtype or shape, or a row is missing on all ranks.
        TypeError: If a value is neither a dense tensor nor a list, or `sampler` does not show the rows of the other ranks.
        PlatformError: If there are several ranks, but ``ipc_groups=None`` forms no process group.

    Example:
        >>> import torch
        >>> from torch.utils.data import DataLoader
        >>> from parawrap import Platform, functional, wrapper
        >>> @wrapper(Platform(device="cpu", n_cpus=2))
        ... def squares():
        ...     loader = DataLoader(torch.arange(5), batch_size=2)
        ...     loader = functional.shard_loader(loader, pad=False)
        ...     outputs = torch.cat([batch**2 for batch in loader])
        ...     return functional.gather_rows(outputs, loader).tolist()
        >>> squares()
        RankResults([0, 1, 4, 9, 16], [0, 1, 4, 9, 16])
    """
    ranks = require_group("gather_rows")
    if sampler is None and ranks == 1:
        return tree
    indices, length = _find_indices(sampler, ranks)
    leaves, spec = flatten(replace_nodes(tree, lambda value: type(value) is list, WholeLeaf))
    places = addresses(spec, ("tree",))
    columns = [_check_column(leaf, place, len(indices)) for leaf, place in zip(leaves, places, strict=True)]
    reports = gather_objects(_Report(indices, places, [_move(column, _CPU) for column in columns]))
    if difference := find_difference([report.places for report in reports]):
        rank, here, there = difference
        msg = f"gather_rows: rank 0 has {here}, but rank {rank} has {there}. Give all ranks the same structure."
        raise GatherError(msg)
    order = _find_order([index for report in reports for index in report.indices], length)
    with_rows = {rank: report.columns for rank, report in enumerate(reports) if report.indices}
    found = [
        _put_in_order({rank: parts[number] for rank, parts in with_rows.items()}, order, column, place)
        for number, (column, place) in enumerate(zip(columns, places, strict=True))
    ]
    return unflatten(spec, found)  # type: ignore[no-any-return]


# --- the order of rows ---


def _find_indices(sampler: Any, ranks: int) -> tuple[list[int], int]:
    """Return the dataset indices of this rank's rows, and the length of the dataset."""
    if isinstance(sampler, DataLoader):
        loader: DataLoader[Any] = sampler
        is_by_batches = loader.batch_size is None and loader.batch_sampler is not None
        sampler = loader.batch_sampler if is_by_batches and not isinstance(loader.sampler, RankSampler) else loader.sampler
    if isinstance(sampler, DistributedSampler):
        rows = sampler.rows() if isinstance(sampler, RankSampler) else list(sampler)
        return rows, len(sampler.dataset)  # type: ignore[arg-type]
    if type(sampler) is SequentialSampler and ranks == 1:
        return list(sampler), len(sampler)
    msg = (
        f"gather_rows cannot know which rows a {type(sampler).__qualname__} gave to the {ranks} rank(s). "
        "Pass a loader from functional.shard_loader, or a sampler from functional.get_dataset_sampler."
    )
    raise TypeError(msg)


def _find_order(indices: list[int], length: int) -> list[int]:
    """Return the first position of each row of the dataset among the rows of all ranks."""
    first: dict[int, int] = {}
    for position, index in enumerate(indices):
        first.setdefault(index, position)
    missing = [index for index in range(length) if index not in first]
    if missing:
        some = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
        msg = (
            f"gather_rows: {len(missing)} row(s) of the dataset are missing on all ranks: {some}. "
            "Use a sampler with drop_last=False, and the same number of epochs on every rank."
        )
        raise GatherError(msg)
    if len(first) > length:
        msg = (
            f"gather_rows: another rank has row {max(first)}, but this rank's dataset has {length} row(s). "
            "Give all ranks one dataset."
        )
        raise GatherError(msg)
    return [first[index] for index in range(length)]


# --- columns ---


def _check_column(leaf: Any, place: str, rows: int) -> Any:
    """Return a tensor or a list of this many rows."""
    column = leaf.value if isinstance(leaf, WholeLeaf) else leaf
    is_tensor = isinstance(column, Tensor)
    if is_tensor and column.layout is torch.strided and not column.is_nested and not hasattr(column, "full_tensor"):
        if column.dim() == 0:
            msg = (
                f"{place} is a tensor without dims. Give a list with one tensor per row, or stack them; "
                "functional.reduce_metrics takes single numbers."
            )
            raise GatherError(msg)
    elif type(column) is not list:
        what = f"a tensor of {column.layout}" if is_tensor else f"a {type(column).__qualname__}"
        msg = f"{place} is {what}. gather_rows takes dense tensors with the rows on dim 0, and lists with one item per row"
        raise TypeError(msg)
    if len(column) != rows:
        kind = "tensor" if is_tensor else "list"
        msg = (
            f"{place} is a {kind} of {len(column)} row(s), but the sampler gave this rank {rows}. Give the results of one "
            "whole epoch, from a loader with drop_last=False: one list item per row, the outputs of batches concatenated, "
            "and several columns as a tuple or dict."
        )
        raise GatherError(msg)
    return column


def _move(column: Any, device: torch.device) -> Any:
    """Return a column with its tensors on a device, without their graphs."""
    return replace_nodes(column, lambda node: isinstance(node, Tensor), lambda tensor: tensor.detach().to(device))


def _put_in_order(parts: dict[int, Any], order: list[int], own: Any, place: str) -> Any:
    """Return the rows of the ranks that have some, in the order of the dataset, on the device of this rank's column."""
    kinds = {rank: _kind_of(part) for rank, part in parts.items()}
    first = next(iter(parts), 0)
    for rank, kind in kinds.items():
        if kind != kinds[first]:
            msg = (
                f"{place}: a row is {kinds[first]} on rank {first}, but {kind} on rank {rank}. Give all ranks the same "
                "structure and dtype. If rows differ in shape, give a list with one item per row, such as list(tensor)."
            )
            raise GatherError(msg)
    device = next((leaf.device for leaf in flatten(own)[0] if isinstance(leaf, Tensor)), _CPU)
    columns = list(parts.values()) or [own]
    if isinstance(columns[0], Tensor):
        return torch.cat(columns)[order].detach().to(device)
    items = [item for column in columns for item in column]
    return _move([items[position] for position in order], device)


def _kind_of(column: Any) -> str:
    return f"{column.dtype} {tuple(column.shape[1:])}" if isinstance(column, Tensor) else "an item of a list"
