"""`gather_rows`: collect the results for all rows of a dataset from the ranks."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, Sampler, SequentialSampler

from parawrap.errors import GatherError
from parawrap.functional._collectives import check_equal, gather_objects, require_group
from parawrap.functional._rank_samplers import RankSampler
from parawrap.tree import WholeLeaf, addresses, flatten, is_dense, replace_nodes, unflatten

T = TypeVar("T")

_CPU = torch.device("cpu")


def gather_rows(tree: T, sampler: Sampler[Any] | DataLoader[Any] | None) -> T:
    """Return the rows of the whole dataset in its order, each row once, from the rows of all ranks.

    A padding sampler gives some rows to two ranks. The values of the lower rank count then. Rows
    travel through ``torch.distributed.all_gather_object``, which pickles them.

    Args:
        tree: This rank's results: a tensor with the rows on dim 0, a list with one item per row, or
            a tuple, dict, or dataclass of these. An item of a list is any value that can be
            pickled. The rows are in the order of this rank's sampler. A rank without rows gives
            empty tensors and lists, of any dtype and shape.
        sampler: The sampler that gave this rank its rows: from `get_dataset_sampler`, torch's
            DistributedSampler, or a loader from `shard_loader`. Call `gather_rows` before the
            loader's next epoch begins. With None, which `get_dataset_sampler` returns for one rank,
            the result is `tree`.

    Returns:
        The structure of `tree`, on every rank. Tensors are on the device of this rank's tensors,
        and have no autograd graph.

    Raises:
        GatherError: If the row count of a tensor or list differs from that of the sampler, ranks
            differ in structure, rows of a tensor differ in dtype or shape, or a row is missing on
            all ranks.
        TypeError: If a value is neither a dense tensor nor a list, or `sampler` does not show the
            rows of the other ranks.
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
    columns = [
        _check_column(leaf, place, len(indices)) for leaf, place in zip(leaves, places, strict=True)
    ]
    reports = gather_objects((indices, places, [_move(column, _CPU) for column in columns]))
    check_equal(
        "gather_rows",
        [", ".join(places) for _, places, _ in reports],
        "Give all ranks the same structure.",
    )
    order = _find_order([index for indices, _, _ in reports for index in indices], length)
    kinds = [
        ", ".join(map(_describe, places, parts)) if indices else None
        for indices, _, parts in reports
    ]
    check_equal(
        "gather_rows",
        kinds,
        "If rows differ in shape, give a list with one item per row, such as list(tensor).",
    )
    with_rows = [parts for indices, _, parts in reports if indices] or [columns]
    gathered = [
        _put_in_order(list(parts), order, column)
        for *parts, column in zip(*with_rows, columns, strict=True)
    ]
    return unflatten(spec, gathered)  # type: ignore[no-any-return]


# --- the order of rows ---


def _find_indices(sampler: Any, ranks: int) -> tuple[list[int], int]:
    """Return the dataset indices of this rank's rows, and the length of the dataset."""
    if isinstance(sampler, DataLoader):
        loader: DataLoader[Any] = sampler
        is_by_batches = loader.batch_size is None and loader.batch_sampler is not None
        sampler = (
            loader.batch_sampler
            if is_by_batches and not isinstance(loader.sampler, RankSampler)
            else loader.sampler
        )
    if isinstance(sampler, DistributedSampler):
        rows = sampler.rows() if isinstance(sampler, RankSampler) else sampler
        return list(rows), len(sampler.dataset)  # type: ignore[arg-type]
    if type(sampler) is SequentialSampler and ranks == 1:
        return list(sampler), len(sampler)
    msg = (
        f"gather_rows cannot know which rows a {type(sampler).__qualname__} gave to the {ranks} "
        "rank(s). Pass a loader from functional.shard_loader, or a sampler from "
        "functional.get_dataset_sampler."
    )
    raise TypeError(msg)


def _find_order(indices: list[int], length: int) -> list[int]:
    """Return the first position of each row of the dataset among the rows of all ranks."""
    first: dict[int, int] = {}
    for position, index in enumerate(indices):
        first.setdefault(index, position)
    missing = [index for index in range(length) if index not in first]
    if missing or len(first) > length:
        msg = (
            f"gather_rows: {len(missing)} row(s) of the dataset are missing on all ranks, and "
            f"{len(first) - length + len(missing)} row(s) are not in this rank's dataset. Give "
            "all ranks one dataset, a sampler with drop_last=False, and the same number of "
            "epochs."
        )
        raise GatherError(msg)
    return [first[index] for index in range(length)]


# --- columns ---


def _check_column(leaf: Any, place: str, rows: int) -> Any:
    """Return a tensor or a list of this many rows."""
    column = leaf.value if isinstance(leaf, WholeLeaf) else leaf
    kind = type(column).__qualname__
    has_rows = isinstance(column, Tensor) and is_dense(column) and column.dim() > 0
    is_shard = hasattr(column, "full_tensor")
    if type(column) is not list and (is_shard or not has_rows):
        msg = (
            f"{place} is a {kind}. gather_rows takes dense tensors with rows on dim 0, and lists "
            "with one item per row"
        )
        raise TypeError(msg)
    if len(column) != rows:
        msg = (
            f"{place} is a {kind} of {len(column)} row(s), but the sampler gave this rank {rows}. "
            "Give the results of one whole epoch, from a loader with drop_last=False: one list "
            "item per row, the outputs of batches concatenated, and several columns as a tuple "
            "or dict."
        )
        raise GatherError(msg)
    return column


def _move(column: Any, device: torch.device) -> Any:
    """Return a column with its tensors on a device, without their graphs."""
    return replace_nodes(
        column, lambda node: isinstance(node, Tensor), lambda tensor: tensor.detach().to(device)
    )


def _describe(place: str, column: Any) -> str:
    """Describe the rows of a column. Lists may hold rows of different shapes."""
    if isinstance(column, Tensor):
        return f"{place} with rows of {column.dtype} and shape {tuple(column.shape[1:])}"
    return f"a list {place}"


def _put_in_order(parts: list[Any], order: list[int], own: Any) -> Any:
    """Return the rows of all ranks in the order of the dataset, on the device of the column."""
    device = next((leaf.device for leaf in flatten(own)[0] if isinstance(leaf, Tensor)), _CPU)
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)[order].detach().to(device)
    items = [item for column in parts for item in column]
    return _move([items[position] for position in order], device)
